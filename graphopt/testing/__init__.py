"""Prove gradients and check passes, also your own.

`check_gradient` and `prove` compare gradients with finite differences, another program, and the runtime. `strict`
checks what passes promise, and what is remembered. `try_pass`, `try_loss`, `try_optimizer` and `try_gradient` try what
you have written, and return a table.

Imports `compiler`, `runtime` and `passes`; nothing imports it.
"""

from graphopt.graph.strictness import strict
from graphopt.testing.gradients import Proof, check_gradient, prove
from graphopt.testing.trials import Trial, Trials, try_gradient, try_loss, try_optimizer, try_pass

__all__ = [
    "Proof",
    "Trial",
    "Trials",
    "check_gradient",
    "prove",
    "strict",
    "try_gradient",
    "try_loss",
    "try_optimizer",
    "try_pass",
]
