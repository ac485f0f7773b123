"""Prove gradients, also of your own rules: against finite differences, another program, and the runtime.

Imports `compiler`, `runtime` and `passes`; nothing imports it.
"""

from graphopt.testing.gradients import Proof, check_gradient, prove

__all__ = ["Proof", "check_gradient", "prove"]
