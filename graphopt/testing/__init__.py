"""Prove gradients and check passes, also your own.

`check_gradient` and `prove` compare gradients with finite differences, another program, and the runtime. `strict`
checks what passes promise, and what is remembered.

Imports `compiler`, `runtime` and `passes`; nothing imports it.
"""

from graphopt.graph.strictness import strict
from graphopt.testing.gradients import Proof, check_gradient, prove

__all__ = ["Proof", "check_gradient", "prove", "strict"]
