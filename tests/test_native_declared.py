"""What a file declares of computed values decides nothing: kernels get sizes from inputs, whatever it says.

The oracle is ONNX Runtime on the same damaged file. `python tests/test_native_declared.py NAME SEEDS` runs the damage
under AddressSanitizer, with libasan loaded first; a test does so in full sweeps.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import attention, mlp, model
from precisions import product_error
from sanitizer import APART, run_sanitized, sanitize

import graphopt
import passes
from graphopt import models
from graphopt.errors import GraphoptError
from graphopt.graph.shapes import infer_anew
from graphopt.graph.sizes import unify_sizes
from graphopt.runtime.session import Session
from graphopt.targets.native import toolchain
from graphopt.targets.native.lowering import lower_to_kernels, plan

pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
FLOAT = onnx.TensorProto.FLOAT
W = np.random.default_rng(7)


def weights(**shapes):
    return {name: W.standard_normal(shape) / 3 for name, shape in shapes.items()}


def normalized():
    text = """g (float[N,16] x) => (float[N,3] y) { h = Gemm(x, w, b)  n = LayerNormalization(h, s, t)  a = Tanh(n)
        m = ReduceMean<keepdims=1>(a, ax)  d = Sub(a, m)  q = Softmax(d)  k = Mul(q, h)  y = MatMul(k, v) }"""
    return model(text, **weights(w=(16, 64), b=(64,), s=(64,), t=(64,), v=(64, 3)), ax=np.array([1]))


def scan():
    text = """g (float[N,5,8] x) => (float[N,3] y) { f = ReduceMean<keepdims = 0>(x, one)  z = Mul(f, c)
        t = Transpose<perm = [1,0,2]>(x)
        last, all = Scan<num_scan_inputs = 1,
            body = b (float[N,8] s, float[N,8] row) => (float[N,8] next, float[N,8] out) {
                p = MatMul(s, w)  q = Add(p, row)  next = Tanh(q)  out = Exp(next) }>(z, t)
        m = ReduceMean<keepdims = 0>(all, ax)  k = Mul(m, last)  y = MatMul(k, v) }"""
    arrays = {"ax": np.array([0]), "one": np.array([1]), "c": np.array(0.5)}
    return model(text, **weights(w=(8, 8), v=(8, 3)), **arrays)


def branches():
    part = """{{ {0}h = MatMul(x, w)  {0}a = Tanh({0}h)  {0}m = ReduceMean<keepdims = 1>({0}a, ax)
        {0}s = Sub({0}a, {0}m)  {0}y = MatMul({0}s, v) }}"""
    text = f"""g (float[N,8] x) => (float[N,3] y) {{ big = ReduceMax<keepdims = 0>(x)  c = Greater(big, zero)
        y = If<then_branch = p () => (float[N,3] py) {part.format("p")},
               else_branch = q () => (float[N,3] qy) {part.format("q")}>(c) }}"""
    return model(text, **weights(w=(8, 32), v=(32, 3)), ax=np.array([1]), zero=np.array(0.0))


def upsampled():
    text = """g (float[N,4,6,6] x) => (float[N,3] y) { c = Conv<pads = [1,1,1,1]>(x, w, b)  r = Relu(c)
        t = ConvTranspose<strides = [2,2]>(r, u)  s = Sigmoid(t)  m = ReduceMean<keepdims = 0>(s, ax)
        y = MatMul(m, v) }"""
    return model(text, **weights(w=(8, 4, 3, 3), b=(8,), u=(8, 6, 2, 2), v=(6, 3)), ax=np.array([2, 3]))


def reshaped():
    text = """g (float[N,4,6] x) => (float[N,3] y) { r = Reshape(x, flat)  h = Gelu(r)  q = Reshape(h, back)
        u = Unsqueeze(q, one)  z = Squeeze(u, one)  e = Mul(z, x)  s = ReduceSum<keepdims = 0>(e, two)
        c = Concat<axis = 1>(s, s)  a, d = Split<axis = 1, num_outputs = 2>(c)  k = Max(a, d, s)
        w1 = Where(g, k, d)  y = MatMul(w1, v) }"""
    arrays = {"flat": [-1, 6], "back": [-1, 4, 6], "one": [1], "two": [2]}
    arrays = {name: np.array(array) for name, array in arrays.items()}
    return model(text, **weights(v=(4, 3)), **arrays, g=np.array([True, False, True, True]))


def totals():
    text = """g (float[N,8] x) => (float[N,3] y) { a = Clip(x, low, high)  s = ReduceL2<keepdims = 1>(a, ax)
        d = Div(a, s)  p = Exp(d)  l = ReduceLogSum<keepdims = 1>(p, ax)  q = Sub(p, l)
        t = ReduceMax<keepdims = 1>(q, zero)  k = Sub(q, t)  y = MatMul(k, v) }"""
    arrays = {"low": np.array(-2.0), "high": np.array(2.0), "ax": np.array([1]), "zero": np.array([0])}
    return model(text, **weights(v=(8, 3)), **arrays)


NETWORKS = {
    "mlp": (lambda: mlp((4, 64, 48, 3)), (4,), (3,)),
    "attention": (attention, (6, 4), (6, 4)),
    "normalized": (normalized, (16,), (3,)),
    "cnn": (lambda: ir.to_proto(models.cnn((1, 8, 8), 3)), (1, 8, 8), (3,)),
    "scan": (scan, (5, 8), (3,)),
    "branches": (branches, (8,), (3,)),
    "upsampled": (upsampled, (4, 6, 6), (3,)),
    "reshaped": (reshaped, (4, 6), (3,)),
    "totals": (totals, (8,), (3,)),
}
STEPS = {}


def step_of(name):
    if name not in STEPS:
        proto = NETWORKS[name][0]()
        STEPS[name] = ir.to_proto(graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.AdamW(0.01)))
    copy = onnx.ModelProto()
    copy.CopyFrom(STEPS[name])
    return copy


def graphs(graph):
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from graphs(attribute.g)


def computed(proto):
    """Return the declarations of values that nodes compute, and of the inputs of bodies."""
    main, *inner = graphs(proto.graph)
    found = [*main.value_info, *(y for y in main.output)]
    for graph in inner:
        found += [*graph.value_info, *graph.output, *graph.input]
    return [value for value in found if value.type.HasField("tensor_type")]


def damage(proto, rng, many):
    """Declare wrong sizes, ranks and names of so many computed values; 0 stands for one of a rare operator."""
    values = computed(proto)
    symbols = [dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim if dim.dim_param]
    made = {y: node.op_type for graph in graphs(proto.graph) for node in graph.node for y in node.output}
    chosen = list(rng.choice(len(values), min(many, len(values)), replace=False))
    if not many:  # one result of an operator that few nodes have
        op_type = rng.choice(sorted({made.get(value.name, "") for value in values}))
        chosen = [rng.choice([i for i, value in enumerate(values) if made.get(value.name, "") == op_type])]
    for i in chosen:
        shape = values[i].type.tensor_type.shape
        dims, how = shape.dim, rng.integers(8)
        if how == 0:
            del dims[:]
        elif how == 1:
            dims.add(dim_value=int(rng.integers(4)))
        elif how == 2 and dims:
            del dims[-1]
        elif how == 3:
            values[i].type.tensor_type.ClearField("shape")
        for dim in dims if how in (4, 5, 6, 7) else []:
            dim.Clear()
            if how == 4:
                dim.dim_value = 0
            elif how == 5:
                dim.dim_value = 1
            elif how == 6:
                dim.dim_value = int(rng.integers(1, 5000))
            else:
                dim.dim_param = str(rng.choice([*symbols, "Q"]))


def renamed(proto, rng):
    """Give all symbolic sizes of computed values other names: each its own, shared wrongly, or none."""
    count = itertools.count()
    way = rng.integers(3)
    for value in computed(proto):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                names = [f"unk__{next(count)}", str(rng.choice(["N", "batch", "2*N", "unk__1"])), ""]
                dim.dim_param = names[way]


def results(proto, name, native):
    """Return the losses of two steps and the state after them, or the error."""
    _, shape, out = NETWORKS[name]
    rng = np.random.default_rng(0)
    found = []
    try:
        executor = graphopt.Executor(proto, threads=1, native=native, session_options=APART)
        source = next(each for each in executor.inputs if each != "target")
        for rows in (5, 70):
            arrays = [rng.standard_normal((rows, *sizes)).astype(np.float32) for sizes in (shape, out)]
            found.append(executor.step(dict(zip((source, "target"), arrays, strict=True)))["loss"])
    except GraphoptError as error:
        return error
    return [*found, *executor.state.values()]


def compare(proto, name):
    """Return whether kernels give the runtime's results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, native = results(proto, name, False), results(proto, name, True)
    for found in (plain, native):
        if isinstance(found, GraphoptError):
            assert "\n" not in str(found)
            return False
    for x, y in zip(plain, native, strict=True):
        np.testing.assert_allclose(y, x, rtol=2e-3, atol=max(1e-4, product_error()))
    return True


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sample(8)
@pytest.mark.slow
def test_wrong_declarations_change_nothing(name, seed):
    proto = step_of(name)
    damage(proto, np.random.default_rng(seed), (0, 3, 1000)[seed])
    assert compare(proto, name) or isinstance(results(proto, name, False), GraphoptError)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sample(8)
