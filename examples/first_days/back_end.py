"""Back end without Python at run time: a folder for hosts trains in Node, and its losses are Python's."""

from __future__ import annotations

import json
import shutil

import in_torch
import numpy as np
import torch
from desk import Desk
from sklearn.datasets import load_digits

STEPS, ROWS = 20, 32
IN_NODE = """
import { readFileSync, writeFileSync } from "node:fs";
import * as ort from "onnxruntime-node";
import { Trainer } from "graphopt";
const batches = JSON.parse(readFileSync("batches.json"));
const trainer = await Trainer.create(ort, "host");
const losses = [];
for (const { x, target } of batches) losses.push((await trainer.step({ x: Float32Array.from(x), target })).loss);
writeFileSync("checkpoint.safetensors", await trainer.save());
console.log(JSON.stringify(losses));
"""
IN_PYTHON = """
import json, numpy, graphopt
graphopt.save(graphopt.models.mlp((1, 8, 8), 10), "mlp.onnx")
executor = graphopt.Executor("compiled/step.onnx", native=False)
read = lambda batch: {"x": numpy.array(batch["x"], "f4").reshape(-1, 1, 8, 8), "target": numpy.array(batch["target"])}
print([float(executor.step(read(batch))["loss"]) for batch in json.load(open("batches.json"))])
"""


def play(desk: Desk) -> str:
    digits, batches = load_digits(), []
    for i in range(STEPS):
        rows = slice(i * ROWS, (i + 1) * ROWS)
        batches.append({"x": (digits.data[rows] / 16).ravel().tolist(), "target": digits.target[rows].tolist()})
    (desk.folder / "batches.json").write_text(json.dumps(batches))
    if shutil.which("npm") is None:
        return "no npm"
    model = ["model=mlp", "data=digits"]
    desk.graphopt("hosts", *model, "hosts.language=javascript", "folder=host")
    desk.command("npm", "install", "--silent", "./host/javascript", "onnxruntime-node")
    if desk.refusals:  # its install script downloads libraries for GPUs
        desk.command("npm", "install", "--silent", "--ignore-scripts", "./host/javascript", "onnxruntime-node")
    (desk.folder / "train.mjs").write_text(IN_NODE)
    desk.lines += len(IN_NODE.strip().splitlines())
    found = json.loads(desk.command("node", "train.mjs").strip().splitlines()[-1])
    desk.graphopt("compile", *model, "folder=compiled")
    expected = json.loads(desk.python(IN_PYTHON).strip().splitlines()[-1])
    net = in_torch.network(desk.folder / "mlp.onnx")
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    pairs = [(torch.tensor(batch["x"]).reshape(-1, 1, 8, 8), torch.tensor(batch["target"])) for batch in batches]
    theirs = in_torch.losses(net, optimizer, pairs)
    apart, from_torch = (np.max(np.abs(np.array(found) / other - 1)) for other in (expected, theirs))
    ends = f"{STEPS} losses, {found[0]:.3f} to {found[-1]:.3f}"
    return f"{ends}, are Python's to {apart:.0e}, PyTorch's to {from_torch:.0e}"
