"""Convolutions of our own: the runtime's results, for any geometry, forward and in gradients."""

from __future__ import annotations

import platform

import numpy as np
import onnx
import pytest
from builders import model
from precisions import FLOAT32, FORMS, PRECISION, assert_near, compute_in, pieces_of
from random_convolutions import convolutions

import graphopt
import passes
from graphopt.graph.loading import load
from graphopt.graph.sizes import sizes_of
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.targets.native import lowering, toolchain
from graphopt.targets.native.lowering import lower_to_kernels, plan
from graphopt.targets.native.precision import obstacle
from graphopt.targets.native.rates import measured_rates

pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")

PLAIN = ["kernels", "products"]  # the lowerings that are not tested here

# Forms of training graphs, from x[N,9,9,8], a gradient g[N,17,4,7] and a kernel k[17,9,3,3] to y. Nodes around the
# convolution arrange the axes. `_` is replaced by a number.
ARRANGED = {
    "gradient of weights": "a_ = Transpose<perm = [1,0,2,3]>(x) b_ = Transpose<perm = [1,0,2,3]>(g) "
    "c_ = Conv<dilations = [2,1], pads = [1,1,0,1]>(a_, b_) y_ = Transpose<perm = [1,0,2,3]>(c_)",
    "without the last transpose": "a_ = Transpose<perm = [1,0,2,3]>(x) b_ = Transpose<perm = [1,0,2,3]>(g) "
    "y_ = Conv<pads = [1,1,1,1]>(a_, b_)",
    "gradient of a pointwise kernel": "a_ = Transpose<perm = [1,0,2,3]>(x) t_ = Tanh(x) "
    "b_ = Transpose<perm = [1,0,2,3]>(t_) c_ = Conv(a_, b_) y_ = Transpose<perm = [1,0,2,3]>(c_)",
}
# Convolutions that are cut into parts: of an image, of a line, of a volume, of the channels of a gradient of weights.
LARGE = {
    "lines": ("Conv<pads = [1,2,0,1]>(x, w)", (2, 24, 70, 90), (40, 24, 3, 3)),
    "a line": ("Conv<pads = [3,1], dilations = [2]>(x, w)", (1, 9, 20011), (17, 9, 4)),
    "planes": ("Conv<pads = [1,1,1,1,1,1], strides = [2,1,2]>(x, w)", (1, 8, 9, 33, 41), (33, 8, 3, 3, 3)),
    "groups": ("Conv<pads = [1,1,1,1], group = 2>(x, w)", (1, 36, 60, 61), (34, 18, 3, 3)),
    "channels": ("Conv<dilations = [2,1], pads = [1,0,0,1]>(x, w)", (19, 7, 61, 60), (40, 7, 30, 59)),
    "small images": ("Conv<pads = [1,1,1,1]>(x, w)", (37, 70, 4, 3), (50, 70, 3, 3)),
    "few places": ("Conv<pads = [1,1,1,1]>(x, w)", (8, 70, 2, 2), (300, 70, 3, 3)),
    "few places, transposed": ("ConvTranspose<pads = [1,1,1,1]>(x, w)", (7, 190, 2, 3), (190, 210, 3, 3)),
    "few terms": ("Conv<pads = [1,1,1,1], strides = [1,2]>(x, w)", (90, 3, 3, 5), (70, 3, 2, 4)),
    "lanes of groups": (
        "Conv<pads = [2,2,1,1], strides = [2,1], group = 37>(x, w)",
        (5, 37, 9, 11),
        (37, 1, 4, 3),
    ),
    "lanes of groups, transposed": (
        "ConvTranspose<pads = [1,1,1,1], strides = [2,2], output_padding = [1,0], group = 21>(x, w)",
        (3, 21, 5, 19),
        (21, 1, 5, 3),
    ),
    "gradient of weights of groups": (
        "Conv<pads = [2,2,2,2], group = 40>(x, w)",
        (1, 320, 6, 5),
        (40, 8, 6, 5),
    ),
    "few places of groups": ("Conv<pads = [1,1,1,1], group = 2>(x, w)", (5, 30, 2, 3), (280, 15, 3, 3)),
}
# Nodes that stay: space would not lie last any more.
KEPT = {
    "channels last": "a_ = Transpose<perm = [0,2,3,1]>(x) d_ = Unsqueeze(a_, first) e_ = Unsqueeze(k, last) "
    "b_ = Transpose<perm = [1,0,2,3]>(g) h_ = Unsqueeze(b_, last) y_ = Conv<pads = [1,1,0,1,1,0]>(d_, h_)",
    "cut at the beginning": "s_ = Slice(x, starts, ends, axes) y_ = Conv(s_, k)",
    "cut images": "s_ = Slice(x, first, last, first) y_ = Conv(s_, k)",
    "space first": "c_ = Conv(x, k) y_ = Transpose<perm = [2,3,0,1]>(c_)",
    "read twice": "c_ = Conv(x, k) t_ = Transpose<perm = [1,0,2,3]>(c_) "
    "u_ = Transpose<perm = [1,0,2,3]>(t_) y_ = Add(u_, c_)",
}
STAYS = {
    "few terms": "y = Conv(x, v)",
    "few filters": "y = ConvTranspose(x, f)",
    "auto_pad": 'y = Conv<auto_pad = "SAME_UPPER">(x, k)',
    "output_shape": "y = ConvTranspose<output_shape = [11, 10]>(z, k)",
    "strides and dilations": "y = ConvTranspose<strides = [2, 1], dilations = [2, 1]>(z, k)",
}


