"""Faults of other software that graphopt works round: one table, each row with a program that shows the fault.

Code that works round a fault names its row in a comment, `tests/faults.py: NAME`. `tests/test_faults.py` runs the
programs. A fault that is gone from the installed version is a reason to remove what works round it.

`python tests/faults.py [NAME ...]` tells which faults the installed versions have.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any, NamedTuple

from mutants import PROCESSES
from packaging.version import Version

FAULT = 3  # the exit status of a program that shows a fault

# What programs call. They set `fault`, or end their process.
PRELUDE = """
import warnings
import numpy as np, onnx, onnx.parser, onnx.reference
warnings.simplefilter("ignore")

def model(text, opset=21, **arrays):
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> g {text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items())
    return proto

def session(proto):
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])

def runtime(proto, **feeds):
    return session(proto).run(None, feeds)

def reference(proto, **feeds):
    return onnx.reference.ReferenceEvaluator(proto).run(None, feeds)

def mnn(text, **feeds):
    import os, tempfile
    import _tools, MNN.expr, MNN.nn
    os.chdir(tempfile.mkdtemp())
    onnx.save(model(text), "graph.onnx")
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile graph.onnx --MNNModel graph.mnn --keepInputFormat".split())
    fed = [MNN.expr.const(x, list(x.shape), MNN.expr.NCHW, MNN.expr.int) for x in feeds.values()]
    return MNN.nn.load_module_from_file("graph.mnn", list(feeds), ["y"]).forward(fed)[0].read()

def refuses(function, *args, **feeds):
    try:
        function(*args, **feeds)
    except Exception:
        return True
    return False

def differs(x, y):
    return x.dtype != y.dtype or x.shape != y.shape or not np.allclose(x, y, rtol=1e-5, atol=1e-6)

def misjudges(proto, output=0, **feeds):
    if refuses(reference, proto, **feeds):
        return True
    return differs(reference(proto, **feeds)[output], runtime(proto, **feeds)[output])

def inferred(proto, name):
    typed = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    dims = next(x for x in (*typed.value_info, *typed.output) if x.name == name).type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims]

rng = np.random.default_rng(0)
x = rng.standard_normal((2, 3, 4)).astype("f")
images = rng.standard_normal((2, 3, 4, 4)).astype("f")
"""


class Fault(NamedTuple):
    """Say what is wrong, where, and what graphopt does about it.

    Args:
        part: the operator, or the part of a package.
        package: the distribution that has the fault.
        since: the first version in which it was seen.
        does: what happens.
        around: the files that work round it.
        program: what shows it; "" if that needs a machine or a package that tests do not have.
        until: the first version without it, if there is one; then older versions are the reason to work round it.
        needs: further modules that the program imports.
    """

    part: str
    package: str
    since: str
    does: str
    around: tuple[str, ...]
    program: str = ""
    until: str | None = None
    needs: tuple[str, ...] = ()

    def excuse(self) -> str:
        """Return why the installed packages cannot show the fault; "" if they can."""
        if not self.program:
            return "it has no program"
        for name in (self.package, *self.needs):
            try:
                found = metadata.version(name)
            except metadata.PackageNotFoundError:
                return f"expected {name}, found none"
            if name != self.package:
                continue
            if Version(found) < Version(self.since):
                return f"expected {name} {self.since} or later, found {found}"
            if self.until and Version(found) >= Version(self.until):
                return f"expected {name} before {self.until}, found {found}"
        return ""

    def is_there(self) -> bool:
        """Return whether the installed package has the fault. Its program runs in a process of its own."""
        process = PROCESSES.Process(target=_run, args=(self.program,))
        process.start()
        process.join(300)
        if process.exitcode in (None, 1):
            process.kill()
            raise RuntimeError(f"the program of a fault fails: {self.part} {self.does}")
        return process.exitcode != 0


def _run(program: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"{PRELUDE}\n{program}", scope)
    sys.exit(FAULT if scope["fault"] else 0)


def _of_reference(part: str, does: str, program: str) -> Fault:
    return Fault(part, "onnx", "1.23", does, ("graphopt/testing/reference.py",), program)


FAULTS = {
    # --- ONNX Runtime ---
    "optimizers-end-the-process": Fault(
        "graph optimizers",
        "onnxruntime",
        "1.32",
        "end the process on Ifs within Ifs with constant conditions, as PyTorch writes the means of an EmbeddingBag",
        ("graphopt/runtime/device.py", "graphopt/runtime/optimizers.py"),
        """
