"""Write your own loss and optimizer, in ten lines each.

Run it: python examples/custom_loss_and_optimizer.py
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import scale

import graphopt
import graphopt.models
import passes


@dataclass(frozen=True)
class LogCosh(passes.Loss):
    """Take log cosh(p - t), which is about squared for small errors and absolute for large ones."""

    sharpness: float = 1.0

    def compare(self, op, prediction, target):
        distance = self.sharpness * (prediction - target)
        return (distance + op.Softplus(-2 * distance) - np.log(2)) / self.sharpness


@dataclass(frozen=True)
class SignMomentum(passes.Optimizer):
    """Take w - rate tanh(m / temperature), where m is the moving mean of the gradient."""

    beta: float = 0.9
    temperature: float = 0.01

    def slots(self):
        return {"mean": 0.0}

    def update(self, op, w, g, rate, t, mean):
        mean = self.beta * mean + (1 - self.beta) * g
        return w - rate * op.Tanh(mean / self.temperature), mean


def main() -> list[float]:
    x, y = load_diabetes(return_X_y=True)
    x, y = scale(x).astype(np.float32), scale(y).astype(np.float32)[:, None]
    model = graphopt.models.mlp((10,), 1, hidden=[16])
    step = graphopt.compile(model, loss=LogCosh(), optimizer=SignMomentum(learning_rate=3e-3))
    executor = graphopt.Executor(step)
    losses = [executor.step(x=x, target=y)["loss"] for _ in range(100)]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    return losses


if __name__ == "__main__":
    main()
