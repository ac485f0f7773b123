"""Attention in kernels that keep no probabilities: PyTorch's results and gradients."""

from __future__ import annotations

import functools
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
from builders import model
from precisions import assert_near

import graphopt
import passes
from graphopt.graph.loading import load
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.targets.native import toolchain
from graphopt.targets.native.attention import attending_to_many
from graphopt.targets.native.lowering import KERNEL_KINDS, lower_to_kernels, plan

pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
PLAIN = [kind for kind in KERNEL_KINDS if kind != "attention"]
LAYERS = 10  # how many roundings of products a probability, and what is computed from it, may have
LOWEST = float(np.finfo(np.float32).min)

# The type of a mask, and the steps from products p to scores s.
MASKS = {
    "none": ("", "s = Mul(p, scale)"),
    "added": ("float[B,1,M,N] mask", "t = Mul(scale, p) s = Add(t, mask)"),
    "added first": ("float[M,N] mask", "t = Add(mask, p) s = Div(t, divisor)"),
    "a row": ("float[B,1,1,N] mask", "t = Mul(p, scale) s = Add(t, mask)"),
    "a column": ("float[H,M,1] mask", "t = Mul(p, scale) s = Add(t, mask)"),
    "kept": ("bool[B,1,M,N] mask", "t = Mul(p, scale) s = Where(mask, t, lowest)"),
    "dropped": ("bool[M,N] mask", "t = Where(mask, lowest, p) s = Mul(t, scale)"),
    "kept and added": (
        "bool[B,1,1,N] keep, float[M,N] mask",
        "t = Mul(p, scale) u = Where(keep, t, lowest) s = Add(u, mask)",
    ),
}
SAFE = "o = Softmax(s) n = IsNaN(o) a = Where(n, zero, o) y = MatMul(a, v)"


def graph_of(
    steps,
    masks="",
    after="a = Softmax(s) y = MatMul(a, v)",
    before="t0 = Transpose<perm=[0,1,3,2]>(k) p = MatMul(q, t0)",
):
    masks = f", {masks}" if masks else ""
    text = f"""g (float[B,H,M,D] q, float[B,H,N,D] k, float[B,H,N,E] v{masks}) => (float[B,H,M,E] y)
    <float scale = {{0.25}}, float divisor = {{2.0}}, float lowest = {{{LOWEST!r}}}, float zero = {{0.0}}>
    {{ {before} {steps} {after} }}"""
    return load(graphopt.grad(model(text), ["q", "k", "v"], seeded=True))


@functools.cache
def sessions(*arguments, threads=1):
    """Return sessions of a graph as it is, and with kernels of attention."""
    graph = graph_of(*arguments)
    assert plan(graph, PLAIN).counts["attention"] == 2
    lowered = lower_to_kernels(graph, PLAIN, threads)
    device = Device("cpu", threads=threads, native=False)
    return Session(device, graph), Session(device, lowered.model, library=lowered.library)


def numbers(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def feeds_of(batch, heads, rows, keys, depth, width, seed=0):
    shapes = {"q": (rows, depth), "k": (keys, depth), "v": (keys, width), "y.seed": (rows, width)}
    return numbers({name: (batch, heads, *shape) for name, shape in shapes.items()}, seed)


def compare(arguments, feeds, threads=1):
    plain, native = sessions(*arguments, threads=threads)
    expected, found = plain.compute_arrays(feeds), native.compute_arrays(feeds)
    for name in expected:
        assert_near(found[name], expected[name], name, layers=LAYERS)
    return found


def masks_of(kind, batch, heads, rows, keys, seed=0):
    """Return masks of a kind, and what PyTorch adds for them."""
    rng = np.random.default_rng(seed)
    shapes = {
        "added": (batch, 1, rows, keys),
        "a row": (batch, 1, 1, keys),
        "a column": (heads, rows, 1),
        "added first": (rows, keys),
    }
    sees = rng.random((batch, 1, rows, keys)) < 0.6
    sees[..., 0] = True
    if kind == "none":
        return {}, 0
    if kind in shapes:
        mask = rng.standard_normal(shapes[kind]).astype(np.float32)
        return {"mask": mask}, mask / 2 if kind == "added first" else mask
    if kind == "kept":
        return {"mask": sees}, np.where(sees, 0, -np.inf)
    if kind == "dropped":
        return {"mask": ~sees[0, 0]}, np.where(sees[0, 0], 0, -np.inf)
    mask = rng.standard_normal((rows, keys)).astype(np.float32)
    return {"keep": sees[:, :, :1], "mask": mask}, np.where(sees[:, :, :1], mask, -np.inf)


def of_torch(feeds, scale, mask):
    """Return PyTorch's result and gradients."""
    import torch  # not at the top: sanitizers read this file
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (torch.tensor(feeds[name], dtype=torch.float64, requires_grad=True) for name in "qkv")
    mask = torch.tensor(np.asarray(mask, np.float64))
    y = scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(*q.shape[:-1], k.shape[-2]), scale=scale)
    y.backward(torch.tensor(feeds["y.seed"], dtype=torch.float64))
    found = {"y": y, "y.grad.q": q.grad, "y.grad.k": k.grad, "y.grad.v": v.grad}
    return {name: x.detach().numpy() for name, x in found.items()}