@pytest.fixture(scope="module")
def random_convolutions():
    return convolutions(150)


def session(graph, threads, lowered=None):
    device = Device("cpu", threads=threads, native=False)
    return Session(device, graph) if lowered is None else Session(device, lowered.model, library=lowered.library)


def assert_close(found, expected, layers=1):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert_near(found[name], values, name, layers=layers)


@pytest.mark.slow
def test_random_convolutions_are_the_runtimes(random_convolutions):
    graph, weights, shapes = random_convolutions
    rng = np.random.default_rng(1)
    lowered = {threads: lower_to_kernels(graph, PLAIN, threads) for threads in (1, 2)}
    assert all(node.domain == "ai.graphopt" for node in lowered[1].model.graph)
    sessions = {threads: session(graph, threads, found) for threads, found in lowered.items()}
    plain = session(graph, 1)
    for batch in 0, 1, 3:
        feeds = weights | {
            name: rng.standard_normal([batch, *shape]).astype(np.float32) for name, shape in shapes.items()
        }
        found = {threads: each.compute_arrays(feeds) for threads, each in sessions.items()}
        if batch:
            assert_close(found[1], plain.compute_arrays(feeds), layers=2)  # sums of two terms are far off, too
        for name, values in found[1].items():
            assert np.array_equal(values, found[2][name]), name


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.slow
@pytest.mark.sample(10)
def test_random_convolutions_of_bfloat16_numbers(random_convolutions, precision, form, monkeypatch, tmp_path_factory):
    """Those that run in tiles are of bfloat16 numbers; others are of float32 numbers."""
    if (reason := obstacle(precision)) is not None:
        pytest.skip(reason)
    has_tiles = "__AMX_BF16__" in toolchain.macros()
    has_pairs = "__AVX512BF16__" in toolchain.macros() and not has_tiles
    if form in ("gathered", "shifted") and not has_tiles:
        pytest.skip("expected a processor with AMX, for which choice.h has these algorithms, found one without")
    if form == "paired" and not has_pairs:
        pytest.skip("expected AVX-512 BF16 without AMX, for which choice.h has this algorithm, found another processor")
    compute_in(form, monkeypatch, tmp_path_factory)
    graph, weights, shapes = random_convolutions
    rng = np.random.default_rng(1)
    lowered = {threads: lower_to_kernels(graph, PLAIN, threads, precision=precision) for threads in (1, 2)}
    sessions = {threads: session(graph, threads, found) for threads, found in lowered.items()}
    plain, without_relu, in_tiles = session(graph, 1), session(convolutions(150, relu=False)[0], 1), 0
    rectified = {node.outputs[0].name for node in graph.graph if node.op_type == "Relu"}
    for batch in 0, 1, 6:
        feeds = weights | {
            name: rng.standard_normal([batch, *shape]).astype(np.float32) for name, shape in shapes.items()
        }
        found = {threads: each.compute_arrays(feeds) for threads, each in sessions.items()}
        for name, values in found[1].items():
            assert np.array_equal(values, found[2][name]), name
        if not batch:
            continue
        exact = of_pieces(without_relu, feeds, precision)
        for name, values in plain.compute_arrays(feeds).items():
            of_name = np.maximum(exact[name], 0) if name in rectified else exact[name]
            errors = [np.abs(found[1][name] - x) / values.std() for x in (values, of_name)]
            # A ConvTranspose with strides is a sum of several, of which some may be large enough for tiles.
            assert np.minimum(*errors).max(initial=0) < FLOAT32, name
            in_tiles += errors[1].max(initial=0) < errors[0].max(initial=0)
    # On ARM, choice.h may leave all of these small ones in float32.
    if form or has_tiles or has_pairs:
        assert in_tiles > (5 if form == "low_products" else 20 if form else 0)


