"""A writer of passes: a loss, a clipping, an optimizer and a gradient, each with a mistake, and then without."""

from __future__ import annotations

import in_torch
import numpy as np
import torch
from desk import Desk
from sklearn.datasets import load_digits

START = """
from dataclasses import dataclass
import numpy
import graphopt, passes
from graphopt import data, models

digits = data.digits().arrays
targets = numpy.eye(10, dtype="f4")[digits["target"]]

def train(loss=None, clip=None, optimizer=None, target=digits["target"]):
    parts = {"loss": loss or passes.CrossEntropy(), "clip": clip, "optimizer": optimizer or passes.SGD(0.1)}
    executor = graphopt.Executor(graphopt.compile(models.cnn((1, 8, 8), 10), **parts), native=False)
    rows = {"x": digits["x"][:200], "target": target[:200]}
    print(graphopt.fit(executor, rows, epochs=1, verbose=False)[-1]["loss"])
"""
LOSS = """
@dataclass(frozen=True)
class Squares(passes.Loss):
    def compare(self, op, prediction, target):
        return {}
train(loss=Squares(), target=targets)
"""
CLIP = """
@dataclass(frozen=True)
class Tanh(passes.Clip):
    def clip(self, op, model, gradients):
        return {}
train(clip=Tanh())
"""
OPTIMIZER = """
@dataclass(frozen=True)
class Momentum(passes.Optimizer):
    def slots(self):
        return {{"velocity": 0.0}}
    def update(self, op, w, g, rate, t, velocity):
        velocity = 0.9 * velocity + g
        return {}
train(optimizer=Momentum(0.1))
train(optimizer=passes.SGD(0.1, momentum=0.9))
"""
GRADIENT = """
@passes.gradient("", "Relu")
def relu(op, dy, x):
    return {}
train()
"""
TOGETHER = """
graphopt.save(models.linear((1, 8, 8), 10), "linear.onnx")
step = graphopt.compile("linear.onnx", loss=Squares(), clip=Tanh(), optimizer=Momentum(0.1))
executor = graphopt.Executor(step, native=False)
rows = ({"x": digits["x"][i : i + 32], "target": targets[i : i + 32]} for i in range(0, 320, 32))
print(*(float(executor.step(batch)["loss"]) for batch in rows))
"""
# a program, what it says by mistake, and what it should say
PROGRAMS = [
    (LOSS, "None", "(prediction - target) * (prediction - target)"),
    (CLIP, "op.Tanh(gradients)", "[op.Tanh(g) for g in gradients]"),
    (OPTIMIZER, "w - rate * velocity", "w - rate * velocity, velocity"),
    (GRADIENT, "dy * (x > 0)", "[dy * op.CastLike(op.Greater(x, op.CastLike(0.0, x)), dy)]"),
]


def play(desk: Desk) -> str:
    for program, mistaken, _ in PROGRAMS:
        desk.python(START + program.format(mistaken))
    told = sum("GraphoptError: " in refusal for refusal in desk.refusals)
    mistakes = len(desk.refusals)
    *first, _ = (program.format(right) for program, _, right in PROGRAMS)
    losses = desk.python(START + "".join(program.format(right) for program, _, right in PROGRAMS)).split()
    equal = len(losses) == 5 and losses[2] == losses[3]
    found = np.array(desk.python(START + "".join(first) + TOGETHER).split()[-10:], float)
    apart = np.max(np.abs(found / in_pytorch(desk) - 1))
    mended = f"mended, they train{'; the momentum is the built-in one to the bit' if equal else ', not as due'}"
    told_of = f"{told} of {mistakes} mistakes told in a line of graphopt's"
    return f"{told_of}; {mended}; 10 losses are PyTorch's to {apart:.0e}"


def in_pytorch(desk: Desk) -> np.ndarray:
    """Return the losses of a squared error, tanh of the gradients and SGD with momentum in PyTorch."""
    digits, net = load_digits(), in_torch.network(desk.folder / "linear.onnx")
    x = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    y = torch.nn.functional.one_hot(torch.tensor(digits.target)).float()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 320, 32)]
    return np.array(in_torch.losses(net, optimizer, batches, torch.nn.functional.mse_loss, torch.tanh))
