"""Train a model on a device with artifacts for onnxruntime-training's Module and Optimizer, and read its weights back.

Any ONNX Runtime can write the artifacts. The program on the device may be in Python, C++, C#, Java, Swift or Kotlin.
Run it where onnxruntime-training is installed: python examples/on_device.py
"""

from __future__ import annotations

import tempfile

import numpy as np

import graphopt
import graphopt.models
import passes
from graphopt.data import digits

STEPS, BATCH = 200, 32


def main() -> dict[str, float]:
    model = graphopt.models.mlp((64,), 10, hidden=(64,))
    pipeline = graphopt.standard(
        loss=passes.CrossEntropy(),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.SGD(learning_rate=0.1, momentum=0.9),
    )
    images, labels = digits(images=False).arrays.values()
    random = np.random.default_rng(0)
    batches = [random.choice(len(images), BATCH, replace=False) for _ in range(STEPS)]

    with tempfile.TemporaryDirectory() as folder:
        graphopt.export_artifacts(model, pipeline, folder)

        # A program on the device does this.
        state, module, optimizer = graphopt.load_artifacts(folder)
        losses = []
        for rows in batches:
            module.train()
            losses.append(float(module(images[rows], labels[rows])))
            optimizer.step()
            module.lazy_reset_grad()
        state.save_checkpoint(state, f"{folder}/trained")

        trained = graphopt.from_checkpoint(model, f"{folder}/trained")

    executor = graphopt.Executor(pipeline(model))
    expected = [executor.step(x=images[rows], target=labels[rows])["loss"] for rows in batches]
    early = slice(20)  # later, rounding errors have grown
    difference = max(abs(a / b - 1) for a, b in zip(losses[early], expected[early], strict=True))
    (scores,) = graphopt.run(trained, {"x": images}).values()
    accuracy = float((scores.argmax(axis=1) == labels).mean())
    print(f"loss {losses[0]:.4g} to {losses[-1]:.4g}; 20 steps differ from the executor's by {difference:.1e} at most")
    print(f"accuracy of the model with the checkpoint's weights: {accuracy:.4f}")
    return {"difference": difference, "accuracy": accuracy}


if __name__ == "__main__":
    main()
