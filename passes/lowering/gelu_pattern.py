"""Recognize a Gelu that exporters before opset 20 express with Erf."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from onnxscript.rewriter import RewriteRule, RewriteRuleSet

SCALED: list[Callable[[Any], Any]] = [lambda x: x / math.sqrt(2), lambda x: x * math.sqrt(0.5)]
GROUPED: list[Callable[[Any, Any], Any]] = [
    lambda x, phi: (x * phi) * 0.5,
    lambda x, phi: x * (phi * 0.5),
    lambda x, phi: (x * 0.5) * phi,
]


def _rule(scaled: Callable[[Any], Any], grouped: Callable[[Any, Any], Any]) -> RewriteRule:
    return RewriteRule(lambda op, x: grouped(x, op.Erf(scaled(x)) + 1.0), lambda op, x: op.Gelu(x))


# x (1 + erf(x / sqrt 2)) / 2, Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415
GELU = RewriteRuleSet([_rule(*forms) for forms in itertools.product(SCALED, GROUPED)], commute=True)