import pathlib, tempfile, torch

class Bags(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = torch.nn.EmbeddingBag(11, 6, mode="mean")

    def forward(self, ids):
        return self.bags(ids)

with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "bags.onnx"
    ids, sizes = torch.zeros((4, 5), dtype=torch.int64), ({0: torch.export.Dim("n")},)
    torch.onnx.export(Bags().eval(), (ids,), path, dynamo=True, optimize=False, verbose=False, dynamic_shapes=sizes)
    session(onnx.load(path))
fault = False
""",
        needs=("torch",),
    ),
    "act-order-zero-points": Fault(
        "MatMulNBits with g_idx and packed zero points on the CPU provider",
        "onnxruntime",
        "1.32",
        "subtracts 8 from each weight, whatever the zero points are",
        ("passes/lowering/quantized.py",),
        """
proto = onnx.parser.parse_model(
    '<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]> g (float[1,16] x) => (float[1,1] y) '
    "{ y = com.microsoft.MatMulNBits<K=16, N=1, bits=4, block_size=16>(x, b, s, z, g) }"
)
arrays = {"b": np.full((1, 1, 8), 0x55, "B"), "s": np.ones(1, "f"), "z": np.array([3], "B"), "g": np.zeros(16, "i")}
proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
fault = runtime(proto, x=np.ones((1, 16), "f"))[0].item() != 32
""",
    ),
    "DivMulFusion": Fault(
        "DivMulFusion",
        "onnxruntime",
        "1.32",
        "rewrites 1 / b * a to a / b, and loses a if another rule removes its node (microsoft/onnxruntime#32416)",
        ("graphopt/runtime/optimizers.py",),
        """
proto = model(
    "(float[3] x, float[3] z) => (float[3] y) { a = Identity(x) b = Div(one, z) c = Mul(a, b) y = Add(c, x) }",
    one=np.ones((), "f"),
)
fault = refuses(runtime, proto, x=np.ones(3, "f"), z=np.ones(3, "f"))
""",
    ),
    "GatherToSliceFusion": Fault(
        "GatherToSliceFusion",
        "onnxruntime",
        "1.32",
        "makes a Slice of a Gather by a Range from -1 up, which takes nothing",
        ("graphopt/runtime/optimizers.py",),
        """
proto = model(
    "(float[3] x, int64 n) => (float[M] y) { e = Sub(n, one) i = Range(last, e, one) y = Gather(x, i) }",
    one=1,
    last=-1,
)
fault = runtime(proto, x=np.ones(3, "f"), n=np.array(3))[0].shape == (0,)
""",
    ),
    "Pad-axes": Fault(
        "Pad with axes",
        "onnxruntime",
        "1.31",
        "a Transpose is moved past it, and its axes stay as they were",
        ("passes/normalize.py", "passes/gradients/rules/shape.py"),
        """
proto = model(
    "(float[2,3,4] x) => (float[A,B,C] y) "
    "{ u = Transpose<perm=[2,0,1]>(x) t = Pad(u, pads, , axes) y = Transpose<perm=[1,2,0]>(t) }",
    pads=[1, 0], axes=[1],
)
fault = refuses(runtime, proto, x=x) or differs(runtime(proto, x=x)[0], np.pad(x, ((1, 0), (0, 0), (0, 0))))
""",
    ),
    "names-of-the-runtime": Fault(
        "MatMulAddFusion",
        "onnxruntime",
        "1.32",
        "refuses a graph whose constants have the names that it gives, as in files that ONNX Runtime wrote",
        ("passes/normalize.py",),
        """
proto = model(
    "(float[2,3,4] x) => (float[2,3,5] y) "
    "{ m = MatMul(x, w) a = Add(m, b) r = Reshape(a, gemm_input_shape) y = Reshape(r, gemm_output_shape) }",
    w=np.ones((4, 5), "f"), b=np.ones(5, "f"), gemm_input_shape=[6, 5], gemm_output_shape=[2, 3, 5],
)
fault = refuses(session, proto)
""",
    ),
    "HardSigmoid-float64": Fault(
        "HardSigmoid of float64",
        "onnxruntime",
        "1.32",
        "has no kernel on CPUs",
        ("graphopt/runtime/checks/first_check.py",),
        'fault = refuses(session, model("(double[4] x) => (double[4] y) { y = HardSigmoid(x) }"))',
    ),
    "Scatter-16": Fault(
        "ScatterElements of float16",
        "onnxruntime",
        "1.32",
        "does not add on CPUs",
        ("passes/gradients/rules/shape.py",),
        """
proto = model(
    "(float16[4] x, int64[2] i, float16[2] u) => (float16[4] y) "
    '{ y = ScatterElements<axis=0, reduction="add">(x, i, u) }'
)
fault = refuses(runtime, proto, x=np.zeros(4, np.float16), i=np.zeros(2, np.int64), u=np.ones(2, np.float16))
""",
    ),
    "ScatterND-threads": Fault(
        "ScatterND that adds",
        "onnxruntime",
        "1.16.3",
        "splits rows among the threads of a CPU, and loses some of those that are added to one (issue 23396)",
        ("passes/gradients/rules/shape.py", "graphopt/targets/portable/everywhere.py"),
        """
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 2
proto = model(
    "(float[1,1] x, int64[n,1] i, float[n,1] u) => (float[1,1] y) "
    '{ y = ScatterND<reduction="add">(x, i, u) }'
)
threads = onnxruntime.InferenceSession(proto.SerializeToString(), options)
feeds = dict(x=np.zeros((1, 1), np.float32), i=np.zeros((400_000, 1), np.int64), u=np.ones((400_000, 1), np.float32))
fault = any(threads.run(None, feeds)[0] != 400_000 for _ in range(300))  # about one in two
""",
    ),
    "MNN-integers": Fault(
        "Mul, Max, Min, Abs, Clip and Range of integers",
        "MNN",
        "3.6.1",
        "compute in float32, which rounds above 2^24 and does not wrap around",
        ("graphopt/targets/portable/everywhere.py",),
        """
a, b = np.array([2**25 + 1, 4097, 2**30], np.int32), np.array([2**25 + 3, 4097, 6], np.int32)
rows = [("Mul(a, b)", a * b), ("Max(a, b)", np.maximum(a, b)), ("Min(a, b)", np.minimum(a, b)), ("Abs(a)", a)]
rows = [(kind, text, expected) for kind in ("int32", "int64") for text, expected in rows]
rows += [(kind, "Clip(a, low)", np.maximum(a, a[0])) for kind in ("int32", "int64")]
rows += [(kind, "Range(low, high, step)", np.arange(a[0], a[0] + 5, 2)) for kind in ("int32", "int64")]
fault = all(
    not np.array_equal(expected, mnn(
        f"({kind}[3] a, {kind}[3] b) => ({kind}[n] y) {{ low = Constant<value = {kind} {{{a[0]}}}>() "
        f"high = Constant<value = {kind} {{{a[0] + 5}}}>() step = Constant<value = {kind} {{2}}>() y = {text} }}",
        a=a, b=b,
    ))
    for kind, text, expected in rows
)
""",
        needs=("onnx",),
    ),
    "MNN-indices": Fault(
        "GatherElements, GatherND, ScatterElements and ScatterND",
        "MNN",
        "3.6.1",
        "round indices above 2^24 to float32",
        ("graphopt/targets/portable/everywhere.py",),
        """
x, i, u = np.arange(2**25 + 5, dtype=np.int32), np.array([2**25 + 3, 2**24 + 1], np.int32), np.array([7, 8], np.int32)
inputs = "(int32[n] x, int64[2] i, int32[2] u) => (int32[2] y)"
rows = "c = Constant<value = int64[2] {-1, 1}>() k = Reshape(i, c)"
fault = all(
    not np.array_equal(expected, mnn(f"{inputs} {{ {rows} {text} }}", x=x, i=i, u=u))
    for text, expected in (
        ("y = GatherElements<axis=0>(x, i)", i),
        ("y = GatherND(x, k)", i),
        ("z = ScatterElements<axis=0>(x, i, u) y = Gather(z, i)", u),
        ("z = ScatterND(x, k, u) y = Gather(z, i)", u),
    )
)
""",
        needs=("onnx",),
    ),
    "Cos-float64": Fault(
        "Cos of float64",
        "onnxruntime-training",
        "1.19",
        "has no kernel",
        ("passes/schedules.py",),
        'fault = refuses(session, model("(double[4] x) => (double[4] y) { y = Cos(x) }"))',
    ),
    "MatmulTransposeFusion": Fault(
        "MatmulTransposeFusion",
        "onnxruntime-training",
        "1.19",
        "makes an operator of float64 that has no kernel",
        ("graphopt/runtime/optimizers.py",),
        """
fault = refuses(session, model(
    "(double[2,3,4] x, double[2,3,5] w) => (double[2,4,5] y) { t = Transpose<perm=[0,2,1]>(x) y = MatMul(t, w) }"
))
""",
    ),
    "RotaryEmbedding": Fault(
        "RotaryEmbedding",
        "onnxruntime-training",
        "1.19",
        "ends the process",
        ("graphopt/testing/gradients.py",),
    ),
    "TrainingAgent": Fault(
        "TrainingAgent",
        "onnxruntime-training",
        "1.19.2",
        "aborts the process if, in a graph with a YieldOp, a body uses what a node around it computes",
        ("graphopt/layer/engines.py",),
    ),
    "DequantizeLinear-Reshape": Fault(
        "graph optimizers of quantized weights",
        "onnxruntime",
        "1.32",
        "move a DequantizeLinear over a Reshape, which makes some graphs invalid",
        ("graphopt/runtime/providers/provider.py",),
    ),
    "webgpu-context": Fault(
        "WebGPU provider",
        "onnxruntime-webgpu",
        "1.27",
        "a value on the device that outlives the last session ends the process",
        ("graphopt/runtime/providers/webgpu.py",),
    ),
    "webgpu-operators": Fault(
        "WebGPU provider",
        "onnxruntime-webgpu",
        "1.27",
        "lacks operators, or computes wrong numbers; `tests/gpu_sweep.py` shows which",
        ("graphopt/targets/portable/webgpu/__init__.py",),
    ),
    "cuda-operators": Fault(
        "CUDA provider",
        "onnxruntime-gpu",
        "1.31",
        "lacks operators, or is slow; `tests/gpu_sweep.py` shows which",
        ("graphopt/targets/portable/cuda.py",),
    ),
    "HardSigmoid-beta": Fault(
        "HardSigmoid",
        "openvino",
        "1.24",
        "takes a `beta` of 0 for the default 0.5",
        ("passes/gradients/rules/elementwise.py",),
    ),
    # --- ONNX's shape inference ---
    "Attention-heads": Fault(
        "Attention",
        "onnx",
        "1.23",
        "has values of size 0 if their size is not known",
        ("graphopt/graph/declarations.py",),
        """
proto = model(
    "(float[2,3,8] q, float[2,P,H] k, float[2,P,H] v) => (float[A,B,C] y) "
    "{ y = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v) }",
    opset=23,
)
fault = 0 in inferred(proto, "y")
""",
    ),
    "ConvTranspose-shape": Fault(
        "ConvTranspose",
        "onnx",
        "1.23",
        "has a wrong rank if its `output_shape` is smaller than its input",
        ("graphopt/graph/declarations.py", "passes/normalize.py"),
        """
proto = model(
    "(float[1,1,4,4] x, float[1,1,3,3] w) => (float[A,B,C,D] y) "
    "{ t = ConvTranspose<output_shape=[3,3]>(x, w) y = Relu(t) }"
)
fault = inferred(proto, "t") != [1, 1, 3, 3]
""",
    ),
    "ConvTranspose-same": Fault(
        "ConvTranspose",
        "onnx",
        "1.23",
        "with SAME padding, adds `output_padding` to the sizes, which ONNX Runtime crops",
        ("graphopt/graph/declarations.py", "passes/normalize.py"),
        """
proto = model(
    "(float[1,1,4,4] x, float[1,1,3,3] w) => (float[A,B,C,D] y) "
    '{ y = ConvTranspose<strides=[2,2], auto_pad="SAME_UPPER", output_padding=[1,1]>(x, w) }'
)
fault = inferred(proto, "y") != [1, 1, 8, 8]
""",
    ),
    "ceil-mode": Fault(
        "pools with ceil_mode before opset 22",
        "onnx",
        "1.23",
        "have a window that begins beyond the elements",
        ("graphopt/graph/shapes.py", "passes/normalize.py"),
        """
proto = model(
    "(float[1,1,4] x) => (float[A,B,C] y) { y = MaxPool<kernel_shape=[2], strides=[3], pads=[1,1], ceil_mode=1>(x) }"
)
fault = inferred(proto, "y") != [1, 1, 2]
""",
    ),
    "Slice-bounds": Fault(
        "Slice of a vector of sizes",
        "onnx",
        "1.23",
        "takes a bound that is not known for 0",
        ("graphopt/graph/typed_messages.py",),
        """
proto = model(
    "(float[N,4] x, float[3,4,5] z) => (float[A] y) "
    "{ s = Shape(x) i = Gather(s, zero) a = Add(i, i) "
    "v = Shape(z) b = Slice(v, a, three) t = Expand(w, b) y = Relu(t) }",
    zero=[0], three=[3], w=np.ones((), "f"),
)
fault = inferred(proto, "t") == [3, 4, 5]
""",
    ),
    "Slice-10": Fault(
        "Slice of opset 10",
        "onnx",
        "1.23",
        "keeps the name of an axis of open size that it cuts",
        ("graphopt/graph/typed_messages.py",),
        """
proto = model("(float[N,4] x) => (float[A,B] y) { c = Slice(x, one, nine) y = Relu(c) }",
    opset=10, one=[1], nine=[9])
fault = inferred(proto, "c") == ["N", 4]
""",
    ),
    "outer-product": Fault(
        "Mul of a column and a row of sizes",
        "onnx",
        "1.23",
        "is refused if inference propagates data, which takes both for vectors of one length",
        ("graphopt/graph/shapes.py",),
        """
proto = model(
    "(float[2,3,4] x, float[5,6] z) => (int64[A,B] y) "
    "{ a = Shape(x) b = Shape(z) c = Unsqueeze(a, one) y = Mul(c, b) }",
    one=[1],
)
infer = onnx.shape_inference.infer_shapes
fault = refuses(infer, proto, strict_mode=True, data_prop=True) and not refuses(infer, proto, strict_mode=True)
""",
    ),
    "negative-sizes": Fault(
        "inference of Slice and GatherND",
        "onnx",
        "1.23",
        "ends the process if a size of its input is negative, as of a convolution smaller than its window",
        ("graphopt/graph/message_inference.py", "graphopt/runtime/random_inputs.py"),
        """
proto = model("(float[1,1,4] x) => (float[A,B,C] y) { c = Conv(x, w) y = Slice(c, zero, five, two) }",
    w=np.ones((1, 1, 9), np.float32), zero=[0], five=[5], two=[2])
onnx.shape_inference.infer_shapes(proto)
fault = False
""",
    ),
    "expand-before-binary": Fault(
        "the rules expand_before_binary_op_rules",
        "onnxscript",
        "0.7",
        "drop an Expand that adds axes of size 1, so that the result has fewer axes",
        ("graphopt/graph/simplify.py",),
        """
import onnxscript.rewriter
from onnxscript.rewriter.rules import common

proto = model("(float x) => (float[1] y) { e = Expand(x, one) y = Add(e, x) }", one=[1])
found = onnxscript.rewriter.rewrite(proto, common.expand_before_binary_op_rules)
fault = [node.op_type for node in found.graph.node] == ["Add"]
""",
    ),
    # --- ONNX's reference evaluator ---
    "reference-AffineGrid": _of_reference(
        "AffineGrid",
        "returns float32 for float64",
        """
proto = model("(double[1,2,3] t, int64[4] s) => (double[1,2,2,2] y) { y = AffineGrid(t, s) }")
fault = reference(proto, t=np.ones((1, 2, 3)), s=np.array([1, 1, 2, 2]))[0].dtype != np.float64
""",
    ),
    "reference-ConvTranspose": _of_reference(
        "ConvTranspose",
        "mixes the channels of groups",
        """
a, w = (rng.standard_normal(shape).astype("f") for shape in ((1, 4, 3), (4, 2, 3)))
proto = model("(float[1,4,3] x, float[4,2,3] w) => (float[A,B,C] y) { y = ConvTranspose<group=2>(x, w) }")
fault = misjudges(proto, x=a, w=w)
""",
    ),
    "reference-Erf": _of_reference(
        "Erf",
        "has the accuracy of float32",
        """
import math
y = reference(model("(double[1] x) => (double[1] y) { y = Erf(x) }"), x=np.array([0.3]))[0]
fault = abs(y[0] - math.erf(0.3)) > 1e-12
""",
    ),
    "reference-GatherElements": _of_reference(
        "GatherElements",
        "rejects many elements along the axis",
        """
proto = model("(float[1,80] x, int64[1,40] i) => (float[1,40] y) { y = GatherElements<axis=1>(x, i) }")
fault = misjudges(proto, x=np.ones((1, 80), "f"), i=np.zeros((1, 40), np.int64))
""",
    ),
    "reference-Gelu": _of_reference(
        "Gelu",
        "has the accuracy of float32",
        """
import math
y = reference(model("(double[1] x) => (double[1] y) { y = Gelu(x) }"), x=np.array([0.3]))[0]
fault = abs(y[0] - 0.15 * (1 + math.erf(0.3 * math.sqrt(0.5)))) > 1e-12
""",
    ),
    "reference-GlobalLpPool": _of_reference(
        "GlobalLpPool",
        "is missing",
        'fault = refuses(reference, model("(float[2,3,4] x) => (float[2,3,1] y) { y = GlobalLpPool(x) }"), x=x)',
    ),
    "reference-GlobalMaxPool": _of_reference(
        "GlobalMaxPool",
        "assumes images",
        'fault = misjudges(model("(float[2,3,4] x) => (float[2,3,1] y) { y = GlobalMaxPool(x) }"), x=x)',
    ),
    "reference-LRN": _of_reference(
        "LRN",
        "mistakes the batch for the channels",
        'fault = misjudges(model("(float[2,3,4,4] x) => (float[2,3,4,4] y) { y = LRN<size=3>(x) }"), x=images)',
    ),
    "reference-Loop": _of_reference(
        "Loop",
        "concatenates outputs of iterations along their first axis",
        """
proto = model(
    "(int64 n, bool c, float[1,2] s) => (float[1,2] t, float[A,1,2] y) { t, y = Loop<body = b "
    "(int64 i, bool k, float[1,2] a) => (bool l, float[1,2] o, float[1,2] z) "
    "{ l = Identity(k) o = Add(a, a) z = Identity(o) }>(n, c, s) }"
)
fault = misjudges(proto, 1, n=np.array(3), c=np.array(True), s=np.ones((1, 2), "f"))
""",
    ),
    "reference-LpNormalization": _of_reference(
        "LpNormalization",
        "sums signed numbers for p = 1",
        'fault = misjudges(model("(float[2,3,4] x) => (float[2,3,4] y) { y = LpNormalization<p=1>(x) }"), x=x)',
    ),
    "reference-MaxPool": _of_reference(
        "MaxPool",
        "lacks positions for strides of 1",
        """
proto = model(
    "(float[2,3,4,4] x) => (float[2,3,3,3] y, int64[2,3,3,3] i) "
    "{ y, i = MaxPool<kernel_shape=[2,2], strides=[1,1]>(x) }"
)
fault = misjudges(proto, 1, x=images)
""",
    ),
    "reference-MaxRoiPool": _of_reference(
        "MaxRoiPool",
        "is missing",
        """
proto = model("(float[2,3,4,4] x, float[1,5] r) => (float[1,3,2,2] y) { y = MaxRoiPool<pooled_shape=[2,2]>(x, r) }")
fault = refuses(reference, proto, x=images, r=np.zeros((1, 5), "f"))
""",
    ),
    "reference-Pad": _of_reference(
        "Pad",
        "rejects negative pads",
        """
proto = model("(float[2,3,4] x) => (float[A,B,C] y) { y = Pad(x, p) }", p=[0, 0, -1, 0, 0, 0])
fault = misjudges(proto, x=x)
""",
    ),
    "reference-Scan": _of_reference(
        "Scan",
        "lacks axes and directions",
        """
proto = model(
    "(float s, float[3] x) => (float t, float[3] y) { t, y = Scan<num_scan_inputs=1, scan_input_directions=[1], "
    "body = b (float a, float e) => (float o, float z) { o = Add(a, e) z = Identity(o) }>(s, x) }"
)
fault = misjudges(proto, 1, s=np.zeros((), "f"), x=np.array([1, 2, 4], "f"))
""",
    ),
    "reference-Softsign": _of_reference(
        "Softsign",
        "rejects scalars",
        'fault = refuses(reference, model("(float x) => (float y) { y = Softsign(x) }"), x=np.ones((), "f"))',
    ),
    "reference-Unique": _of_reference(
        "Unique",
        "gathers elements along another axis",
        """
z = np.array([[1, 0, 1], [2, 0, 2]], "f")
fault = misjudges(model("(float[2,3] x) => (float[A,B] y) { y = Unique<axis=1, sorted=0>(x) }"), x=z)
""",
    ),
    # --- Others ---
    "safetensors-strides": Fault(
        "safetensors.numpy.save",
        "safetensors",
        "0.8",
        "writes the memory of an array that is not contiguous, in the wrong order",
        ("graphopt/runtime/checkpoint.py",),
        """
import safetensors.numpy
y = np.arange(6, dtype="f").reshape(2, 3).T
fault = differs(safetensors.numpy.load(safetensors.numpy.save({"y": y}))["y"], y)
""",
    ),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or FAULTS:
        fault = FAULTS[name]
        print(f"{name}: {fault.excuse() or ('there' if fault.is_there() else 'gone')}")
