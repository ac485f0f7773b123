"""Train a tiny transformer to continue text, and let it write some, one character at a time.

Run it: python examples/text_transformer.py
"""

from __future__ import annotations

import math

import graphopt
import graphopt.models
import passes
from graphopt.data import Characters, text

CONTEXT = 32


def main() -> list[float]:
    epochs, batch_size, data = 2, 16, text(context=CONTEXT, characters=50_000)
    step = graphopt.compile(
        graphopt.models.transformer((CONTEXT,), Characters.size, width=32, heads=4, layers=1),
        loss=passes.CrossEntropy(axis=-1),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(learning_rate=5e-3, groups=(passes.Group("*.bias", weight_decay=0.0),)),
        schedule=passes.OneCycle(steps=epochs * math.ceil(0.9 * len(data) / batch_size)),
    )
    executor = graphopt.Executor(step, report=["loss"])
    losses = []
    for record in graphopt.fit(executor, data, epochs=epochs, batch_size=batch_size, validation=0.1):
        losses.append(record["validation_loss"])
        print(f"epoch {record['epoch']}  loss {record['loss']:.3f}  validation {losses[-1]:.3f}")
    print(repr(graphopt.generate(executor, "The ", tokenizer="characters", max_tokens=60)))
    return losses


if __name__ == "__main__":
    main()
