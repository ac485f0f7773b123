"""Compare models that trained for their form in integers with models that are quantized after training.

Each network trains on scikit-learn's digits from several seeds, in floats. The file is then quantized by
`onnxruntime.quantization.quantize_static` on the same rows, per channel, and by `FakeQuantize` without a step of
training; and it trains on for a third of the epochs, in floats and with `FakeQuantize`. Accuracies are of held-out
rows, computed by ONNX Runtime from the files.

    pip install -e ".[cpu,sklearn]"
    python examples/benchmarks/quantization.py [--seeds 5] [--epochs 12]

It writes its tables to RESULTS_QUANTIZATION.md.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

import graphopt
import passes
from graphopt import data, models

PAGE = Path(__file__).resolve().parent / "RESULTS_QUANTIZATION.md"
NETWORKS: dict[str, Callable[[int], object]] = {
    "MLP 64-128-64-10": lambda seed: models.mlp((1, 8, 8), 10, seed=seed),
    "CNN 16, 32, hidden 64": lambda seed: models.cnn((1, 8, 8), 10, seed=seed),
    "narrow CNN 4, 8, hidden 16": lambda seed: models.cnn(
        (1, 8, 8), 10, channels=(4, 8), hidden=16, seed=seed
    ),
}
FORMS = {
    "int8": {},
    "int8, 7 bits": {"weight_range": 63},
    "int8, LSQ": {"observer": "lsq"},
    "int4 weights, int8 activations": {"weights": "int4"},
    "int4 weights": {"weights": "int4", "activations": None},
}


def session(proto: onnx.ModelProto, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def accuracy(proto: onnx.ModelProto, x: np.ndarray, labels: np.ndarray) -> float:
    (scores,) = session(proto).run(None, {"x": x})
    return float((scores.argmax(1) == labels).mean())


def trained(
    model: object, rows: dict[str, np.ndarray], epochs: int, seed: int, quantize: object, rate: float = 5e-3
) -> onnx.ModelProto:
    """Return the model after so many epochs; after none, if there are none."""
    pipeline = graphopt.standard(
        quantize=quantize, loss=passes.CrossEntropy(), optimizer=passes.AdamW(rate), schedule=passes.Cosine()
    )
    pipeline = graphopt.adapt(pipeline, model, rows, validation=None, epochs=max(epochs, 1))
    executor = graphopt.Executor(pipeline(model), threads=1, native=False)
    if epochs:
        graphopt.fit(executor, rows, epochs=epochs, validation=None, seed=seed, verbose=False)
    return executor.trained()


class Rows(CalibrationDataReader):
    def __init__(self, x: np.ndarray) -> None:
        self._pieces = iter([{"x": x[i : i + 64]} for i in range(0, len(x), 64)])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._pieces, None)


def by_runtimes_tool(proto: onnx.ModelProto, x: np.ndarray, weights: str) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        source, ready, target = (str(Path(folder, name)) for name in ("a.onnx", "b.onnx", "c.onnx"))
        onnx.save(proto, source)
        quant_pre_process(source, ready)
        kind = {"int8": QuantType.QInt8, "int4": QuantType.QInt4}[weights]
        quantize_static(ready, target, Rows(x), per_channel=True, weight_type=kind)
        return onnx.load(target)


def microseconds(protos: dict[str, onnx.ModelProto], x: np.ndarray) -> dict[str, float]:
    """Return the medians of calls with one row, in turns."""
    opened = {name: session(proto) for name, proto in protos.items()}
    times: dict[str, list[float]] = {name: [] for name in protos}
    for _ in range(300):
        for name, each in opened.items():
            start = time.perf_counter()
            each.run(None, {"x": x})
            times[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(own) for name, own in times.items()}


def integer_kernels(proto: onnx.ModelProto) -> str:
    with tempfile.TemporaryDirectory() as folder:
        session(proto, Path(folder, "optimized.onnx"))
        counts = Counter(node.op_type for node in onnx.load(Path(folder, "optimized.onnx")).graph.node)
    kinds = ("QLinearConv", "QGemm", "QLinearMatMul", "MatMulNBits", "Conv", "FusedConv", "Gemm", "FusedGemm")
    return ", ".join(f"{kind} {counts[kind]}" for kind in kinds if counts[kind])


def measured(build: Callable[[int], object], seeds: int, epochs: int) -> list[str]:
    """Return the rows of a table of one network."""
    digits = data.digits()
    x, labels = digits.arrays["x"].astype(np.float32), digits.arrays["target"]
    found: dict[str, list[float]] = {}
    files: dict[str, onnx.ModelProto] = {}
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(x))
        held, own = order[:400], order[400:]
        rows = {"x": x[own], "target": labels[own]}

        def note(name: str, proto: onnx.ModelProto, held: np.ndarray = held) -> None:
            found.setdefault(name, []).append(accuracy(proto, x[held], labels[held]))
            files[name] = proto

        floats = trained(build(seed), rows, epochs, seed, None)
        note("floats", floats)
        note("floats, trained on", trained(floats, rows, epochs // 3, seed, None, 1e-3))
        for weights in ("int8", "int4"):
            name = "int8" if weights == "int8" else "int4 weights, int8 activations"
            note(f"{name}, quantize_static", by_runtimes_tool(floats, x[own], weights))
        for name, options in FORMS.items():
            if "LSQ" not in name:
                note(f"{name}, not trained", trained(floats, rows, 0, seed, passes.FakeQuantize(**options)))
            quantize = passes.FakeQuantize(**options)
            note(f"{name}, trained for it", trained(floats, rows, epochs // 3, seed, quantize, 1e-3))
    times = microseconds(files, x[:1])
    return [
        f"| {name} | {statistics.mean(own):.4f} ± {statistics.stdev(own) if len(own) > 1 else 0:.4f} "
        f"| {len(files[name].SerializeToString()) / 1e3:.1f} | {times[name]:.0f} | {integer_kernels(files[name])} |"
        for name, own in sorted(found.items(), key=lambda item: (item[0] != "floats", item[0]))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args()
    lines = [
        "# Results of quantization.py",
        "",
        f"ONNX Runtime {onnxruntime.__version__}, {options.seeds} seeds, {options.epochs} epochs, 400 held-out rows. "
        "Accuracy: mean and standard deviation. Microseconds: one row, one thread, median of calls in turns.",
    ]
    for title, build in NETWORKS.items():
        lines += [
            "",
            f"## {title}",
            "",
            "| form | accuracy | KB | microseconds | products in the optimized graph |",
        ]
        lines += ["| --- | --- | ---: | ---: | --- |", *measured(build, options.seeds, options.epochs)]
        PAGE.write_text("\n".join(lines) + "\n")
        print("\n".join(lines[-16:]), flush=True)


if __name__ == "__main__":
    main()
