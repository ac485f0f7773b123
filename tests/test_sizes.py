"""What graphopt says of sizes is so when ONNX Runtime runs the file, at sizes far from those of any example.

A claim is a number for an axis, the name of an input's size, or one name for several axes.
"""

from __future__ import annotations

import functools
import subprocess
import sys

import numpy as np
import onnx
import onnx.backend.test.case.node
import onnx_ir as ir
import onnxruntime
import pytest
from builders import model
from onnx import helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as rt
from steps import session

import graphopt
import passes
from graphopt.graph.declarations import forget
from graphopt.graph.sizes import unify_sizes

ERRORS = (rt.Fail, rt.InvalidArgument, rt.InvalidGraph, rt.NotImplemented, rt.RuntimeException)
FLOAT = onnx.TensorProto.FLOAT
FAR = 2**63 - 1


def inferred(proto: onnx.ModelProto) -> ir.Model:
    """Return a model with the shapes that graphopt infers."""
    found = ir.from_proto(proto)
    forget(found)
    return found


def wrong_claims(found: ir.Model, arrays: dict[str, np.ndarray]) -> list[str]:
    """Return what a model says wrongly of the shapes of some arrays."""
    wrong, sizes = [], {}
    for x in [*found.graph.inputs, *(y for node in found.graph for y in node.outputs)]:
        if x.name not in arrays or x.shape is None:
            continue
        actual = arrays[x.name].shape
        if len(actual) != len(x.shape):
            wrong.append(f"{x.name}: rank {len(x.shape)} for {actual}")
        for dim, size in zip(x.shape, actual, strict=False):
            said = dim if isinstance(dim, int) else sizes.setdefault(str(dim), size)
            if said != size:
                wrong.append(f"{x.name}: {x.shape} for {actual}")
    return wrong