@pytest.mark.slow
def test_names_of_sizes_change_nothing(name, seed):
    proto = step_of(name)
    renamed(proto, np.random.default_rng(seed))
    assert compare(proto, name)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_names_cost_no_kernels(name):
    """A graph whose declarations are gone has the same kernels."""
    proto = step_of(name)
    before = plan(ir.from_proto(proto))
    for graph in graphs(proto.graph):
        del graph.value_info[:]
    after = plan(ir.from_proto(proto))
    assert sorted(k.name for k in after.kernels) == sorted(k.name for k in before.kernels)


def test_symbols_without_an_input_form_no_kernel():
    """`NonZero` invents a size that no input has."""
    text = "g (float[N] x) => (float[M] y) { i = NonZero(x)  f = Cast<to = 1>(i)  a = Tanh(f)  y = Exp(a) }"
    assert (
        lower_to_kernels(ir.from_proto(model(text.replace("float[M] y", "float[1,M] y")))) is not None
    )  # i says how many
    text = "g (int64[1] s) => (float[M] y) { f = ConstantOfShape(s)  a = Tanh(f)  y = Exp(a) }"
    lower_to_kernels(ir.from_proto(model(text)))


@pytest.mark.parametrize("dims", [("N", "N", 6), ("2*N", "N", 6), (None, None, 6), ("", "?", 6)])
def test_any_name_of_an_inputs_size(dims):
    text = """g (float[A,B,6] x) => (float[A,B,6] y) { a = MatMul(x, w)  b = Tanh(a)  m = ReduceMean<keepdims=1>(b, ax)
        c = Sub(b, m)  y = Mul(c, x) }"""
    proto = model(text, **weights(w=(6, 6)), ax=np.array([-1]))
    for value in (proto.graph.input[0], proto.graph.output[0]):
        for dim, given in zip(value.type.tensor_type.shape.dim, dims, strict=True):
            dim.Clear()
            if isinstance(given, int):
                dim.dim_value = given
            elif given:
                dim.dim_param = given
    lowered, device = lower_to_kernels(ir.from_proto(proto)), graphopt.Device("cpu")
    native = Session(device, lowered.model, library=lowered.library)
    for shape in ((3, 3, 6), (2, 5, 6)):
        x = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
        if dims[0] == dims[1] == "N" and shape[0] != shape[1]:
            with pytest.raises(Exception, match="an input has another shape than the graph says"):
                native.compute_arrays(x)
        else:
            expected = Session(device, ir.from_proto(proto)).compute_arrays(x)["y"]
            np.testing.assert_allclose(native.compute_arrays(x)["y"], expected, rtol=1e-4, atol=1e-6)


