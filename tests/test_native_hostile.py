"""Models made to break kernels: nothing of a model but numbers and known operators decides what compiled code does."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import attention, mlp, model

import graphopt
import passes
from graphopt import models
from graphopt.errors import GraphoptError
from graphopt.graph.checking import KERNELS
from graphopt.graph.loading import load
from graphopt.runtime.session import Session
from graphopt.targets.native import operators, toolchain
from graphopt.targets.native.library import source
from graphopt.targets.native.lowering import lower_to_kernels, plan

pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
SQUARES = passes.MeanSquaredError()
EVIL = "x\n#error evil\n(Context *c) { return evil(); }"
BODY = """g (float[N,4] x) => (float[N,4] y) {{ z = Scan<num_scan_inputs=1, body = b (float[4] r) => (float[4] o) {{
    {inner} o = Neg(t) }}>(x)  y = Tanh(z) }}"""


def text_model(text, **weights):
    proto = model(text, **weights)
    proto.opset_import.add(domain=KERNELS, version=1)
    return proto


def in_main():
    return text_model(f"g (float[N,4] x) => (float[N,4] y) {{ t = {KERNELS}.k0(x)  y = Neg(t) }}")


def in_body():
    return text_model(BODY.format(inner=f"t = {KERNELS}.k0(r)"))


def in_a_branch_of_a_body():
    branches = "".join(
        f"{way}_branch = {way} () => (float[4] {way}_u) {{ {way}_u = {KERNELS}.k0(r) }}{comma}"
        for way, comma in (("then", ", "), ("else", ""))
    )
    return text_model(
        BODY.format(inner=f"c = Constant<value = bool {{1}}>()  t = If<{branches}>(c)"),
    )


def in_a_function():
    proto = model("g (float[N,4] x) => (float[N,4] y) { y = Neg(x) }")
    node = onnx.helper.make_node("k0", ["a"], ["b"], domain=KERNELS)
    opsets = [onnx.helper.make_opsetid(KERNELS, 1)]
    proto.functions.append(onnx.helper.make_function("own", "f", ["a"], ["b"], [node], opsets))
    proto.opset_import.add(domain="own", version=1)
    return proto


def as_a_function():
    proto = model("g (float[N,4] x) => (float[N,4] y) { y = Neg(x) }")
    node = onnx.helper.make_node("Neg", ["a"], ["b"])
    opsets = list(proto.opset_import)
    proto.functions.append(onnx.helper.make_function(KERNELS, "k0", ["a"], ["b"], [node], opsets))
    return proto


def in_a_training_graph():
    proto = ir.to_proto(step_of(mlp((4, 8, 3))))
    proto.graph.node[0].domain = KERNELS
    proto.graph.node[0].op_type = EVIL
    proto.opset_import.add(domain=KERNELS, version=1)
    return proto


def step_of(proto, **steps):
    return graphopt.compile(proto, **{"loss": SQUARES, "optimizer": passes.AdamW(0.01), **steps})


HIDDEN = [
    in_main,
    in_body,
    in_a_branch_of_a_body,
    in_a_function,
    as_a_function,
    in_a_training_graph,
]


def test_an_opset_that_onnx_runtime_has_written_is_removed():
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 21]> g (float[N,4] x) => (float[N,4] y) { y = Neg(x) }'
    )
    proto.opset_import.add(domain=KERNELS, version=1)
    assert load(proto).opset_imports == {"": 21}


@pytest.mark.parametrize("made", HIDDEN)
@pytest.mark.parametrize("form", ["path", "proto", "ir"])
def test_no_model_may_call_compiled_kernels(made, form, tmp_path):
    proto = made()
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    given = {"path": lambda: path, "proto": lambda: proto, "ir": lambda: ir.from_proto(proto)}[form]
    for use in (load, graphopt.Executor, lambda x: graphopt.compile(x, loss=SQUARES)):
        with pytest.raises(GraphoptError, match=r"found the domain 'ai\.graphopt' of graphopt's compiled") as error:
            use(given())
        assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_only_calls_of_the_plan_are_kernels():
    """Even if such a node comes by another way, a scan with it stays with ONNX Runtime."""
    proto = in_body()
    proto.graph.node[0].attribute[1].g.node[0].op_type = EVIL
    found = plan(ir.from_proto(proto))
    assert found.counts["scans"] == 0 and all("evil" not in kernel.code for kernel in found.kernels)


# --- What may stand in generated code ---

LOCAL = re.compile(
    r"(in|out|sum|length|n|d|i|u|v|t_|[prsx]_v|[qy]_out)\d+"
    r"|((types|args|body|task|compute|block|steps|results|ranks|sizes|dims|reversed|inputs|outputs)_)?"
    r"[akpcsu][0-9a-f]{16}(_[0-9a-f]{16})?(_\d+)?"
)
NUMBER = re.compile(r"0x[01]\.[0-9a-f]+p[+-]\d+f?|\d+(\.\d+)?(LL)?")
TOKEN = re.compile(r"0x[0-9a-f.]+p[+-]\d+\w*|\d[\w.]*|[A-Za-z_]\w*")


def vocabulary():
    """Return the words of the headers, of the tables of operators and of the writers themselves."""
    folder = Path(toolchain.__file__).parent
    files = [*toolchain.FOLDER.glob("*.h"), operators.__file__]
    files += [folder / f"{name}.py" for name in ("kernels", "loops", "lanes", "library", "numbers")]
    files += [
        folder / f"{name}.py" for name in ("attention", "products", "convolutions", "pools", "scans", "new_state")
    ]
    texts = [*(Path(path).read_text() for path in files), *operators.OF_FLOATING.values()]
    return {word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)}


def strange(code):
    """Return the words of a C source that are neither numbers, nor made by the writers, nor in a table."""
    words = {token for token in TOKEN.findall(code) if not NUMBER.fullmatch(token)} - vocabulary()
    for mark in ('"', "'", "\\", "//", "/*"):
        if mark in re.sub(r'#include "\w+\.h"', "", code):
            words.add(mark)
    lines = [line for line in code.splitlines() if "#" in line]
    allowed = re.compile(r'#include "\w+\.h"|#define [A-Z_]+ \d+|\s*#pragma omp simd( reduction\((\+|\*|\w+):\w+\))*')
    words.update(line for line in lines if not allowed.fullmatch(line))
    return {word for word in words if not LOCAL.fullmatch(word)}


def spoiled(proto):
    """Return a model all whose names are hostile text."""
    names = {"": ""}

    def name(x):
        return names.setdefault(x, f'evil{len(names)} */ "\n#error')

    def walk(graph):
        for node in graph.node:
            node.name, node.doc_string = name(node.name or "n"), EVIL
            node.input[:], node.output[:] = map(name, node.input), map(name, node.output)
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    walk(attribute.g)
        for value in [*graph.input, *graph.output, *graph.value_info]:
            value.name = name(value.name)
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = name(dim.dim_param)
        for tensor in graph.initializer:
            tensor.name = name(tensor.name)

    walk(proto.graph)
    return proto


SCAN = """g (float[T,N,8] x, float[N,8] h) => (float[T,N,8] y) {
    last, y = Scan<num_scan_inputs = 1, body = b (float[N,8] s, float[N,8] row) => (float[N,8] next, float[N,8] out) {
        p = MatMul(s, w)  q = Add(p, row)  next = Tanh(q)  out = Gelu<approximate = "tanh">(next) }>(h, x) }"""
MANY = """g (float[N,8] x) => (float[N,8] y) {
    a = Clip(x, low, high)  b = LeakyRelu<alpha = 0.3>(a)  c = Max(a, b, x)  d = IsInf(c)  e = Where(d, a, c)
    f = Cast<to = 7>(e)  g0 = Mul(f, whole)  h = Cast<to = 1>(g0)  i = LayerNormalization(h, s)
    j = ReduceMax<keepdims = 1>(i)  k = Sub(i, j)  l = Softmax(k)  m = Mod<fmod = 1>(l, high)  n = Pow(m, high)
    y = Elu<alpha = 1.5>(n) }"""
WRITTEN: dict[str, Callable[[], onnx.ModelProto]] = {
    "mlp": lambda: ir.to_proto(step_of(spoiled(mlp((4, 64, 3))))),
    "attention": lambda: ir.to_proto(step_of(attention())),
    "cnn": lambda: ir.to_proto(step_of(models.cnn((1, 12, 12), 3))),
    "scan": lambda: spoiled(model(SCAN, w=np.ones((8, 8)))),
    "many operators": lambda: spoiled(
        model(MANY, low=np.array(-1e-3), high=np.array(np.inf), whole=np.array(-(2**63)), s=np.ones(8))
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.slow
def test_only_numbers_and_names_from_tables_reach_c(name):
    found = plan(ir.from_proto(WRITTEN[name]()))
    assert found.kernels
    assert strange(source(found.kernels, threads=2)) == set()


def test_a_strange_word_is_noticed():
    assert strange("evil(1);") == {"evil"}
    assert strange('#include "/etc/passwd"') and strange("#error x") and strange("// x")
    assert strange("float v1 = exp_float(v0) * 0x1.8p+1f;") == set()


# --- Models that take long to compile ---


def chained(count):
    lines = [f"h{i + 1} = {['Sin', 'Tanh', 'Neg', 'Sigmoid', 'Abs'][i % 5]}(h{i})" for i in range(count)]
    return model(f"g (float[N,32] h0) => (float[N,32] h{count}) {{ {chr(10).join(lines)} }}")


def largest_of(count, op_type="Max"):
    lines = [f"a{i} = {['Sin', 'Cos', 'Tanh', 'Neg'][i % 4]}({f'a{i - 4}' if i > 3 else 'x'})" for i in range(count)]
    lines.append(f"y = {op_type}({', '.join(f'a{i}' for i in range(count))})")
    return model(f"g (float[N,32] x) => (float[N,32] y) {{ {chr(10).join(lines)} }}")


LONG = {
    "chain": lambda: chained(300),
    "max": lambda: largest_of(24),
    "min": lambda: largest_of(30, "Min"),
    "sum": lambda: largest_of(200, "Sum"),
}


@pytest.mark.parametrize("name", LONG)
def test_code_is_linear_in_the_graph(name):
    graph = load(LONG[name]())
    found = plan(graph)
    assert max(kernel.nodes for kernel in found.kernels) <= 64
    assert sum(len(kernel.code) for kernel in found.kernels) < 1000 * len(graph.graph)


@pytest.mark.parametrize("op_type", ["Max", "Min"])
def test_the_largest_of_many_is_the_runtimes(op_type):
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)}
    feeds["x"][0, 0] = np.nan
    graph = load(largest_of(20, op_type))
    lowered = lower_to_kernels(graph)
    device = graphopt.Device("cpu")
    found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)["y"]
    np.testing.assert_allclose(found, Session(device, graph).compute_arrays(feeds)["y"], rtol=1e-5)


# --- Geometry that C's int or memory cannot hold ---

HUGE = 2**40
GEOMETRY = [
    ("Conv", {"strides": [HUGE, 1]}),
    ("Conv", {"dilations": [HUGE, 1]}),
    ("Conv", {"pads": [HUGE, 0, 0, 0]}),
    ("Conv", {"pads": [-HUGE, 0, HUGE, 0]}),
    ("Conv", {"strides": [2**31, 1]}),
    ("Conv", {"dilations": [2**12, 2**12], "pads": [2**12] * 4}),
    ("Conv", {"group": 2**32 + 1}),
    ("Conv", {"strides": [1]}),
    ("Conv", {"strides": [0, 1]}),
    ("ConvTranspose", {"strides": [2**20, 2**20]}),
    ("ConvTranspose", {"dilations": [HUGE, 1]}),
    ("ConvTranspose", {"output_padding": [HUGE, 0]}),
    ("ConvTranspose", {"pads": [-HUGE, 0, 0, 0]}),
]


@pytest.mark.parametrize(("op_type", "attributes"), GEOMETRY)
def test_a_geometry_out_of_range_is_left_to_the_runtime(op_type, attributes):
    given = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    proto = model(
        f"g (float[N,8,9,9] x) => (float[N,A,B,C] y) {{ y = {op_type}<{given}>(x, w) }}",
        w=np.ones((8, 8, 3, 3)),
    )
    assert plan(ir.from_proto(proto)).counts["convolutions"] == 0


@pytest.mark.parametrize(("group", "taps"), [(1, 40_000), (900_000_000, 1), (0, 40_000)])
def test_a_kernel_that_unfolds_no_windows_costs_no_memory(group, taps):
    """A kernel that unfolds has as many numbers as one that is made to compare with it; others are smaller."""
    proto = model(
        f"""g (float[2,1,{taps + 1},1] x, float[2,3,2,1] dy) => (float[2,1,3,1] y)
        <int64[4] s = {{2, 1, 1, 2}}, int64[4] t = {{2, 1, 3, 2}}> {{
            c = Conv<group = {group}>(x, w) u = Reshape(c, s) v = Transpose<perm = [0,1,3,2]>(u) d = Reshape(dy, t)
            y = MatMul(d, v) }}""",
        w=np.ones((min(group, 1), 1, taps, 1)),
    )
    tracemalloc.start()
    try:
        plan(ir.from_proto(proto))
        assert tracemalloc.get_traced_memory()[1] < 10**8
    finally:
        tracemalloc.stop()


def changed(proto, rng):
    """Spoil an attribute, an input or an output of a random node."""
    nodes = [node for node in proto.graph.node if node.attribute or node.input]
    node = nodes[rng.integers(len(nodes))]
    how = rng.integers(6)
    if node.attribute and how < 3:
        attribute = node.attribute[rng.integers(len(node.attribute))]
        name, kind = attribute.name, attribute.type
        if kind == onnx.AttributeProto.INTS:
            attribute.ints[:] = [int(rng.choice([-HUGE, -7, -1, 0, 1, 9, 2**62])) for _ in range(rng.integers(5))]
        elif kind == onnx.AttributeProto.INT:
            attribute.i = int(rng.choice([-HUGE, -7, 5, 99, 2**62]))
        if how == 2:
            attribute.CopyFrom(onnx.helper.make_attribute(name, EVIL))
    elif how == 3:
        node.attribute.append(onnx.helper.make_attribute("evil", EVIL))
    elif how == 4:
        node.input.append(node.input[0])
    elif how == 5 and len(node.input) > 1:
        del node.input[-1]
    else:
        del node.attribute[:]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.sample(15)
def test_planning_a_spoiled_graph_raises_no_exception_of_its_own(name, seed):
    proto = ir.to_proto(ir.from_proto(WRITTEN[name]()))
    rng = np.random.default_rng(seed)
    for _ in range(3):
        changed(proto, rng)
        found = plan(ir.from_proto(proto))
        assert strange(source(found.kernels, threads=2)) == set()
