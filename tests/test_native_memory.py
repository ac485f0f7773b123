"""Kernels touch no memory beside their tensors, in each precision: guard pages around inputs and outputs, sanitizers.

`python tests/test_native_memory.py PRECISION/KIND COUNT ...` compares results under sanitizers, libasan loaded first.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys

import numpy as np
import onnx
import pytest
from builders import model
from onnx import TensorProto
from precisions import FORMS, assert_near, compute_in
from random_convolutions import convolutions, open_convolutions
from sanitizer import APART, run_sanitized, sanitize
from test_native_attention import LAYERS, MASKS, feeds_of, graph_of, masks_of
from test_native_products import graph_from
from test_native_weights import LAYOUTS, products, quantized

from graphopt.graph.loading import load
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.targets.native import toolchain
from graphopt.targets.native.lowering import lower_to_kernels
from graphopt.targets.native.precision import PIECES, obstacle

pytestmark = [
    pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs mprotect and libasan"),
]
PAGE = mmap.PAGESIZE


PRECISIONS = [precision for precision in PIECES if obstacle(precision) is None]


def guarded(shape, at_end):
    """Return an array that ends or begins where memory does: an access beyond it ends the process."""
    size = 4 * int(np.prod(shape))
    pages = max(1, -(-size // PAGE)) * PAGE
    memory = np.frombuffer(mmap.mmap(-1, pages + 2 * PAGE), np.uint8)
    for edge in 0, PAGE + pages:
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + edge), PAGE, 0) == 0
    begin = PAGE + (pages - size if at_end else 0)
    return memory[begin : begin + size].view(np.float32).reshape(shape)


def bound_results(session, feeds, shapes, at_end):
    """Run a session whose inputs and outputs lie in guarded memory."""
    binding, arrays = session.io_binding(), {}
    for name, array in feeds.items():
        arrays[name] = guarded(array.shape, at_end)
        arrays[name][...] = array
        binding.bind_input(name, "cpu", 0, np.float32, array.shape, arrays[name].ctypes.data)
    for name, shape in shapes.items():
        arrays[name] = guarded(shape, at_end)
        arrays[name][...] = np.nan
        binding.bind_output(name, "cpu", 0, np.float32, shape, arrays[name].ctypes.data)
    session.prepared(binding)()
    return {name: arrays[name] for name in shapes}


def opened(graph, threads, precision, options=None):
    """Return sessions of a graph as it is, and of its kernels."""
    device = Device("cpu", threads=threads, native=False, session_options=options)
    lowered = lower_to_kernels(graph, ["kernels"], threads, precision=precision)
    return Session(device, graph), Session(device, lowered.model, library=lowered.library)


def compare_in_guarded_memory(graph, feeds, precision, layers=1):
    for threads in 1, 2:
        plain, native = opened(graph, threads, precision)
        expected = plain.compute_arrays(feeds)
        shapes = {name: array.shape for name, array in expected.items()}
        for at_end in True, False:
            for name, found in bound_results(native, feeds, shapes, at_end).items():
                assert_near(found, expected[name], name, layers=layers, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize(
    ("precision", "form"), [(x, form) for x in PRECISIONS for form in (None, *FORMS) if form is None or PIECES[x]]
)
@pytest.mark.parametrize("count", [50, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_convolutions_in_guarded_memory(precision, count, form, batch, monkeypatch, tmp_path_factory):
    compute_in(form, monkeypatch, tmp_path_factory)
    graph, weights, shapes = convolutions(count)
    rng = np.random.default_rng(batch)
    x = {name: rng.standard_normal([batch, *shape]).astype(np.float32) for name, shape in shapes.items()}
    layers = 2 if precision == "medium" else 1  # of a million numbers, some are far off
    compare_in_guarded_memory(graph, weights | x, precision, layers)


LARGE = [
    ("y = MatMul(a, b)", (150, 300), (300, 77)),
    ("y = Gemm<transA=1, transB=1>(a, b)", (600, 45), (70, 600)),
    ("y = Gemm<transB=1>(a, b, c)", (33, 64), (96, 64), (96,)),
    ("p = MatMul(a, b) y = Transpose<perm=[0,2,1]>(p)", (3, 50, 70), (70, 41)),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LARGE)))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_products_in_guarded_memory(precision, number):
    text, *shapes = LARGE[number]
    rng = np.random.default_rng(number)
    graph = load(graph_from(text, *shapes))
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    compare_in_guarded_memory(graph, dict(zip("abc", arrays, strict=False)), precision)


# --- Under sanitizers, which see what kernels allocate themselves ---


def compare(graph, feeds, precision, layers=1):
    for threads in 1, 2:
        plain, native = opened(graph, threads, precision, APART)
        for each in feeds:
            found = native.compute_arrays(each)
            empty = any(0 in array.shape for array in each.values())
            for name, expected in {} if empty else plain.compute_arrays(each).items():
                assert_near(found[name], expected, name, precision=precision, layers=layers)


def check_convolutions(precision, count):
    graph, weights, shapes = convolutions(count)
    rng = np.random.default_rng(2)
    batches = [
        weights | {x: rng.standard_normal([batch, *sizes]).astype(np.float32) for x, sizes in shapes.items()}
        for batch in (0, 1, 6)
    ]
    compare(graph, batches, precision)


def check_products(precision, count):
    for text, *shapes in LARGE[:count]:
        rng = np.random.default_rng(3)
        arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
        compare(load(graph_from(text, *shapes)), [dict(zip("abc", arrays, strict=False))], precision)


def check_weights(precision, count):
    """Check frozen weights: in 4 and 8 bits, and as floats, which are packed once."""
    kinds = itertools.product(LAYOUTS, (TensorProto.UINT4, TensorProto.INT8), ((300, 77), (32, 600)))
    rng = np.random.default_rng(4)
    for i, (layout, dtype, sizes) in enumerate(itertools.islice(kinds, count)):
        tensors, nodes, matrix = quantized(layout, dtype, *sizes, has_zero=i % 3 != 0, rng=rng)
        if i % 4 == 3:
            nodes, tensors = [], [onnx.numpy_helper.from_array(matrix, "w")]
        shapes = {"a": matrix.shape[:1], "b": matrix.shape[1:]}
        batches = [
            {name: rng.standard_normal((rows, *shape)).astype(np.float32) for name, shape in shapes.items()}
            | {"c": np.zeros(matrix.shape[0], np.float32)}
            for rows in (1, 5, 70, 600)
        ]
        compare(load(products(nodes, tensors, matrix, is_fed=False)), batches, precision)


OPEN = 40  # operators at most of a graph of open sizes: it is compiled once, and computed in many sizes


def check_open_convolutions(precision, count):
    """Check images of random sizes, so many for each convolution, from the smallest that its window fits."""
    for seed in range(0, count, 50):
        graph, weights, least = open_convolutions(min(OPEN, 2 * count), seed)
        rng = np.random.default_rng(seed)
        batches = []
        for batch in rng.integers(1, 4, min(count - seed, 50)):
            shapes = {
                name: [batch, channels, *(n + rng.integers(0, [40, 14, 7][len(space) - 1]) for n in space)]
                for name, (channels, *space) in least.items()
            }
            x = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
            batches.append(weights | x)
        compare(graph, batches, precision)


def check_open_products(precision, count):
    """Check matrices of random sizes, stored as they are and transposed, with rows of a batch or without."""
    forms = [
        ("y = MatMul(a, b)", "MK", "KN"),
        ("y = Gemm<transA=1>(a, b, c)", "KM", "KN", "N"),
        ("y = Gemm<transB=1>(a, b)", "MK", "NK"),
        ("y = Gemm<transA=1, transB=1>(a, b)", "KM", "NK"),
        ("p = MatMul(a, b) y = Transpose<perm=[0,2,1]>(p)", "BMK", "KN"),
        ("y = MatMul(a, b)", "BMK", "BKN"),
    ]
    rng = np.random.default_rng(5)
    for text, *axes in forms:
        graph = load(graph_from(text, *map(list, axes)))
        batches = []
        for _ in range(count):
            most = int(rng.choice([4, 20, 70, 300]))
            sizes = {axis: int(rng.integers(1, most)) for axis in "MKN"} | {"B": int(rng.integers(1, 4))}
            arrays = [rng.standard_normal([sizes[axis] for axis in shape]).astype(np.float32) for shape in axes]
            batches.append(dict(zip("abc", arrays, strict=False)))
        compare(graph, batches, precision)


def check_open_pools(precision, count):
    """Check windows of each size that tile images of random sizes, with elements left over or without, in one graph."""
    windows = [[1], [2], [3], [2, 2], [1, 2], [2, 1], [3, 2], [3, 3], [2, 2, 2], [1, 2, 3]]
    rng = np.random.default_rng(6)
    inputs, least, statements, outputs = [], {}, [], []
    for i, (window, kind) in enumerate(itertools.product(windows, ("MaxPool", "AveragePool"))):
        shape = [f"{axis}{i}" for axis in "NCHWD"[: 2 + len(window)]]
        inputs.append(f"float[{', '.join(shape)}] x{i}")
        outputs.append(f"float[{', '.join(f'Y{axis}' for axis in shape)}] y{i}")
        statements.append(f"y{i} = {kind}<kernel_shape = {window}, strides = {window}>(x{i})")
        least[f"x{i}"] = window
    proto = model(f"g ({', '.join(inputs)}) => ({', '.join(outputs)}) {{ {' '.join(statements)} }}")
    batches = []
    for _ in range(count):
        shapes = {
            name: [*rng.integers(1, 4, 2), *(n + rng.integers(0, 40) for n in size)] for name, size in least.items()
        }
        batches.append({name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})
    compare(load(onnx.shape_inference.infer_shapes(proto)), batches, precision)


def check_attention(precision, count):
    """Check attention and its gradient in random sizes, with masks and without."""
    rng = np.random.default_rng(7)
    for kind in MASKS:
        batches = []
        for seed in range(count):
            batch, heads = rng.integers(1, 4, 2)
            rows, keys, depth, width = rng.integers(1, [*rng.choice([4, 70, 300], 2), 90, 90])
            if seed == 0 and kind in ("added", "kept"):  # so many probabilities are not kept
                batch, heads, rows, keys = 2, 3, 300, 300
            masks, _ = masks_of(kind, batch, heads, rows, keys, seed)
            batches.append(feeds_of(batch, heads, rows, keys, depth, width, seed) | masks)
        compare(graph_of(*MASKS[kind][::-1]), batches, precision, LAYERS)


CHECKS = {
    "attention": check_attention,
    "convolutions": check_convolutions,
    "products": check_products,
    "weights": check_weights,
    "open convolutions": check_open_convolutions,
    "open products": check_open_products,
    "open pools": check_open_pools,
}


def under_sanitizers(cache, counts):
    """Run checks of each precision in one process, since a process and the parts of a library take seconds."""
    words = [word for name, own in counts.items() for kind, n in own.items() for word in (f"{name}/{kind}", str(n))]
    assert "right" in run_sanitized(__file__, *words, cache=cache)


@pytest.mark.slow
def test_a_sample_under_sanitizers(tmp_path):
    few = {"convolutions": 15, "products": 2, "weights": 4}
    more = {"open convolutions": 6, "open products": 4, "open pools": 2, "attention": 2}
    under_sanitizers(tmp_path, {x: few | more if x == "highest" else few for x in PRECISIONS})


@pytest.mark.exhaustive
def test_kernels_under_sanitizers(tmp_path):
    many = {"convolutions": 150, "products": len(LARGE), "weights": 28, "open convolutions": 200}
    under_sanitizers(
        tmp_path, dict.fromkeys(PRECISIONS, many | {"open products": 60, "open pools": 20, "attention": 30})
    )


if __name__ == "__main__":
    sanitize()
    for name, count in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        precision, kind = name.split("/")
        CHECKS[kind](precision, int(count))
    print("right")