@pytest.mark.parametrize("kind", MASKS)
def test_attention_is_that_of_pytorch(kind):
    sizes = [
        (1, 1, 1, 1, 16, 16),
        (2, 3, 7, 9, 64, 16),
        (1, 2, 129, 300, 80, 80),
        (17, 1, 40, 40, 128, 64),
        (1, 1, 300, 129, 16, 128),
        (8, 7, 300, 270, 16, 16),  # whose probabilities are not kept
    ]
    for batch, heads, rows, keys, depth, width in sizes:
        feeds = feeds_of(batch, heads, rows, keys, depth, width)
        masks, added = masks_of(kind, batch, heads, rows, keys)
        found = compare(MASKS[kind][::-1], feeds | masks)
        scale = {"added first": 0.5}.get(kind, 0.25)
        for name, expected in of_torch(feeds, scale, added).items():
            assert_near(found[name], expected.astype(np.float32), name, layers=LAYERS)


HALF = "h = Sqrt(scale) t0 = Transpose<perm=[0,1,3,2]>(k)"
SCALED = {  # what scores are computed from, and by how much they are scaled
    "both": (f"{HALF} a0 = Mul(q, h) b0 = Mul(h, t0) p = MatMul(a0, b0)", 0.25),
    "queries": (f"{HALF} a0 = Div(q, divisor) p = MatMul(a0, t0)", 0.5),
    "keys": (f"{HALF} u = Reciprocal(divisor) b0 = Mul(t0, u) p = MatMul(q, b0)", 0.5),
    "keys before they are transposed": (
        "b1 = Mul(k, scale) t0 = Transpose<perm=[0,1,3,2]>(b1) p = MatMul(q, t0)",
        0.25,
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_attention_scales_in_place_of_its_operands(kind):
    """PyTorch's exporter scales queries and keys by the root of the scale."""
    before, scale = SCALED[kind]
    arguments = "s = Identity(p)", "", "a = Softmax(p) y = MatMul(a, v)", before
    for threads in (1, 2):
        feeds = feeds_of(2, 3, 33, 40, 16, 24)
        found = sessions(*arguments, threads=threads)[1].compute_arrays(feeds)
        for name, expected in of_torch(feeds, scale, 0).items():
            assert_near(found[name], expected.astype(np.float32), name, layers=LAYERS)
    lowered = plan(graph_of(*arguments), PLAIN).model
    assert ("Mul" in {node.op_type for node in lowered.graph}) == (kind == "keys before they are transposed")


def test_a_scaled_operand_that_others_read_stays():
    after = "a = Softmax(p) m = MatMul(a, v) z = ReduceSum<keepdims = 0>(a0) y = Add(m, z)"
    compare(("s = Identity(p)", "", after, SCALED["both"][0]), feeds_of(2, 3, 33, 40, 16, 24))


def test_heads_of_one_projection_are_read_where_they_lie():
    """Of PyTorch's export: no Transpose is left, and no Mul."""
    text = """g (float[B,40,3,16] q, float[B,40,3,16] k, float[B,40,3,16] v) => (float[B,40,3,16] y)
    <float scale = {0.25}> { h = Sqrt(scale) q0 = Transpose<perm=[0,2,1,3]>(q) k0 = Transpose<perm=[0,2,3,1]>(k)
        v0 = Transpose<perm=[0,2,1,3]>(v) a0 = Mul(q0, h) b0 = Mul(k0, h) p = MatMul(a0, b0) a = Softmax(p)
        o = MatMul(a, v0) y = Transpose<perm=[0,2,1,3]>(o) }"""
    graph = load(graphopt.grad(model(text), ["q", "k", "v"], seeded=True))
    assert len(plan(graph, PLAIN).model.graph) == 2
    feeds = numbers({name: (2, 40, 3, 16) for name in ("q", "k", "v", "y.seed")})
    lowered, device = lower_to_kernels(graph, PLAIN, 1), Device("cpu", threads=1, native=False)
    found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)
    turned = {name: x.swapaxes(1, 2) for name, x in feeds.items()}
    for name, expected in of_torch(turned, 0.25, 0).items():
        assert_near(found[name].swapaxes(1, 2), expected.astype(np.float32), name, layers=LAYERS)


CUTS = {
    "Split": "q1, k1, v1 = Split<axis = 2>(p1, widths)",
    "Slice": "q1 = Slice(p1, n0, n48, n2) k1 = Slice(p1, n48, n96, n2) v1 = Slice(p1, n96, n144, n2)",
    "others": "k1, q1, v1 = Split<axis = 2>(p1, widths)",  # which are read where Split leaves them
}
PROJECTED = """g (float[B,T,144] x) => (float[B,T,3,16] y)
<float scale = {0.25}, float two = {2.0}, int64[4] heads = {0, 0, 3, 16}, int64[3] widths = {48, 48, 48},
int64[1] n0 = {0}, int64[1] n48 = {48}, int64[1] n96 = {96}, int64[1] n144 = {144}, int64[1] n2 = {2}> {
    p1 = Mul(x, two) CUT q2 = Reshape(q1, heads) k2 = Reshape(k1, heads) v2 = Reshape(v1, heads)
    q = Transpose<perm=[0,2,1,3]>(q2) k = Transpose<perm=[0,2,3,1]>(k2) v = Transpose<perm=[0,2,1,3]>(v2)
    h = Sqrt(scale) a0 = Mul(q, h) b0 = Mul(k, h) p = MatMul(a0, b0) a = Softmax(p) o = MatMul(a, v)
    y = Transpose<perm=[0,2,1,3]>(o) }"""


@pytest.mark.parametrize("rows", [40, 0])
@pytest.mark.parametrize("cut", CUTS)
def test_thirds_of_one_projection_are_read_and_written_where_they_lie(cut, rows):
    graph = load(graphopt.grad(model(PROJECTED.replace("CUT", CUTS[cut])), ["x"], seeded=True))
    left = {"Split", "Slice", "Concat"} & {node.op_type for node in plan(graph, PLAIN).model.graph}
    assert bool(left) == (cut == "others")
    feeds = numbers({"x": (2, rows, 144), "y.seed": (2, rows, 3, 16)})
    for threads in (1, 2):
        lowered, device = lower_to_kernels(graph, PLAIN, threads), Device("cpu", threads=threads, native=False)
        expected = Session(device, graph).compute_arrays(feeds)
        found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)
        for name in expected:
            assert_near(found[name], expected[name], name, layers=LAYERS)
    q, k, v = (2 * feeds["x"].reshape(2, rows, 3, 3, 16)).transpose(2, 0, 3, 1, 4)
    q, k = (k, q) if cut == "others" else (q, k)
    of_heads = {"q": q, "k": k, "v": v, "y.seed": feeds["y.seed"].swapaxes(1, 2)}
    if rows:
        assert_near(found["y"].swapaxes(1, 2), of_torch(of_heads, 0.25, 0)["y"].astype(np.float32), "y", layers=LAYERS)


