"""The precision in which a run of the tests multiplies, and how far results of products may be from exact ones.

`GRAPHOPT_MATMUL_PRECISION=medium pytest tests/test_native*.py` runs the native tests in `medium`. Without instructions
for it, they run in `highest`.
"""

from __future__ import annotations

import numpy as np

from graphopt.targets.native import library
from graphopt.targets.native.precision import UNITS, chosen_precision, obstacle

PRECISION = "highest" if obstacle(chosen_precision(None)) else chosen_precision(None)
UNIT = UNITS.get(PRECISION, 2.0**-23)
FLOAT32 = 1e-5  # for sums of some thousand terms


FORMS = ("low_products", "paired", "gathered", "shifted")  # algorithms of bfloat16 numbers, in choice.h


def compute_in(form: str | None, monkeypatch, tmp_path_factory) -> None:
    """Compute all convolutions by one algorithm, as far as it can; None lets each have the one of least time."""
    if form is not None:  # in a cache of its own: another knows the graphs; compiled once for all forms
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "forms"))
        monkeypatch.setenv("ONLY_ALGORITHM", form)
        named = '#include <stdlib.h>\n#define ONLY_ALGORITHM getenv("ONLY_ALGORITHM")\n'
        monkeypatch.setattr(library, "_LIMITS", f"{library._LIMITS}{named}")


def product_error(precision: str = PRECISION) -> float:
    """Return how far an element of a product of random numbers may be from the exact one.

    It is relative to the root mean square of the result, in which an operand's rounding counts once. So a term of a
    thousand that is missing is noticed in each precision.
    """
    return 8 * UNITS[precision] if precision in UNITS else FLOAT32


def assert_near(found, expected, name: str = "", *, layers: int = 1, precision: str = PRECISION) -> None:
    """Compare results of products, within the rounding of operands in each of so many layers."""
    assert found.shape == expected.shape, name
    scale = np.sqrt(np.mean(np.square(expected, dtype=np.float64))) if expected.size else 0.0
    bound = layers * product_error(precision) * scale
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound, err_msg=name)


def assert_equal_in_float32(found, other, reason: str, *, layers: int = 1) -> None:
    """Compare two forms bit by bit; in a lower precision within its rounding, for a reason that is given."""
    if PRECISION == "highest":
        np.testing.assert_array_equal(found, other)
    else:
        assert_near(found, other, reason, layers=layers)


def pieces_of(x: np.ndarray, precision: str) -> list[np.ndarray]:
    """Return the bfloat16 numbers that stand for float32 numbers, the largest first, by their definition."""
    bits = x.astype(np.float32).view(np.uint32)
    if precision == "medium":  # ties to even
        return [((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)]
    high = ((bits + 0x8000) & 0xFFFF0000).view(np.float32)
    low = (x.astype(np.float32) - high).view(np.uint32)
    return [high, ((low + 0x8000) & 0xFFFF0000).view(np.float32)]


def exact_product(a: np.ndarray, b: np.ndarray, precision: str) -> np.ndarray:
    """Return the product that a precision defines, in float64."""
    if precision == "highest":
        return a.astype(np.float64) @ b.astype(np.float64)
    of_a, of_b = ([x.astype(np.float64) for x in pieces_of(each, precision)] for each in (a, b))
    return sum(of_a[i] @ of_b[j] for i in range(len(of_a)) for j in range(len(of_b) - i))