def of_pieces(convolutions, feeds, precision):
    """Return the sums of convolutions of the bfloat16 numbers that stand for inputs and weights."""
    pieces = {name: pieces_of(array, precision) for name, array in feeds.items() if name[0] != "b"}
    count = len(pieces["x0"])
    parts = [
        convolutions.compute_arrays(
            {
                name: pieces[name][j if name[0] == "w" else i] if name in pieces else array * (i == j == 0)
                for name, array in feeds.items()
            }
        )
        for i in range(count)
        for j in range(count - i)
    ]
    return {name: sum(part[name] for part in parts) for name in parts[0]}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs an x86 processor")
@pytest.mark.parametrize("fewer", [["-mno-avx512f"], ["-mno-avx512f", "-mno-avx2"]], ids=["avx2", "baseline"])
def test_random_convolutions_on_older_processors(random_convolutions, fewer, monkeypatch):
    graph, weights, shapes = random_convolutions
    rng = np.random.default_rng(1)
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, *fewer))
    monkeypatch.setattr(toolchain, "_environment", toolchain._environment.__wrapped__)
    feeds = weights | {name: rng.standard_normal([2, *shape]).astype(np.float32) for name, shape in shapes.items()}
    found = session(graph, 1, lower_to_kernels(graph, PLAIN, 1)).compute_arrays(feeds)
    assert_close(found, session(graph, 1).compute_arrays(feeds))


@pytest.mark.parametrize("form", [None, *(FORMS if PRECISION != "highest" else ())])
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.slow
def test_parts_of_large_convolutions(name, form, monkeypatch, tmp_path_factory):
    compute_in(form, monkeypatch, tmp_path_factory)
    text, x, w = LARGE[name]
    rng = np.random.default_rng(5)
    sizes = [f"float[{', '.join(map(str, shape))}]" for shape in (x, w)]
    result = f"float[{', '.join('ABCDE'[: len(x)])}] y"
    proto = model(f"g ({sizes[0]} x, {sizes[1]} w) => ({result}) {{ y = {text} }}")
    graph = load(onnx.shape_inference.infer_shapes(proto))
    feeds = {"x": rng.standard_normal(x).astype(np.float32), "w": rng.standard_normal(w).astype(np.float32)}
    found = [
        session(graph, threads, lower_to_kernels(graph, PLAIN, threads)).compute_arrays(feeds) for threads in (1, 2, 3)
    ]
    assert_close(found[0], session(graph, 2).compute_arrays(feeds))
    assert all(np.array_equal(each["y"], found[0]["y"]) for each in found)


def graph_of(forms):
    """Return a graph that contains several forms."""
    texts = [text.replace("_", str(i)) for i, text in enumerate(forms.values())]
    outputs = ", ".join(
        f"float[A{i},B{i},C{i},D{i}{f',E{i}' if 'y_ = Conv<pads = [1,1,0' in text else ''}] y{i}"
        for i, text in enumerate(forms.values())
    )
    proto = model(
        f"g (float[N,9,9,8] x, float[N,17,4,7] g, float[17,9,3,3] k) => ({outputs}) {{ {' '.join(texts)} }}",
    )
    constants = {
        "first": [0],
        "last": [-1],
        "zeros": [0, 0],
        "ends": [8, 7],
        "axes": [2, 3],
        "starts": [1, 0],
    }
    for name, value in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    return load(onnx.shape_inference.infer_shapes(proto))