OTHERS = {  # what else reads thirds or their gradients
    "a bias of values": PROJECTED.replace(" x)", " x, float[48] bias)", 1).replace(
        "CUT", "q1, k1, v0 = Split<axis = 2>(p1, widths) v1 = Add(v0, bias)"
    ),
    "a second attention": PROJECTED.replace("CUT", CUTS["Split"]).replace(
        "o = MatMul(a, v)",
        "o0 = MatMul(a, v) b1 = Mul(q, two) p2 = MatMul(b1, k) a2 = Softmax(p2) o2 = MatMul(a2, v) o = Mul(o0, o2)",
    ),
}


@pytest.mark.parametrize("others", OTHERS)
def test_thirds_may_have_other_readers(others):
    shapes = {"x": (2, 40, 144), **({"bias": (48,)} if "bias" in others else {})}
    graph = load(graphopt.grad(model(OTHERS[others]), [*shapes], seeded=True))
    assert plan(graph, PLAIN).counts["attention"] == (2 if "bias" in others else 4)
    feeds = numbers(shapes | {"y.seed": (2, 40, 3, 16)})
    lowered, device = lower_to_kernels(graph, PLAIN, 1), Device("cpu", threads=1, native=False)
    expected = Session(device, graph).compute_arrays(feeds)
    found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)
    for name in expected:
        assert_near(found[name], expected[name], name, layers=LAYERS)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("low", [LOWEST, -1e9, -np.inf])
