"""Edge: the file of an image model and a folder of pictures become a classifier that a program in C trains on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from desk import Desk
from sklearn.datasets import load_digits

NAMES = ("five", "six", "seven", "eight", "nine")
TO_FREE = """
import onnx
model = onnx.load("digits.onnx")
model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "n"
for node in model.graph.node:
    if node.op_type == "Reshape":
        raise SystemExit("a Reshape has the batch")
onnx.save(model, "free.onnx")
"""
TO_FEED = """
import numpy
from graphopt import data
rows = data.images("others", size=[16, 16]).arrays
rows["x"][:32].tofile("batches/image.bin")
rows["target"][:32].tofile("batches/target.bin")
"""


def play(desk: Desk) -> str:
    theirs = in_torch(prepare(desk.folder)[:-1], desk.folder)
    (desk.folder / "batches").mkdir()
    if desk.has("graphopt/cli/tuning"):
        desk.graphopt("tune", "digits.onnx", "photos", "folder=run")
        model = []
    else:
        model = ["model=digits.onnx", "data=images", "data.path=photos", "adapter=head"]
        desk.graphopt(*model, "folder=run")
        model.append("adapter.classes=5")
        desk.graphopt(*model, "folder=run")
        desk.command("rm", "photos/six/Thumbs.db")
        desk.graphopt(*model, "folder=run")
        model.append("data.size=[16,16]")
        desk.graphopt(*model, "folder=run")
        desk.python(TO_FREE)
        model[0] = "model=free.onnx"
        desk.graphopt(*model, "fit.epochs=100", "optimizer.learning_rate=0.01", "folder=run")
    said = desk.graphopt("evaluate", "folder=run", "data.path=others")
    accuracy = re.findall(r"accuracy +([0-9.]+)", said)

    desk.graphopt("hosts", "resume=run", "hosts.language=c", "folder=host") if not model else desk.graphopt(
        "hosts", *model, "hosts.language=c", "folder=host"
    )
    desk.command("make", "-s", "-C", "host/c", f"PYTHON={sys.executable}")
    desk.python(TO_FEED)
    said = desk.command("host/c/build/train", "host", "batches", "1", "saved.safetensors", "-", "image", "target")
    ours = f"accuracy {accuracy[-1] if accuracy else 'none'} on others (PyTorch {theirs:.3f})"
    return f"{ours}; C: {' '.join(said.split()[:4])}"


def in_torch(frozen: torch.nn.Sequential, folder: Path) -> float:
    """Return the accuracy on others of a head that PyTorch trains on the same features of all photos."""
    (x, y), (others, truth) = (rows(folder / name) for name in ("photos", "others"))
    head = torch.nn.Linear(96, len(NAMES))
    optimizer = torch.optim.AdamW(head.parameters(), 1e-2)
    with torch.no_grad():
        x, others = frozen(x), frozen(others)
    for _ in range(100):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(x[batch]), y[batch]).backward()
            optimizer.step()
    return float((head(others).argmax(1) == truth).float().mean())


def rows(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pictures of a folder, float32 [N, 3, 16, 16] from 0 to 1, and their class numbers."""
    places = sorted(folder.glob("*/*.png"))
    pictures = np.stack([np.asarray(PIL.Image.open(place)) for place in places]).transpose(0, 3, 1, 2)
    classes = [sorted(NAMES).index(place.parent.name) for place in places]
    return torch.tensor(pictures / 255, dtype=torch.float32), torch.tensor(classes)


def prepare(folder: Path) -> torch.nn.Sequential:
    """Write a network of the digits 0 to 4 with a batch of 1, and pictures of the others; return the network."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    pixels = torch.nn.functional.interpolate(torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], (16, 16))
    old = digits.target < len(NAMES)
    layers = [
        torch.nn.Conv2d(3, 16, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 96, 3, stride=2),
        torch.nn.ReLU(),
    ]
    pool = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    net = torch.nn.Sequential(*layers, *pool, torch.nn.Linear(96, 5))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            net(pixels[old].expand(-1, 3, -1, -1)), torch.tensor(digits.target[old])
        )
        loss.backward()
        optimizer.step()
    torch.onnx.export(
        net.eval(), (torch.rand(1, 3, 16, 16),), folder / "digits.onnx", dynamo=False, input_names=["image"]
    )
    for i in np.flatnonzero(~old):
        place = folder / ("photos" if i % 2 else "others") / NAMES[digits.target[i] - 5]
        place.mkdir(parents=True, exist_ok=True)
        gray = PIL.Image.fromarray((255 * pixels[i, 0].numpy()).astype(np.uint8))
        gray.convert("RGB").save(place / f"{i}.png")
    (folder / "photos" / "six" / "Thumbs.db").write_bytes(b"no picture")
    return net