@pytest.mark.parametrize("forms", [ARRANGED, KEPT], ids=["arranged", "kept"])
def test_transposed_operands_and_results(forms):
    rng = np.random.default_rng(2)
    graph = graph_of(forms)
    lowered = lower_to_kernels(graph, PLAIN, 2)
    assert plan(graph, PLAIN).counts["convolutions"] == len(forms)
    if forms is ARRANGED:
        assert {node.op_type for node in lowered.model.graph if node.domain != "ai.graphopt"} == {"Tanh"}
    for batch in 1, 6:
        shapes = {"x": (batch, 9, 9, 8), "g": (batch, 17, 4, 7), "k": (17, 9, 3, 3)}
        feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        assert_close(session(graph, 2, lowered).compute_arrays(feeds), session(graph, 2).compute_arrays(feeds))


# Matrix products that are summed over a batch: gradients of pointwise kernels, from x[N,9,P] and a gradient g[N,17,P].
SUMMED = {
    "rows": "t_ = Transpose<perm = [0,2,1]>(x) p_ = MatMul(g, t_) y_ = ReduceSum<keepdims = 0>(p_, zero)",
    "columns": "t_ = Transpose<perm = [0,2,1]>(g) p_ = MatMul(x, t_) y_ = ReduceSum<keepdims = 1>(p_, zero)",
    "stored first": "a_ = Transpose<perm = [1,0,2]>(h) t_ = Transpose<perm = [0,2,1]>(x) p_ = MatMul(a_, t_) "
    "y_ = ReduceSum<keepdims = 0>(p_, zero)",
}
ALONE = {
    "terms first": "t_ = Transpose<perm = [0,2,1]>(g) u_ = MatMul(t_, w) v_ = Transpose<perm = [0,2,1]>(u_) "
    "p_ = MatMul(v_, u_) y_ = ReduceSum<keepdims = 0>(p_, zero)",
    "read twice": "t_ = Transpose<perm = [0,2,1]>(x) p_ = MatMul(g, t_) s_ = ReduceSum<keepdims = 0>(p_, zero) "
    "y_ = Add(p_, s_)",
    "another axis": "t_ = Transpose<perm = [0,2,1]>(x) p_ = MatMul(g, t_) y_ = ReduceSum<keepdims = 0>(p_, one)",
}


def summed(forms):
    texts = [text.replace("_", str(i)) for i, text in enumerate(forms.values())]
    shapes = ["A_,B_,C_" if "keepdims = 1" in text or "Add" in text else "A_,B_" for text in forms.values()]
    outputs = ", ".join(f"float[{shape.replace('_', str(i))}] y{i}" for i, shape in enumerate(shapes))
    proto = model(
        f"g (float[N,9,P] x, float[N,17,P] g, float[17,N,P] h, float[17,9] w) => ({outputs}) {{ {' '.join(texts)} }}",
        zero=np.array([0]),
        one=np.array([1]),
    )
    return load(onnx.shape_inference.infer_shapes(proto))


@pytest.mark.parametrize("graph", [graph_of({"": ARRANGED["gradient of a pointwise kernel"]}), summed(SUMMED)])
def test_gradients_of_weights_are_zeros_without_images(graph):
    """They were what the memory held before."""
    lowered = lower_to_kernels(graph, PLAIN, 1)
    shapes = {"x": (0, 9, 9, 8), "g": (0, 17, 4, 7), "k": (17, 9, 3, 3)}
    if "h" in {x.name for x in graph.graph.inputs}:
        shapes = {"x": (0, 9, 30), "g": (0, 17, 30), "h": (17, 0, 30), "w": (17, 9)}
    each = session(graph, 1, lowered)
    binding, results = each.io_binding(), {}
    feeds = {x.name: np.zeros(shapes[x.name], np.float32) for x in graph.graph.inputs}
    for name, array in feeds.items():
        binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
    for name, array in each.compute_arrays(feeds).items():
        results[name] = np.full_like(array, np.nan)
        binding.bind_output(name, "cpu", 0, np.float32, array.shape, results[name].ctypes.data)
    each.prepared(binding)()
    for name, found in results.items():
        assert found.size and not found.any(), name


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "is_low"), [(1.0, False), (1e-15, True)])
def test_rates_of_a_machine_choose_the_algorithm(tile, is_low, monkeypatch, cache, parts):
    if (reason := obstacle("medium")) is not None:
        pytest.skip(reason)
    monkeypatch.setattr(lowering, "measured_rates", lambda *_: (0.25e-9, 1e-11, tile, 5e-9))
    graph = load(model("g (float[8,64,14,14] x, float[64,64,1,1] w) => (float[8,64,14,14] y) { y = Conv(x, w) }"))
    rng = np.random.default_rng(4)
    feeds = {x.name: rng.standard_normal(sizes_of(x)).astype(np.float32) for x in graph.graph.inputs}
    found = [
        session(graph, 1, lower_to_kernels(graph, PLAIN, 1, precision=precision)).compute_arrays(feeds)["y"]
        for precision in ("highest", "medium")
    ]
    assert np.array_equal(*found) != is_low