@pytest.mark.parametrize("rows", [129, 300])
def test_what_a_causal_mask_hides_is_left_out(rows, low, threads):
    feeds, sees = feeds_of(1, 7, rows, rows, 16, 16), np.tri(rows, dtype=bool)
    feeds["mask"] = np.where(sees, 0, low).astype(np.float32)[None, None]
    found = compare(MASKS["added"][::-1], feeds, threads)
    for name, expected in of_torch(feeds, 0.25, np.where(sees, 0, -np.inf)).items():
        assert_near(found[name], expected.astype(np.float32), name, layers=LAYERS)


@pytest.mark.parametrize("low", [LOWEST, -1e30])
def test_rows_that_see_nothing_and_large_products_hide_nothing(low):
    feeds = feeds_of(1, 24, 150, 150, 16, 16)
    feeds["mask"] = np.where(np.tri(150, dtype=bool), 0, low).astype(np.float32)[None, None]
    feeds["mask"][..., 10:90, :] = low
    compare(MASKS["added"][::-1], feeds)
    feeds["mask"] = np.where(np.tri(150, dtype=bool), 0, -1e30).astype(np.float32)[None, None]
    feeds["q"][:], feeds["k"][:] = 1e15, 1e16
    feeds["k"][..., 140, :] = 2e16  # whose score is the largest, masked or not
    compare(MASKS["added"][::-1], feeds)
    feeds = feeds_of(1, 24, 150, 150, 16, 16) | {"mask": np.tri(150, dtype=bool)[None, None]}
    feeds["mask"][..., 10:90, :] = False
    compare(MASKS["kept"][::-1], feeds)


def test_rows_of_nan_are_those_of_the_model():
    feeds = feeds_of(1, 33, 129, 129, 16, 16)
    feeds["mask"] = np.where(np.tri(129, dtype=bool), 0, -np.inf).astype(np.float32)[None, None]
    feeds["mask"][..., 30, :] = -np.inf
    safe = compare((*MASKS["added"][::-1], SAFE), feeds)
    assert not any(np.isnan(x).any() for x in safe.values()) and not safe["y"][..., 30, :].any()
    _, native = sessions(*MASKS["added"][::-1])
    assert np.isnan(native.compute_arrays(feeds)["y"][..., 30, :]).all()


def test_heads_that_share_keys():
    """Groups of query heads become rows of one product; the mask is that of heads."""
    text = """g (float[1,6,60,16] q, float[1,2,129,16] k, float[1,2,129,8] v,
    float[1,1,60,129] mask) => (float[1,6,60,8] y)
    <float scale = {0.25}, int64[4] groups = {1, 2, -1, 16}, int64[4] scores = {1, 6, 60, 129},
    int64[4] flat = {1, 2, -1, 129}, int64[4] last = {1, 6, 60, 8}> {
        r = Reshape(q, groups) t = Transpose<perm=[0,1,3,2]>(k) p = MatMul(r, t) w = Mul(p, scale)
        h = Reshape(w, scores) s = Add(h, mask) a = Softmax(s) f = Reshape(a, flat)
        o = MatMul(f, v) y = Reshape(o, last) }"""
    graph = load(graphopt.grad(model(text), ["q", "k", "v"], seeded=True))
    assert plan(graph, PLAIN).counts["attention"] == 2
    shapes = {
        "q": (1, 6, 60, 16),
        "k": (1, 2, 129, 16),
        "v": (1, 2, 129, 8),
        "mask": (1, 1, 60, 129),
        "y.seed": (1, 6, 60, 8),
    }
    feeds = numbers(shapes)
    lowered = lower_to_kernels(graph, PLAIN, 1)
    device = Device("cpu", threads=1, native=False)
    expected = Session(device, graph).compute_arrays(feeds)
    found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)
    for name in expected:
        assert_near(found[name], expected[name], name, layers=LAYERS)


@pytest.mark.parametrize(
    "text",
    [
        "s = Mul(p, p)",  # no number
        "s = Softmax(p)",
        "s = Add(p, p)",
    ],
)
def test_other_scores_stay(text):
    assert plan(graph_of(text), PLAIN).counts["attention"] == 0