# --- Under AddressSanitizer ---


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NETWORKS)
def test_no_declaration_makes_kernels_write_beyond_their_memory(name, tmp_path):
    assert "kernels ran" in run_sanitized(__file__, name, "24", cache=tmp_path)


def main(name, seeds):
    sanitize()
    ran = 0
    for seed in range(seeds):
        proto, rng = step_of(name), np.random.default_rng(seed)
        (damage(proto, rng, int(rng.choice([0, 0, 0, 5, 1000]))) if seed % 2 else renamed(proto, rng))
        ran += compare(proto, name)
    print(f"kernels ran {ran} times")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(sys.argv[1], int(sys.argv[2]))


def test_sizes_follow_through_joined_cut_and_expanded_tensors():
    """Names that inference invents for the batch are found to be the batch, and a head's width a number."""
    text = """g (float[N,4] x) => (float[N,2] y) {
        n = Shape <start = 0, end = 1> (x)
        t = Concat <axis = 0> (n, four)
        e = Expand(token, t)
        j = Concat <axis = 1> (x, e)
        c = Slice(j, zero, four, one)
        h = Reshape(c, heads)
        f = Reshape(h, flat)
        y = Gemm(f, w)
    }"""
    numbers = {"four": [4], "zero": [0], "one": [1], "heads": [0, 2, -1], "flat": [0, -1]}
    arrays = {name: np.array(array) for name, array in numbers.items()}
    step = graphopt.load(model(text, token=np.ones((1, 4)), w=np.ones((4, 2)), **arrays))
    infer_anew(step)
    for i, node in enumerate(step.graph):
        for y in node.outputs:
            if y.name in {*"ejcy"}:
                y.shape = ir.Shape([f"u{i}" if not isinstance(dim, int) else dim for dim in y.shape])
            elif y.name == "h":
                y.shape = ir.Shape([*y.shape[:2], "width"])
    unify_sizes(step)
    shapes = {y.name: str(y.shape) for node in step.graph for y in node.outputs}
    assert {name: shapes[name] for name in "ejchfy"} == {
        "e": "[N,4]", "j": "[N,8]", "c": "[N,4]", "h": "[N,2,2]", "f": "[N,4]", "y": "[N,2]"
    }  # fmt: skip
