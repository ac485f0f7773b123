"""Train heads of torchvision networks by `graphopt tune` and by PyTorch, on the same features; print RESULTS.md rows.

Run it: python examples/first_days/tune_beside_torch.py [NETWORK ...]
Each network is exported with a fixed batch (dynamo) and with open sizes (TorchScript). The pictures are scikit-learn's
digits, enlarged. Weights are random: features of frozen random layers are compared, not what pretrained weights reach.
Normalizations have the statistics of 100 pictures; with -raw behind the name of the network, those of no picture.
It needs the extras cpu, sklearn and images, torch and torchvision.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import PIL.Image
import torch
import torchvision
from desk import Desk
from sklearn.datasets import load_digits

SIZE, ROWS, HELD_OUT = 64, 600, 200
RATES, SEEDS, EPOCHS = (0.001, 0.003, 0.01), (0, 1, 2), 100
HEAD = "| file | who | typed | processor seconds | held-out loss | held-out accuracy |\n" + "|---" * 6 + "|"
Rows = tuple[np.ndarray, np.ndarray]  # pictures [N, 3, SIZE, SIZE] from 0 to 1, and class numbers


def main() -> None:
    torch.set_num_threads(1)
    print(HEAD)
    for name in sys.argv[1:] or ("resnet18", "mobilenet_v3_small", "resnet18-raw", "regnet_y_400mf-raw"):
        for is_open in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                desk = Desk(Path(__file__).parents[2], Path(folder))
                train, held_out = draw(desk.folder / "pictures")
                export(name, desk.folder / "model.onnx", is_open, train[0][:100])
                file = f"{name}, {'open sizes' if is_open else 'fixed batch'}"
                print(f"| {file} | {by_graphopt(desk)} |", flush=True)
                print(f"| {file} | {by_torch(desk.folder / 'model.onnx', train, held_out)} |", flush=True)


def draw(folder: Path) -> list[Rows]:
    """Write the digits as pictures of folders `train` and `val`, and return them."""
    digits, found = load_digits(), []
    for part, rows in (("train", slice(ROWS)), ("val", slice(ROWS, ROWS + HELD_OUT))):
        pictures = []
        for i, (pixels, label) in enumerate(zip(digits.images[rows], digits.target[rows], strict=True)):
            place = folder / part / str(label)
            place.mkdir(parents=True, exist_ok=True)
            gray = PIL.Image.fromarray((pixels * 255 / 16).astype(np.uint8)).resize((SIZE, SIZE))
            gray.convert("RGB").save(place / f"{i}.png")
            pictures.append(np.asarray(gray.convert("RGB")).transpose(2, 0, 1) / np.float32(255))
        found.append((np.stack(pictures), digits.target[rows]))
    return found


def export(name: str, path: Path, is_open: bool, pictures: np.ndarray) -> None:
    """Write a network of random weights whose normalizations know the statistics of some pictures, or of none."""
    torch.manual_seed(0)
    network, x = torchvision.models.get_model(name.removesuffix("-raw")), torch.zeros(1, 3, SIZE, SIZE)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        if not name.endswith("-raw"):
            network.train()(torch.tensor(pictures))
    network.eval()
    axes = {0: "n", 2: "height", 3: "width"}
    options = {"dynamic_axes": {"image": axes, "scores": {0: "n"}}} if is_open else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            (x,),
            path,
            dynamo=not is_open,
            verbose=False,
            input_names=["image"],
            output_names=["scores"],
            **options,
        )


def by_graphopt(desk: Desk) -> str:
    size = f"data.size=[{SIZE},{SIZE}]"
    said = desk.graphopt("tune", "model.onnx", "pictures", "--pixels=unit", size, "folder=run")
    if desk.refusals:
        raise SystemExit(said)
    lines = (desk.folder / "run" / "metrics.jsonl").read_text().splitlines()
    best = min(map(json.loads, lines), key=lambda record: record.get("validation_loss", np.inf))
    measured = f"{best['validation_loss']:.3f} | {100 * best['accuracy']:.1f} %"
    seconds = desk.row("", "").split(" | ")[-2]
    return f"`graphopt tune` | 1 command | {seconds} | {measured}"


def by_torch(path: Path, train: Rows, held_out: Rows) -> str:
    """Train a head in PyTorch on what ONNX Runtime computes as the input of the last layer; take the best epoch."""
    model = onnx.load(path)
    last = next(node for node in reversed(model.graph.node) if node.op_type in ("Gemm", "MatMul"))
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(last.input[0]))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    features = [
        torch.tensor(np.concatenate([session.run([last.input[0]], {"image": row[None]})[0] for row in pictures]))
        for pictures, _ in (train, held_out)
    ]
    y, truth = (torch.tensor(labels) for _, labels in (train, held_out))
    found = []
    for rate in RATES:
        for seed in SEEDS:
            torch.manual_seed(seed)
            head = torch.nn.Linear(features[0].shape[1], 10)
            optimizer, records = torch.optim.AdamW(head.parameters(), rate), []
            for _ in range(EPOCHS):
                for batch in torch.randperm(len(y)).split(32):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(head(features[0][batch]), y[batch]).backward()
                    optimizer.step()
                with torch.no_grad():
                    scores = head(features[1])
                loss = torch.nn.functional.cross_entropy(scores, truth)
                records.append((float(loss), float((scores.argmax(1) == truth).float().mean())))
            found.append((*min(records), rate))
    rate = min(found)[-1]
    losses, shares, _ = zip(*(each for each in found if each[-1] == rate), strict=True)
    loss, share = (
        f"{min(losses):.3f} to {max(losses):.3f}",
        f"{100 * min(shares):.1f} to {100 * max(shares):.1f} %",
    )
    how = f"AdamW, {rate} of {len(RATES)} rates, best epoch of {EPOCHS}"
    return f"PyTorch, its head on the same features, {how} | 30 lines | | {loss} | {share}"


if __name__ == "__main__":
    main()