@pytest.mark.parametrize(
    "after", ["a = Softmax(s) b = Mul(a, scale) y = MatMul(b, v)", "a = Softmax<axis=2>(s) y = MatMul(a, v)"]
)
def test_other_probabilities_stay(after):
    assert plan(graph_of("s = Mul(p, scale)", "", after), PLAIN).counts["attention"] == 0


def test_keys_may_come_transposed():
    text = """g (float[3,40,16] q, float[3,16,70] k, float[3,70,8] v) => (float[3,40,8] y) {
        s = MatMul(q, k) a = Softmax(s) y = MatMul(a, v) }"""
    graph = load(graphopt.grad(model(text), ["q", "k", "v"], seeded=True))
    lowered = lower_to_kernels(graph, PLAIN, 1)
    device = Device("cpu", threads=1, native=False)
    feeds = numbers({"q": (3, 40, 16), "k": (3, 16, 70), "v": (3, 70, 8), "y.seed": (3, 40, 8)})
    expected = Session(device, graph).compute_arrays(feeds)
    found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)
    for name in expected:
        assert_near(found[name], expected[name], name, layers=LAYERS)


@pytest.mark.parametrize(
    "steps",
    [
        "sh = Shape(p) m = ConstantOfShape<value = bool[1] {1}>(sh) s = Where(m, p, lowest)",
        "m = Cast<to = 9>(p) s = Where(m, p, lowest)",
    ],
)
def test_a_mask_that_scores_make_stays_in_the_graph(steps):
    plan(graph_of(steps), PLAIN)


def test_only_the_thread_that_compares_computes_few_tokens_as_many():
    """Steps of other threads round as ever, though they run the same library."""
    _, native = sessions(MASKS["none"][1])
    library = lower_to_kernels(graph_of(MASKS["none"][1]), PLAIN, 1).library  # the same one, from the cache
    feeds = feeds_of(1, 2, 40, 40, 8, 8)
    run = functools.partial(native.compute_arrays, feeds)
    as_ever = run()
    with ThreadPoolExecutor(1) as other, attending_to_many(library):
        found, compared = other.submit(run).result(), run()
    differs = {name for name in as_ever if compared[name].tobytes() != as_ever[name].tobytes()}
    assert differs and all(found[name].tobytes() == x.tobytes() for name, x in as_ever.items())
    assert all(x.tobytes() == as_ever[name].tobytes() for name, x in run().items())


DECODER = """g (int64[B,L] x) => (float[B,L,11] y) {
    e = Gather(table, x) q = MatMul(e, wq) k = MatMul(e, wk) v = MatMul(e, wv)
    t = Transpose<perm=[0,2,1]>(k) p = MatMul(q, t) a = Softmax(p) c = MatMul(a, v) y = MatMul(c, head) }"""


def decoder():
    """Return a step of a decoder with one layer of attention."""
    proto, rng = model(DECODER), np.random.default_rng(0)
    for name, shape in {
        "table": (11, 16),
        "wq": (16, 16),
        "wk": (16, 16),
        "wv": (16, 16),
        "head": (16, 11),
    }.items():
        array = rng.standard_normal(shape).astype(np.float32) / 4
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return graphopt.compile(proto, loss=passes.CrossEntropy(axis=-1), optimizer=passes.SGD(0.1))


@pytest.mark.parametrize("mistake", [False, True])
def test_few_tokens_are_compared_as_many_are_computed(mistake, monkeypatch, tmp_path):
    """A mistake in probabilities that the backward pass computes again is seen on tokens for which it keeps them."""
    if mistake:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        shutil.copytree(toolchain.FOLDER, tmp_path / "c")
        header = tmp_path / "c" / "attention.h"
        text, right = header.read_text(), "s[j] = exp_float(s[j] - most) * factor;"
        assert right in text
        header.write_text(text.replace(right, right.replace("* factor", "* factor * 1.01f")))
        monkeypatch.setattr(toolchain, "FOLDER", tmp_path / "c")
        monkeypatch.setattr(toolchain, "FLAGS", ("-O1", *toolchain.FLAGS[2:], toolchain.FLAGS[0]))
        toolchain._environment.cache_clear()
    batch = {"x": np.arange(200)[None] * 7 % 11, "target": np.arange(200)[None] * 3 % 11}
    executor = graphopt.Executor(decoder(), frozen="low", native=True, threads=1, verify=True)
    try:
        if not mistake:
            executor.step(batch)
            return
        with pytest.raises(graphopt.GraphoptError, match=r"^kernels: expected the numbers of the plain step"):
            executor.step(batch)
    finally:
        toolchain._environment.cache_clear()
