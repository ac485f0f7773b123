"""Train a convolutional network on scikit-learn's handwritten digits, from Python instead of a recipe.

Run it: python examples/cnn_digits.py
"""

from __future__ import annotations

import graphopt
import graphopt.models
import passes
from graphopt.data import digits


def main() -> float:
    epochs, batch_size, data = 12, 32, digits()
    step = graphopt.compile(
        graphopt.models.cnn((1, 8, 8), 10, channels=(8, 16), hidden=64),
        loss=passes.CrossEntropy(),
        regularizer=passes.L2(1e-4, parameters="*.weight"),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(learning_rate=3e-3),
        schedule=passes.Cosine(steps=epochs * len(data) // batch_size, warmup=20),
    )
    executor = graphopt.Executor(step, report=["loss", "penalty", "gradient_norm", "learning_rate"])
    for record in graphopt.fit(executor, data, epochs=epochs, batch_size=batch_size):
        print("  ".join(f"{name} {record[name]:.4g}" for name in ("epoch", "loss", "learning_rate", "accuracy")))
    return record["accuracy"]


if __name__ == "__main__":
    main()