@pytest.mark.slow
def test_rates_are_measured_once(cache, parts):
    """Those of this machine: bfloat16 numbers multiply faster than float32 where a precision uses them."""
    copy, multiplication, tile, start = found = measured_rates()
    assert measured_rates() == found
    assert all(1e-14 < rate < 1e-7 for rate in (copy, multiplication, tile)) and start > copy
    if obstacle("medium") is None:
        assert tile < 2 * multiplication  # other programs share the cores


def test_products_summed_over_a_batch_are_one_convolution():
    rng = np.random.default_rng(8)
    graph = summed(SUMMED)
    assert plan(graph, ["kernels"]).counts == {"convolutions": len(SUMMED)}
    lowered = {threads: lower_to_kernels(graph, PLAIN, threads) for threads in (1, 2)}
    for batch, terms in (1, 1), (3, 4), (8, 70), (2, 300):
        shapes = {"x": (batch, 9, terms), "g": (batch, 17, terms), "h": (17, batch, terms), "w": (17, 9)}
        feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        found = [session(graph, threads, each).compute_arrays(feeds) for threads, each in lowered.items()]
        assert_close(found[0], session(graph, 1).compute_arrays(feeds))
        assert all(np.array_equal(found[1][name], values) for name, values in found[0].items())
    assert plan(summed(ALONE), ["kernels"]).counts["convolutions"] == 0


@pytest.mark.parametrize("is_state", [False, True])
def test_only_a_constant_kernel_unfolds(is_state):
    """A layer may begin with ones, which training changes."""
    graph = f"""g (float[2,3,4,1] x, {"float[3,1,1,1] w," if is_state else ""} float[2,5,4,1] g) => (float[2,1,5,3] y)
    <int64[4] s = {{2, 1, 3, 4}}, int64[4] t = {{2, 1, 5, 4}}> {{
        c = Conv<group = 3>(x, w) u = Reshape(c, s) v = Transpose<perm = [0,1,3,2]>(u) d = Reshape(g, t)
        y = MatMul(d, v) }}"""
    counts = plan(load(model(graph, w=np.ones((3, 1, 1, 1)))), PLAIN[:1]).counts
    assert counts == ({"products": 1, "convolutions": 1} if is_state else {"convolutions": 1})


@pytest.mark.parametrize("name", STAYS)
def test_what_the_runtime_does_better_stays(name):
    proto = model(
        "g (float[N,9,9,8] x, float[17,9,1,1] v, float[17,9,3,3] k, float[9,3,2,2] f, float[N,17,9,8] z) "
        f"=> (float[A,B,C,D] y) {{ {STAYS[name]} }}"
    )
    assert lower_to_kernels(load(proto)) is None


def test_other_types_stay():
    proto = model("g (double[N,9,9,8] x, double[17,9,3,3] k) => (double[N,17,7,6] y) { y = Conv(x, k) }")
    assert lower_to_kernels(load(proto), PLAIN) is None


@pytest.fixture(scope="module")
def step():
    """Return the step of a network whose gradients have every form, with smooth functions between convolutions.

    The gradients are most of its new weights.
    """
    rng = np.random.default_rng(3)
    shapes = {
        "a": (16, 3, 3, 3),
        "b": (16,),
        "c": (24, 16, 3, 3),
        "d": (40, 24, 1, 1),
        "e": (40, 16, 3, 3),
        "f": (16,),
    }
    weights = {name: rng.standard_normal(shape) / 8 for name, shape in shapes.items()}
    proto = model(
        """g (float[N,3,17,16] x) => (float[N,16,9,8] y) {
            p = Conv<strides = [2,2], pads = [1,1,1,1]>(x, a, b) r = Tanh(p)
            s = Conv<dilations = [2,1], pads = [2,1,2,1]>(r, c) t = Tanh(s)
            u = Conv<strides = [2,2]>(t, d) v = Tanh(u)
            y = ConvTranspose<strides = [2,2], pads = [1,1,1,1], output_padding = [0,1]>(v, e, f)
        }""",
        **weights,
    )
    return graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(1e3))


