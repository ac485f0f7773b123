"""State facts about ONNX's operators that several passes need."""

from __future__ import annotations

# Operators that draw random numbers. Evaluators draw different ones; with a seed, an evaluator repeats its own.
DRAWING = frozenset(
    {
        "Bernoulli",
        "Multinomial",
        *(f"Random{kind}{form}" for kind in ("Normal", "Uniform") for form in ("", "Like")),
    }
)

# Operators that need not compute the same numbers when they run again.
RANDOM = DRAWING | {"Dropout"}

# Operators whose output is their input in another shape, so that a runtime needs no memory for it.
VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
