"""Write which operators of the seven graphs the providers for phones lack, into the guide `examples/guides/hosts.md`.

    python examples/hosts/matrix/phones.py

The lists of operators are those that ONNX Runtime publishes, without their notes on attributes and constant inputs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from host_graphs import GRAPHS, batches  # noqa: E402

import graphopt  # noqa: E402

GUIDE = ROOT / "examples/guides/hosts.md"
BEGIN, END = "<!-- phones -->", "<!-- phones end -->"
TITLES = "linear regression", "MLP", "CNN", "LSTM", "transformer", "adapter", "Loop and If"

PROVIDERS = {
    # https://onnxruntime.ai/docs/execution-providers/CoreML-ExecutionProvider.html, ML Program
    "Core ML": """Add ArgMax AveragePool Cast Ceil Clip Concat Conv ConvTranspose Cos DepthToSpace Div Elu Erf Exp
        GatherND Gelu Gemm GlobalAveragePool GlobalMaxPool GridSample GroupNormalization HardSigmoid Identity
        InstanceNormalization LayerNormalization LeakyRelu MatMul Max MaxPool Mul PRelu Pow Range Reciprocal ReduceMax
        ReduceMean ReduceSum Relu Reshape Resize Round Shape Sigmoid Sin Slice Softmax Softplus Split Sqrt Squeeze Sub
        Tanh Tile Transpose Unsqueeze""",
    # https://onnxruntime.ai/docs/execution-providers/NNAPI-ExecutionProvider.html
    "NNAPI": """Abs Add AveragePool Cast Clip Concat Conv DepthToSpace Div Elu Exp Flatten Floor Gather
        Gemm GlobalAveragePool GlobalMaxPool Identity Log MatMul Max MaxPool Min Mul Neg PRelu Pad Pow
        ReduceMean Relu Reshape Resize Sigmoid Sin Slice Softmax Sqrt Squeeze Sub Tanh Transpose Unsqueeze""",
    # https://onnxruntime.ai/docs/execution-providers/Xnnpack-ExecutionProvider.html
    "XNNPACK": "AveragePool Conv ConvTranspose Gemm MatMul MaxPool Resize Softmax",
}


def counted(step: ir.Model, rows: int) -> dict[str, int]:
    """Return how many nodes of each operator a step has."""
    with tempfile.TemporaryDirectory() as folder:
        graphopt.export_hosts(step, folder, batch=rows, unroll=True)
        model = ir.from_proto(onnx.load(Path(folder, "train.onnx")))
    counts: dict[str, int] = {}
    for node in model.graph.all_nodes():
        if node.op_type != "Constant":
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def main() -> None:
    """Write the table."""
    lines = [
        f"| graph | nodes | {' | '.join(f'{name} lacks' for name in PROVIDERS)} |",
        "| --- | ---: | --- | --- | --- |",
    ]
    for title, name in zip(TITLES, GRAPHS, strict=True):
        counts = counted(GRAPHS[name][0](), len(batches(name, 1)[0]["target"]))
        cells = []
        for provider, operators in PROVIDERS.items():
            lacking = {key: n for key, n in counts.items() if key not in operators.split()}
            named = f": {', '.join(sorted(lacking))}" if lacking and provider != "XNNPACK" else ""
            cells.append(f"{sum(lacking.values())}{named}")
        lines.append(f"| {title} | {sum(counts.values())} | {' | '.join(cells)} |")
    before, rest = GUIDE.read_text().split(BEGIN)
    text = "\n".join(lines)
    GUIDE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