class Chain:
    """Grow a graph of operators that change sizes; each row of the table adds some nodes to it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.values = ["x", "z"]  # matrices

    def pick(self) -> str:
        return str(self.rng.choice(self.values))

    def draw(self, *numbers: int) -> int:
        return int(self.rng.choice(numbers))

    def constant(self, array) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(array), name))
        return name

    def add(self, op_type: str, *inputs: str, count: int = 1, **attributes) -> str:
        outputs = [f"v{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(op_type, inputs, outputs, **attributes))
        return outputs[-1]

    def matrix(self, op_type: str, *inputs: str, **attributes) -> None:
        self.values.append(self.add(op_type, *inputs, **attributes))

    def size(self, x: str, axis: int) -> str:
        """Return a computed size, as exporters of PyTorch and TensorFlow write them."""
        whole = self.add("Shape", x)
        one = self.add("Gather", whole, self.constant([axis]))
        for _ in range(self.draw(0, 1, 2)):
            operator = str(self.rng.choice(["Add", "Sub", "Mul", "Div", "Min", "Max", "Mod"]))
            one = self.add(operator, one, self.constant([self.draw(1, 2, 3, 64, 128, 160)]))
        return one

    def bound(self) -> int:
        return self.draw(0, 1, 2, 5, 64, 128, -1, -3, -100, FAR)

    def slice(self) -> None:
        bounds = self.constant([self.bound()]), self.constant([self.bound()])
        step = self.constant([self.draw(1, 1, 2, 3, 128)])
        self.matrix("Slice", self.pick(), *bounds, self.constant([self.draw(0, 1, -1)]), step)

    def slice_to_size(self) -> None:
        axis = self.draw(0, 1)
        bounds = [self.constant([self.bound()]), self.size(self.pick(), axis)]
        self.rng.shuffle(bounds)
        self.matrix("Slice", self.pick(), *bounds, self.constant([axis]))

    def windows(self) -> None:
        x = self.add("Unsqueeze", self.pick(), self.constant([1]))
        kernel, stride = self.draw(1, 2, 3, 8, 128), self.draw(1, 2, 3, 16, 128, 160)
        pads = [self.draw(0, kernel // 2), self.draw(0, kernel // 2)]
        where = {"pads": pads} if self.draw(0, 1, 1) else {"auto_pad": str(self.rng.choice(["SAME_UPPER", "VALID"]))}
        kind = str(self.rng.choice(["Conv", "MaxPool", "AveragePool", "ConvTranspose"]))
        if "Conv" in kind:
            y = self.add(kind, x, self.constant(np.ones((1, 1, kernel), np.float32)), strides=[stride], **where)
        else:
            ceil = self.draw(0, 1) if "pads" in where else 0
            y = self.add(kind, x, kernel_shape=[kernel], strides=[stride], ceil_mode=ceil, **where)
        self.matrix("Squeeze", y, self.constant([1]))

    def pad(self) -> None:
        widths = [0, self.draw(0, 1, 200), 0, self.draw(0, 2, -1)]
        self.matrix("Pad", self.pick(), self.constant(widths))

    def join(self) -> None:
        self.matrix("Concat", self.pick(), self.pick(), axis=1)

    def resize(self) -> None:
        scales = np.array([1, self.rng.choice([0.5, 2.0, 1.5, 0.1, 1 / 128, 0.3])], np.float32)
        self.matrix("Resize", self.pick(), "", self.constant(scales), mode="nearest")

    def reshape(self) -> None:
        shape = [self.draw(-1, 0), self.draw(2, 4)] if self.draw(0, 1) else [self.draw(1, 2), -1]
        self.matrix("Reshape", self.pick(), self.constant(shape))

    def reshape_to_size(self) -> None:
        wanted = self.add("Concat", self.size(self.pick(), 0), self.constant([-1]), axis=0)
        self.matrix("Reshape", self.pick(), wanted)

    def split(self) -> None:
        self.matrix("Split", self.pick(), axis=1, num_outputs=2, count=2)

    def expand(self) -> None:
        mean = self.add("ReduceMean", self.pick(), self.constant([1]), keepdims=1)
        self.matrix("Expand", mean, self.add("Shape", self.pick()))

    def tile(self) -> None:
        self.matrix("Tile", self.pick(), self.constant([1, self.draw(1, 2, 3)]))

    def transpose(self) -> None:
        self.matrix("Transpose", self.pick(), perm=[1, 0])

    def combine(self) -> None:
        self.matrix(str(self.rng.choice(["Add", "Mul"])), self.pick(), self.pick())

    def multiply(self) -> None:
        self.matrix("MatMul", self.pick(), self.pick())

    def count(self) -> None:
        numbers = self.add(
            "Range",
            self.constant(0),
            self.add("Squeeze", self.size(self.pick(), 1)),
            self.constant(self.draw(1, 2)),
        )
        self.matrix("Unsqueeze", self.add("Cast", numbers, to=FLOAT), self.constant([0]))

    def proto(self, whole: bool) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info(name, FLOAT, dims) for name, dims in (("x", ["N", "S"]), ("z", ["N", "T"]))
        ]
        names = [y for node in self.nodes for y in node.output] if whole else self.values[-1:]
        outputs = [onnx.ValueInfoProto(name=name) for name in names]
        if not whole:
            outputs[0].type.tensor_type.elem_type = FLOAT
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


STEPS = [
    name
    for name in vars(Chain)
    if name not in ("pick", "draw", "constant", "add", "matrix", "size", "bound", "proto") and name[0] != "_"
]


def arrays_of(proto: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, np.ndarray] | None:
    """Return all values at some sizes of the inputs, or None where the runtime stops or a value is empty."""
    feeds = {name: np.ones((sizes["N"], sizes[dim]), np.float32) for name, dim in (("x", "S"), ("z", "T"))}
    try:
        running = session(proto, optimize=False)
        names = [y.name for y in running.get_outputs()]
        arrays = feeds | dict(zip(names, running.run(None, feeds), strict=True))
    except ERRORS:
        return None
    return arrays if all(array.size for array in arrays.values()) else None


def grown(seed: int) -> tuple[Chain, list[dict[str, int]]]:
    """Return a graph of some nodes that runs at some sizes, and these."""
    chain = Chain(seed)
    lengths = [1, 2, 3, 7, 61, 94, 127, 128, 129, 300, 511, 1600]
    tried = [{dim: chain.draw(*lengths) if dim != "N" else chain.draw(1, 2, 4) for dim in "NST"} for _ in range(6)]
    for _ in range(chain.draw(2, 4, 6)):
        before = [list(part) for part in (chain.nodes, chain.weights, chain.values)]
        getattr(chain, str(chain.rng.choice(STEPS)))()
        left = [sizes for sizes in tried if arrays_of(chain.proto(True), sizes) is not None]
        if len(left) > 1:
            tried = left
        else:
            chain.nodes, chain.weights, chain.values = before
    return chain, tried


@pytest.mark.parametrize("seed", range(400))
@pytest.mark.sample(24)
def test_sizes_of_random_graphs_are_those_of_the_runtime(seed):
    chain, tried = grown(seed)
    if not chain.nodes:
        pytest.skip("no node that runs at two sizes")
    found, whole = inferred(chain.proto(False)), chain.proto(True)
    for sizes in tried:
        arrays = arrays_of(whole, sizes)
        assert arrays is not None and not wrong_claims(found, arrays), sizes


@functools.cache
def node_cases() -> list:
    return [case for case in onnx.backend.test.case.node.collect_testcases(None) if case.model is not None]


@pytest.mark.parametrize("part", range(40))
@pytest.mark.sample(4)
def test_sizes_of_onnxs_node_tests_are_those_of_their_results(part):
    """With names for all sizes of the inputs, equal ones where sizes are equal by chance of the example."""
    wrong = []
    for case in node_cases()[part::40]:
        proto = onnx.ModelProto.FromString(case.model.SerializeToString())
        inputs, outputs = case.data_sets[0]
        for x in proto.graph.input:
            for i, dim in enumerate(x.type.tensor_type.shape.dim):
                dim.dim_param = f"{x.name}{i}"
        for y in proto.graph.output:
            y.type.tensor_type.ClearField("shape")
        if any(not isinstance(array, np.ndarray) for array in [*inputs, *outputs]):
            continue
        arrays = dict(zip([x.name for x in proto.graph.input], inputs, strict=False))
        arrays |= dict(zip([y.name for y in proto.graph.output], outputs, strict=False))
        wrong += [f"{case.name}: {claim}" for claim in wrong_claims(inferred(proto), arrays)]
    assert not wrong


PROVED = {
    "a slice of at most 128": ("y = Slice(x, zero, many, one)", None),
    "a slice to the size itself": ("s = Shape<start=1, end=2>(x) y = Slice(x, zero, s, one)", "[N,S]"),
    "all but the last, and the last": (
        "a = Slice(x, zero, last, one) c = Slice(x, last, far, one) y = Concat<axis=1>(a, c)", "[N,S]"
    ),
    "half of twice the size": (
        "t = Concat<axis=1>(x, x) h, k = Split<axis=1, num_outputs=2>(t) y = Add(h, k)", "[N,S]"
    ),
    "a bound that is fed": ("s = Shape(x) t = Slice(s, fed, far) y = ConstantOfShape(t)", None),
    "joined and cut": (
        "t = Concat<axis=1>(x, x) s = Shape<start=1, end=2>(x) y = Slice(t, zero, s, one)", "[N,S]"
    ),
    "at most 512 positions": (
        "s = Shape<start=1, end=2>(x) p = Slice(table, zero, s, one) y = Add(x, p)", "[N,S]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "shape"), PROVED.values(), ids=PROVED)
def test_a_size_is_known_where_its_formula_is_proved(text, shape):
    numbers = {"zero": [0], "one": [1], "many": [128], "last": [-1], "far": [FAR]}
    arrays = {name: np.array(array) for name, array in numbers.items() if name in text}
    arrays |= {"table": np.ones((1, 512))} if "table" in text else {}
    proto = model(f"g (float[N,S] x, int64[1] fed) => (float y) {{ {text} }}", **arrays)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    y = inferred(proto).graph.outputs[0]
    if shape is not None:
        assert str(y.shape) == shape
    else:
        assert y.shape is None or not any(isinstance(dim, int) or dim == "S" for dim in y.shape)


@pytest.mark.parametrize(("kernel", "more"), [(1, 0), (1, 1), (2, 0), (3, 0), (3, 1), (4, 2)])
def test_same_padding_of_a_transposed_convolution_crops_and_never_extends(kernel, more):
    """ONNX Runtime is the oracle: a kernel shorter than the stride makes less than sizes times strides."""
    proto = model(
        f"""g (float[N,1,S] x) => (float[N,1,A] y, float[N,1,B] z) {{
            y = ConvTranspose<auto_pad="SAME_UPPER", strides=[3], output_padding=[{more}]>(x, w)
            z = Concat<axis=2>(x, x, x)
        }}""",
        w=np.ones((1, 1, kernel)),
    )
    y, z = (value.shape[2] for value in inferred(proto).graph.outputs)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    for size in (1, 2, 5):
        lengths = [array.shape[2] for array in session.run(None, {"x": np.ones((2, 1, size), np.float32)})]
        assert (y == z) == (lengths[0] == lengths[1])


def test_what_holds_in_a_branch_that_does_not_run_does_not_hold_outside():
    text = """g (float[N,S] x, bool[N,S] m, bool c) => (float y) {
        i = NonZero(m) t = Transpose<perm=[1,0]>(i) a = Cast<to=1>(t) p = Slice(a, zero, one, one)
        r = Squeeze(p) u = Unsqueeze(r, zero)
        y = If (c) <then_branch = q () => (float[K,L] j) { j = Concat<axis=0>(x, u) },
                    else_branch = o () => (float[K,L] k) { k = Identity(u) }> }"""
    found = inferred(model(text, zero=np.array([0]), one=np.array([1])))
    shapes = {y.name: y.shape for node in found.graph for y in node.outputs}
    assert shapes["u"] is None or "S" not in list(shapes["u"])


def test_sizes_are_unified_twice_alike():
    proto = model("g (float[N,S] x) => (float[N,T] y) { t = Concat<axis=1>(x, x) y = Identity(t) }")
    found = inferred(proto)
    before = [str(y.shape) for node in found.graph for y in node.outputs]
    unify_sizes(found)
    assert [str(y.shape) for node in found.graph for y in node.outputs] == before == ["[N,T]", "[N,T]"]


def test_a_state_that_grows_has_no_size_of_its_start():
    text = """g (float[N,S] x, int64 n, bool c) => (float[N,T] y) {
        y = Loop(n, c, x) <body = b (int64 i, bool on, float[N,S] s) => (bool go, float[N,S] k) {
            go = Identity(on) a = ReduceMean<keepdims=1>(s, one) k = Concat<axis=1>(s, a) }> }"""
    found = inferred(model(text, one=np.array([1])))
    body = next(graph for graph in found.graphs() if graph is not found.graph)
    shapes = [body.inputs[2].shape, body.outputs[1].shape, found.graph.outputs[0].shape]
    assert all(shape is not None and shape[0] == "N" and shape[1] != "S" for shape in shapes)
    assert body.inputs[2].shape[1] != body.outputs[1].shape[1]


LOOPS = {
    "a Loop": "y = Loop(n, c, m) <body = b (int64 i, bool on, float[N,K] s) => (bool go, float[N,K] k) "
    "{ go = Identity(on) k = Tanh(s) }>",
    "an If": "y = If(c) <then_branch = p () => (float[N,K] k) { k = Tanh(m) }, "
    "else_branch = q () => (float[N,K] j) { j = Identity(m) }>",
    "a Scan": "s, y = Scan<num_scan_inputs=1, body = b (float h, float[K] i) => (float g, float[K] k) "
    "{ g = Identity(h) k = Tanh(i) }>(start, m)",
}


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_bodies_are_read_beside_sizes_that_are_made_up(text):
    head = "a = Slice(x, zero, many, one) r = Reshape(x, flat) z = NonZero(r) m = Mul(a, a)"
    numbers = {"zero": [0], "many": [64], "one": [1], "flat": [-1]}
    arrays = {name: np.array(array) for name, array in numbers.items()}
    arrays |= {"start": np.array(0.0)} if "start" in text else {}
    proto = model(f"g (float[N,S] x, int64 n, bool c) => (float[N,K] y) {{ {head} {text} }}", **arrays)
    y = inferred(proto).graph.outputs[0]
    assert y.shape is not None and y.shape[0] == "N" and y.shape[1] not in ("S", 64)


@pytest.mark.parametrize(("rows", "expected"), [("x", ["T", "N", 1]), ("cut", None)])
def test_results_have_the_sizes_of_a_body_that_runs_for_sure(rows, expected):
    text = f"""g (float[T,N] x) => (float[A,B,C] y) {{
        cut = Slice(x, first, far, axes)
        s, y = Scan<num_scan_inputs=1, body = b (float h, float[N] i) => (float o, float[B,C] k) {{
            o = Identity(h) k = Reshape(i, column) }}>(start, {rows}) }}"""
    numbers = {"first": [2], "far": [FAR], "axes": [0], "column": [-1, 1]}
    arrays = {name: np.array(array) for name, array in numbers.items()} | {"start": np.float32(0)}
    y = inferred(model(text, **arrays)).graph.outputs[0]
    if expected is None:  # the rows may be none
        assert y.shape is not None and y.shape[1] not in ("N", 0)
    else:
        assert y.shape == expected


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_products_of_open_sizes_take_no_memory():
    """At sizes that are tried, the vector of all elements had 10**8 of them and more."""
    text = "g (float[A,B,C,D] x) => (float y) { f = Reshape(x, flat) y = Gather<axis=0>(f, place) }"
    proto = model(text, flat=np.array([-1]), place=np.array(3))
    code = """import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**30, 3 * 2**30))
