"""Matrix products of our own: the runtime's results, however operands and results are stored."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading

import numpy as np
import onnx
import pytest
from builders import model
from precisions import assert_equal_in_float32, assert_near

import graphopt
from graphopt.graph.checking import KERNELS
from graphopt.graph.loading import load
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.targets.native import toolchain
from graphopt.targets.native.lowering import lower_to_kernels, plan

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")

# The text of a graph, and the shapes of its inputs a, b and c.
GRAPHS = {
    "plain": ("y = MatMul(a, b)", (5, 7), (7, 3)),
    "large": ("y = MatMul(a, b)", (150, 301), (301, 77)),
    "batches": ("y = MatMul(a, b)", (2, 3, 5, 7), (2, 3, 7, 4)),
    "one right": ("y = MatMul(a, b)", (2, 3, 5, 7), (7, 4)),
    "one left": ("y = MatMul(a, b)", (5, 7), (2, 3, 7, 4)),
    "broadcast": ("y = MatMul(a, b)", (2, 1, 5, 7), (1, 3, 7, 4)),
    "one right, transposed": (
        "s = Transpose<perm=[1,0,2]>(a) t = Transpose<perm=[1,0]>(b) y = MatMul(s, t)",
        (6, 9, 20),
        (37, 20),
    ),
    "transposed left": ("t = Transpose<perm=[0,1,3,2]>(a) y = MatMul(t, b)", (2, 3, 7, 5), (2, 3, 7, 4)),
    "heads": (
        "q = Transpose<perm=[0,2,1,3]>(a) k = Transpose<perm=[0,2,3,1]>(b) y = MatMul(q, k)",
        (2, 6, 3, 5),
        (2, 7, 3, 5),
    ),
    "joined": ("p = MatMul(a, b) y = Transpose<perm=[0,2,1,3]>(p)", (2, 3, 5, 7), (2, 3, 7, 4)),
    "last axis moves": ("p = MatMul(a, b) y = Transpose<perm=[0,1,3,2]>(p)", (2, 3, 5, 7), (2, 3, 7, 4)),
    "last axis moves first": (
        "p = MatMul(a, b) y = Transpose<perm=[3,0,1,2]>(p)",
        (2, 3, 5, 7),
        (2, 3, 7, 4),
    ),
    "rows last": ("p = MatMul(a, b) y = Transpose<perm=[0,3,1,2]>(p)", (2, 3, 5, 7), (2, 3, 7, 4)),
    "rows last, one right": ("p = MatMul(a, b) y = Transpose<perm=[0,2,1]>(p)", (3, 50, 7), (7, 40)),
    "rows last, one left": ("p = MatMul(a, b) y = Transpose<perm=[2,0,1]>(p)", (50, 7), (3, 7, 40)),
    "rows last, broadcast": (
        "t = Transpose<perm=[1,0,2,3]>(a) p = MatMul(t, b) y = Transpose<perm=[1,0,3,2]>(p)",
        (1, 2, 5, 7),
        (1, 3, 7, 4),
    ),
    "rows last, large": ("p = MatMul(a, b) y = Transpose(p)", (150, 300), (300, 77)),
    "batch last": ("p = MatMul(a, b) y = Transpose<perm=[1,2,0]>(p)", (2, 5, 7), (2, 7, 4)),
    "chains": (
        """s = Transpose<perm=[0,2,1,3]>(a) i = Identity(s) t = Transpose<perm=[0,1,3,2]>(i)
        u = Transpose<perm=[0,2,3,1]>(b) v = Transpose<perm=[0,1,3,2]>(u) y = MatMul(t, v)""",
        (2, 6, 3, 5),
        (2, 6, 3, 7),
    ),
    "chain through a batch": (
        "s = Transpose<perm=[2,1,0]>(a) t = Transpose<perm=[1,2,0]>(s) y = MatMul(t, b)",
        (6, 2, 5),
        (2, 5, 7),
    ),
    "to a batch": (
        "s = Transpose<perm=[2,1,0]>(a) t = Transpose<perm=[0,2,1]>(s) y = MatMul(t, b)",
        (6, 5, 2),
        (2, 5, 7),
    ),
    "read twice": (
        "p = MatMul(a, b) t = Transpose<perm=[1,0]>(p) u = MatMul(p, t) y = Add(u, u)",
        (5, 7),
        (7, 5),
    ),
    "default transpose": ("t = Transpose(a) y = MatMul(t, b)", (7, 5), (7, 3)),
    "gemm": ("y = Gemm(a, b)", (5, 7), (7, 3)),
    "both transposed": ("y = Gemm<transA=1, transB=1>(a, b)", (7, 5), (3, 7)),
    "bias of columns": ("y = Gemm(a, b, c)", (5, 7), (7, 3), (3,)),
    "bias of rows": ("y = Gemm(a, b, c)", (5, 7), (7, 3), (5, 1)),
    "bias of one": ("y = Gemm(a, b, c)", (5, 7), (7, 3), ()),
    "bias of all": ("y = Gemm<transB=1>(a, b, c)", (5, 7), (3, 7), (5, 3)),
    "added columns": ("p = MatMul(a, b) y = Add(p, c)", (50, 7), (7, 40), (40,)),
    "added columns, first": ("p = MatMul(a, b) y = Add(c, p)", (3, 5, 7), (7, 4), (1, 1, 4)),
    "added columns, large": ("p = MatMul(a, b) y = Add(c, p)", (2, 80, 300), (300, 77), (77,)),
    "added columns, batches": ("p = MatMul(a, b) y = Add(p, c)", (2, 3, 5, 7), (2, 3, 7, 40), (1, 40)),
    "added columns, broadcast": ("p = MatMul(a, b) y = Add(p, c)", (2, 1, 5, 7), (3, 7, 4), (4,)),
    "added columns, nothing inside": ("p = MatMul(a, b) y = Add(p, c)", (2, 5, 0), (2, 0, 3), (3,)),
    "added columns, one": ("p = MatMul(a, b) y = Add(p, c)", (2, 5, 7), (7, 1), (1,)),
    "added columns, gemm": ("p = Gemm<transB=1>(a, b) y = Add(p, c)", (5, 7), (3, 7), (1, 3)),
    "added columns, chains": (
        """s = Transpose<perm=[0,2,1,3]>(a) t = Transpose<perm=[0,1,3,2]>(s) p = MatMul(t, b)
        q = Add(c, p) y = Transpose<perm=[0,2,1,3]>(q)""",
        (2, 6, 3, 5),
        (2, 3, 6, 7),
        (7,),
    ),
    "added columns, rows last": (
        "p = MatMul(a, b) q = Add(p, c) y = Transpose<perm=[0,3,1,2]>(q)",
        (2, 3, 5, 7),
        (2, 3, 7, 40),
        (40,),
    ),
    "added columns, rows last, one left": (
        "p = MatMul(a, b) q = Add(p, c) y = Transpose<perm=[2,0,1]>(q)",
        (50, 7),
        (3, 7, 40),
        (40,),
    ),
    "bias of columns, rows last": ("p = Gemm(a, b, c) y = Transpose(p)", (50, 7), (7, 30), (30,)),
    "bias of rows, rows last": ("p = Gemm(a, b, c) y = Transpose(p)", (50, 7), (7, 30), (50, 1)),
    "added rows": ("p = MatMul(a, b) y = Add(p, c)", (5, 7), (7, 4), (5, 1)),
    "added number": ("p = MatMul(a, b) y = Add(p, c)", (5, 7), (7, 4), ()),
    "added one": ("p = MatMul(a, b) y = Add(p, c)", (5, 7), (7, 4), (1,)),
    "added wide": ("p = MatMul(a, b) y = Add(p, c)", (5, 7), (7, 1), (6,)),
    "added batches": ("p = MatMul(a, b) y = Add(p, c)", (5, 7), (7, 4), (2, 1, 4)),
    "added after a transpose": (
        "p = MatMul(a, b) t = Transpose<perm=[1,0]>(p) y = Add(t, c)",
        (5, 7),
        (7, 4),
        (5,),
    ),
    "added, read twice": ("p = MatMul(a, b) q = Add(p, c) y = Mul(q, p)", (5, 7), (7, 4), (4,)),
    "added, in reach of a cluster": ("p = MatMul(a, b) q = Add(p, c) y = Tanh(q)", (5, 7), (7, 4), (4,)),
    "added, viewed in reach of a cluster": (
        "p = MatMul(a, b) q = Add(p, c) z = Constant<value = int64[1] {0}>() r = Unsqueeze(q, z) y = Tanh(r)",
        (5, 7),
        (7, 4),
        (4,),
    ),
    "nothing inside": ("y = MatMul(a, b)", (5, 0), (0, 3)),
    "no rows": ("y = Gemm(a, b, c)", (0, 7), (7, 3), (3,)),
}


ALONE = (
    "added columns",
    "bias of columns",
    "chain",
    "heads",
    "joined",
    "last axis moves",
    "rows last",
)  # only products are left of these


@pytest.mark.whole
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_product_is_the_runtimes(name, symbolic):
    arrays = [RNG.standard_normal(shape).astype(np.float32) for shape in GRAPHS[name][1:]]
    compare(graph_of(name, symbolic), dict(zip("abc", arrays, strict=False)), lowers=not symbolic)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name.startswith(ALONE)])
def test_a_product_takes_in_what_is_around_it(name):
    assert left(graph_of(name)) == []


STAY = {
    "to a batch": ["Transpose"],
    "batch last": ["Transpose"],
    "bias of rows, rows last": ["Transpose"],
    "added rows": ["Add"],
    "added number": ["Add"],
    "added one": ["Add"],
    "added wide": ["Add"],
    "added batches": ["Add"],
    "added after a transpose": ["Add"],
    "added, read twice": ["Add", "Mul"],
    "added, in reach of a cluster": ["Add", "Tanh"],
    "added, viewed in reach of a cluster": ["Add", "Constant", "Unsqueeze", "Tanh"],
}


@pytest.mark.parametrize("name", STAY)
def test_what_a_product_cannot_take_in_stays(name):
    assert left(graph_of(name)) == STAY[name]


def graph_of(name, symbolic=False):
    return graph_from(*GRAPHS[name], symbolic=symbolic)


def graph_from(text, *shapes, symbolic=False):
    dims = itertools.count()
    names = [[f"D{next(dims)}" if symbolic else str(d) for d in shape] for shape in shapes]
    inputs = ", ".join(
        f"float[{','.join(axes)}] {x}" if axes else f"float {x}" for x, axes in zip("abc", names, strict=False)
    )
    proto = model(f"g ({inputs}) => (float y) {{ {text} }}")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(proto)


def left(proto):
    """Return the nodes that are no kernels."""
    found = plan(load(proto), without=["kernels"])
    return [node.op_type for node in found.model.graph if node.domain != KERNELS]


def compare(proto, feeds, lowers=True):
    device = Device("cpu", threads=2, native=False)
    graph = load(proto)
    plain = Session(device, graph).compute_arrays(feeds)
    lowered = lower_to_kernels(graph, without=["kernels"], threads=2)
    if lowered is None:
        assert not lowers
        return
    found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)
    for output, expected in plain.items():
        assert_near(found[output], expected)


def test_sizes_may_be_dynamic():
    proto = model("""g (float[B,S,3,D] a, float[B,T,3,D] b) => (float[B,T,3,S] y) {
        s = Transpose<perm=[0,2,1,3]>(a) t = Transpose<perm=[0,2,1,3]>(b) u = Transpose<perm=[0,1,3,2]>(t)
        p = MatMul(s, u) y = Transpose<perm=[0,3,1,2]>(p) }""")
    assert left(proto) == []
    for batch, s, t, d in [(1, 1, 1, 1), (2, 5, 4, 7), (3, 40, 1, 33)]:
        a, b = (RNG.standard_normal((batch, n, 3, d)).astype(np.float32) for n in (s, t))
        compare(proto, {"a": a, "b": b})


def test_sizes_of_an_added_vector_may_be_dynamic():
    proto = model("""g (float[B,M,K] a, float[B,K,N] b, float[N] c) => (float[B,M,N] y) {
        p = MatMul(a, b) y = Add(c, p) }""")
    assert left(proto) == []
    for batch, m, k, n in [(1, 1, 1, 1), (2, 5, 4, 7), (3, 40, 300, 33)]:
        shapes = {"a": (batch, m, k), "b": (batch, k, n), "c": (n,)}
        compare(proto, {x: RNG.standard_normal(shape).astype(np.float32) for x, shape in shapes.items()})


@pytest.mark.parametrize(("m", "k", "n"), [(5, 7, 3), (150, 700, 77), (33, 256, 1)])
def test_a_product_has_the_same_bits_with_what_it_takes_in(m, k, n):
    proto = model(f"""g (float[2,{m},{k}] a, float[2,{k},{n}] b, float[{n}] c)
        => (float[2,{m},{n}] x, float[2,{n},{m}] y, float[2,{m},{n}] z, float[2,{n},{m}] u) {{
        x = MatMul(a, b) p = MatMul(a, b) y = Transpose<perm=[0,2,1]>(p) q = MatMul(a, b) z = Add(q, c)
        r = MatMul(a, b) s = Add(r, c) u = Transpose<perm=[0,2,1]>(s) }}""")
    assert left(proto) == []
    shapes = {"a": (2, m, k), "b": (2, k, n), "c": (n,)}
    feeds = {x: RNG.standard_normal(shape).astype(np.float32) for x, shape in shapes.items()}
    x, y, z, u = native(proto, feeds).values()
    swapped = "the result's transpose is a product of swapped operands, whose mixed terms are added in another order"
    assert_equal_in_float32(y, x.transpose(0, 2, 1), swapped)
    np.testing.assert_array_equal(z, x + feeds["c"])
    assert_equal_in_float32(u, z.transpose(0, 2, 1), swapped)


def test_a_transpose_in_a_branch_stays_there():
    proto = model("""g (float[3,4] a, float[4,5] b, bool c) => (float[5,3] y) {
        p = MatMul(a, b)
        y = If (c) <then_branch = t () => (float[5,3] u) { u = Transpose(p) },
                    else_branch = e () => (float[5,3] v) { q = Neg(b) r = Transpose(a) s = Transpose(q)
                                                           v = MatMul(s, r) }> }""")
    a, b = (RNG.standard_normal(shape).astype(np.float32) for shape in [(3, 4), (4, 5)])
    for c in (True, False):
        compare(proto, {"a": a, "b": b, "c": np.array(c)})


def native(proto, feeds):
    """Return what kernels compute."""
    return session_of(proto).compute_arrays(feeds)


def session_of(proto, threads=2):
    lowered = lower_to_kernels(load(proto), without=["kernels"], threads=threads)
    return Session(Device("cpu", threads=threads, native=False), lowered.model, library=lowered.library)


def test_scaled_products_stay():
    proto = model("g (float[2,3] a, float[3,2] b) => (float[2,2] y) { y = Gemm<alpha=0.5>(a, b) }")
    assert lower_to_kernels(load(proto)) is None


def test_a_wrong_inner_dimension_is_an_error():
    proto = model("g (float[M,K] a, float[L,N] b) => (float[M,N] y) { y = MatMul(a, b) }")
    lowered = lower_to_kernels(load(proto))
    session = Session(Device("cpu", native=False), lowered.model, library=lowered.library)
    with pytest.raises(graphopt.GraphoptError, match="another shape"):
        session.compute_arrays({"a": np.ones((2, 3), np.float32), "b": np.ones((4, 2), np.float32)})


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 3), (300, 77), (256, 64), (40, 33)])
def test_a_weight_is_packed_once(k, n, turned):
    w = RNG.standard_normal((n, k) if turned else (k, n)).astype(np.float32)
    text = f"g (float[M,{k}] a, float[{','.join(map(str, w.shape))}] w) => (float[M,{n}] y) {{ "
    fed = model(f"{text} y = Gemm<transB={int(turned)}>(a, w) }}")
    frozen = onnx.ModelProto.FromString(fed.SerializeToString())
    del frozen.graph.input[1]
    frozen.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    one, other = session_of(frozen), session_of(fed)
    for m in (1, 5, 600, 64, 1):
        a = RNG.standard_normal((m, k)).astype(np.float32)
        y = one.compute_arrays({"a": a})["y"]
        packed = "packed weights are multiplied in the same precision for any number of rows, fed ones are not"
        assert_equal_in_float32(y, other.compute_arrays({"a": a, "w": w})["y"], packed)
        assert_near(y, a.astype(np.float64) @ (w.T if turned else w))


def test_threads_may_call_a_new_session_at_once():
    w = RNG.standard_normal((300, 77)).astype(np.float32)
    proto = model("g (float[M,300] a) => (float[M,77] y) { y = MatMul(a, w) }")
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    a = RNG.standard_normal((20, 300)).astype(np.float32)
    for _ in range(20):
        session, barrier = session_of(proto), threading.Barrier(4)

        def call(session=session, barrier=barrier):
            barrier.wait()
            return session.compute_arrays({"a": a})["y"]

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = [task.result() for task in [pool.submit(call) for _ in range(4)]]
        for y in results:
            assert_near(y, a.astype(np.float64) @ w)
            np.testing.assert_array_equal(y, results[0])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("m", "k"), [(1, 1), (16, 9), (65, 512), (1024, 700)])
def test_a_narrow_product_is_the_first_columns_of_a_wide_one(m, k, threads):
    a, b = (RNG.standard_normal((k, size)).astype(np.float32) for size in (m, 100))
    for n in (1, 2, 8, 16, 17, 32, 33):
        proto = model(f"""g (float[{k},{m}] a, float[{k},{n}] b, float[{k},100] c)
            => (float[{m},{n}] x, float[{m},100] y) {{ x = Gemm<transA=1>(a, b) y = Gemm<transA=1>(a, c) }}""")
        found = session_of(proto, threads).compute_arrays({"a": a, "b": b[:, :n], "c": b})
        assert_equal_in_float32(found["x"], found["y"][:, :n], "narrow products are of float32 numbers")
        assert_near(found["x"], a.T.astype(np.float64) @ b[:, :n])