@pytest.mark.parametrize("without", [PLAIN, []], ids=["alone", "together"])
def test_a_training_step_is_the_plain_one(step, without):
    rng = np.random.default_rng(4)
    lowered = {threads: lower_to_kernels(step, without, threads) for threads in (1, 2)}
    assert plan(step, without).counts["convolutions"] >= 9
    for batch in 1, 5, 32:
        shapes = {"x": (batch, 3, 17, 16), "target": (batch, 16, 9, 8)}
        feeds = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        found = {threads: session(step, threads, each).compute_arrays(feeds) for threads, each in lowered.items()}
        expected = session(step, 1).compute_arrays(feeds)
        assert_close({name: found[1][name] for name in expected}, expected, layers=4)
        for name, values in found[1].items():
            assert np.array_equal(values, found[2][name]), name


def test_weights_of_another_shape_are_an_error():
    proto = model("g (float[N,C,9,8] x, float[17,K,3,3] k) => (float[N,17,7,6] y) { y = Conv(x, k) }")
    lowered = lower_to_kernels(load(proto))
    feeds = {"x": np.ones((1, 4, 9, 8), np.float32), "k": np.ones((17, 5, 3, 3), np.float32)}
    with pytest.raises(graphopt.GraphoptError, match="another shape"):
        session(load(proto), 1, lowered).compute_arrays(feeds)


def test_convolutions_of_short_axes():
    """Kernels larger than the input, and pads as large as kernels."""
    geometries = [(1, 3, 1), (1, 5, 1), (2, 3, 1), (4, 3, 2), (4, 5, 2), (1, 5, 2), (3, 3, 1), (2, 2, 0)]
    lines, outputs, feeds = [], [], {}
    for i, (length, size, pad) in enumerate(geometries):
        for name, shape in ((f"x{i}", (2, 8, length)), (f"w{i}", (8, 8, size))):
            feeds[name] = np.random.default_rng(i).standard_normal(shape).astype(np.float32)
        for kind in ("Conv", "ConvTranspose"):
            if (length + 2 * pad >= size) if kind == "Conv" else (length + size > 2 * pad + 1):
                outputs.append(f"{kind}{i}")
                lines.append(f"{kind}{i} = {kind}<pads = [{pad},{pad}]>(x{i}, w{i})")
    inputs = ", ".join(f"float[{','.join(map(str, value.shape))}] {name}" for name, value in feeds.items())
    results = ", ".join(f"float[A{i},B{i},C{i}] {name}" for i, name in enumerate(outputs))
    graph = load(onnx.shape_inference.infer_shapes(model(f"g ({inputs}) => ({results}) {{ {' '.join(lines)} }}")))
    lowered, device = lower_to_kernels(graph, PLAIN, 1), Device("cpu", native=False)
    assert plan(graph, PLAIN).counts["convolutions"] == len(outputs)
    expected = Session(device, graph).compute_arrays(feeds)
    found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)
    for name in outputs:
        assert_near(found[name], expected[name], name)


def test_products_are_added_without_rounding_them():
    """Of (1 + 2^-12)^2 - (1 + 2^-11), a rounded product would leave 0."""
    if not {"fma", "asimd"} & set(toolchain.processor().split()):
        pytest.skip("needs a processor with fused multiply-add")
    weights = np.zeros((8, 2, 3, 3), np.float32)
    weights[:, 0, 1, 1], weights[:, 1, 1, 1] = 1, 1 + 2**-12
    proto = model("g (float[1,2,9,9] x) => (float[1,8,9,9] y) { y = Conv<pads = [1,1,1,1]>(x, w) }", w=weights)
    x = np.stack([np.full((9, 9), -1 - 2**-11), np.full((9, 9), 1 + 2**-12)])[None].astype(np.float32)
    lowered = lower_to_kernels(load(onnx.shape_inference.infer_shapes(proto)), PLAIN, precision="highest")
    y = Session(Device("cpu"), lowered.model, library=lowered.library).compute_arrays({"x": x})["y"]
    np.testing.assert_array_equal(y, 2.0**-24)