import graphopt, passes
passes.Normalize()(graphopt.load(sys.stdin.buffer.read()))"""
    done = subprocess.run([sys.executable, "-c", code], input=proto.SerializeToString(), capture_output=True)
    assert done.returncode == 0, done.stderr


# As torch.onnx.export(optimize=False) writes x + arange(rows)[:, None], and a slice of everything.
COMPUTED = (
    "g (float[N,6] x) => (float[N,3] y) { s = Shape<start=0,end=1>(x) n = Squeeze(s) from = CastLike(zero, n) "
    "by = CastLike(one, n) r = Range(from, n, by) f = CastLike(r, x) c = Unsqueeze(f, last) h = Add(x, c) {copies} }"
)
PLAIN = "y = MatMul(h, w)"
COPIES = (
    "a = Slice(h, first, most, first, ones) b = Slice(a, first, most, last) k = Shape(b) e = Expand(b, k) "
    "y = MatMul(e, w)"
)


def test_sizes_of_files_without_optimization_are_declared() -> None:
    given = {"zero": np.array(0), "one": np.array(1), "last": np.array([1]), "first": np.array([0])}
    given |= {"ones": np.array([1]), "most": np.array([2**63 - 1]), "w": np.ones((6, 3), np.float32)}
    steps, losses = [], []
    x = np.random.default_rng(0).standard_normal((5, 6), np.float32)
    for copies in (PLAIN, COPIES):
        text = COMPUTED.replace("{copies}", copies)
        proto = model(
            text, **{name: array for name, array in given.items() if f"{name})" in text or f"{name}," in text}
        )
        step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01))
        executor = graphopt.Executor(step, native=False)
        losses.append([executor.step({"x": x, "target": np.zeros((5, 3), np.float32)})["loss"] for _ in range(3)])
        steps.append(step)
    plain, copied = ([node.op_type for node in step.graph] for step in steps)
    assert sorted(copied) == sorted(plain) and "Slice" not in copied and "Expand" not in copied
    (numbers,) = (node.outputs[0] for node in steps[1].graph if node.op_type == "Range")
    assert str(numbers.shape) == "[N]"
    np.testing.assert_array_equal(losses[1], losses[0])
