"""Native kernels compute what ONNX Runtime's operators compute: each value of random clusters, node by node.

Each node of a cluster is compared with ONNX Runtime's operator on the very numbers that the kernel gave its inputs:
bit for bit, except

- `EITHER_ZERO`: of operands -0 and 0, the runtime takes one or the other by an element's place in memory; its Where
  makes -0 of a choice 0, and version 1.19's Ceil, Floor and Sqrt make -0 0.
- Where NaN is among the numbers, the runtime's ReduceMax and ReduceMin depend on their order; those of kernels are NaN.
- A number that an integer type lacks becomes any by Cast: compilers convert constants otherwise than processors do,
  and keep it if it becomes a floating number again.
- Where denormal numbers are flushed, the runtime may keep one that it only moves, and a kernel another; the
  remainder by one is NaN.
- `FUNCTIONS`: within 2 units in the last place of the exact value, or no worse than the runtime. `WORST` has the worst
  errors among four million numbers, every 1009th of float32. Mish has 4 where e^x is not
  denormal; Sigmoid and Softmax, as well, may return 0 for denormal numbers.
- sums, and what is computed from sums: within bounds that grow as the number of terms.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from precisions import UNIT
from random_clusters import SPECIAL, Graph, Part, grown

import graphopt
import passes
from graphopt.runtime.denormals import Flushing, supported
from graphopt.targets.native import library
from graphopt.targets.native.lowering import lower_to_kernels, plan
from graphopt.targets.native.operators import (
    FOLDED,
    OF_ANY,
    OF_FLOATING,
    REDUCING,
    ROW_OPERATORS,
)
from graphopt.targets.native.toolchain import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")
OPSET = 21 if onnxruntime.__version__.startswith("1.19.") else 24
PARTS = 60  # of a graph: its kernels are one library
GRAPHS = 17  # of the sweep: more than 1,000 clusters
Arrays = dict[str, np.ndarray]

EITHER_ZERO = {
    "Ceil",
    "Floor",
    "Where",
    "Relu",
    "Max",
    "Min",
    "Clip",
    "HardSigmoid",
    "ReduceMax",
    "ReduceMin",
}

# Exact values, and the worst error of kernels in float32, in units in the last place.
FUNCTIONS: Mapping[str, Any] = {
    "Acos": np.arccos,
    "Acosh": np.arccosh,
    "Asin": np.arcsin,
    "Asinh": np.arcsinh,
    "Atan": np.arctan,
    "Atanh": np.arctanh,
    "Cos": np.cos,
    "Cosh": np.cosh,
    "Erf": lambda x: torch.erf(torch.from_numpy(np.asarray(x))).numpy(),
    "Exp": np.exp,
    "Log": np.log,
    "Pow": np.power,
    "Celu": lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0) / np.float32(alpha))),
    "Elu": lambda x, alpha: np.where(x > 0, x, np.float32(alpha) * np.expm1(np.minimum(x, 0))),
    "Mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "Selu": lambda x, alpha, gamma: (
        np.float32(gamma) * np.where(x > 0, x, np.float32(alpha) * np.expm1(np.minimum(x, 0)))
    ),
    "Sin": np.sin,
    "Sinh": np.sinh,
    "Softplus": lambda x: np.logaddexp(x, 0),
    "Sigmoid": lambda x: np.where(x >= 0, 1, np.exp(np.minimum(x, 0))) / (1 + np.exp(-np.abs(x))),
    "Swish": lambda x, alpha=1.0: x / (1 + np.exp(-np.float32(alpha).astype(np.float64) * x)),
    "Tan": np.tan,
    "Tanh": np.tanh,
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Sqrt": np.sqrt,
}
WORST = {
    **{
        "Erf": 1.02,
        "Exp": 0.96,
        "Log": 0.78,
        "Mish": 51.84,
        "Sigmoid": 2.23,
        "Softplus": 1.86,
        "Softsign": 1.49,
    },
    **{"Sqrt": 0.5, "Tanh": 1.46},
    # computed in double, and rounded once
    **dict.fromkeys(("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh", "Tan"), 0.5),
}
ALLOWED = {"Mish": 4, "Selu": 3, "Sigmoid": WORST["Sigmoid"], "Sqrt": 0.5, "Swish": 3}  # of others, 2 units


def session(model: onnx.ModelProto, library: Any = None, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library is not None:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def lowered(model: onnx.ModelProto, threads: int = 1) -> tuple[onnxruntime.InferenceSession, ir.Model]:
    """Return a session with kernels, and its model."""
    found = lower_to_kernels(ir.from_proto(model), without=["products"])
    assert found is not None
    return session(ir.to_proto(found.model), found.library, threads), found.model


def run(of: onnxruntime.InferenceSession, feeds: Arrays) -> Arrays:
    names = [y.name for y in of.get_outputs()]
    return dict(zip(names, of.run(names, feeds), strict=True))


def unit(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return the unit in the last place of numbers, as a type has it."""
    return np.spacing(np.abs(x).astype(dtype)).astype(np.float64)


def flushed(x: np.ndarray) -> np.ndarray:
    """Return an array with 0 for denormal numbers."""
    if x.dtype.kind != "f":
        return x
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(np.zeros_like(x), x), x)


def differs(x: np.ndarray, y: np.ndarray, either_zero: bool = False) -> np.ndarray:
    """Return where two arrays differ in a bit, apart from the bits of NaN."""
    if x.dtype.kind != "f":
        return x != y
    signs = (np.signbit(x) != np.signbit(y)) & (not either_zero)
    return ((x != y) | signs) & ~(np.isnan(x) & np.isnan(y))


def wrong(node: onnx.NodeProto, found: np.ndarray, plain: np.ndarray, inputs: list[Any], index: int) -> Any:
    """Return where an output of a node is wrong, given the runtime's output of the same inputs."""
    unlike = differs(found, plain, node.op_type in EITHER_ZERO)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    if not unlike.any():
        return unlike
    if node.op_type in FUNCTIONS:
        exact = FUNCTIONS[node.op_type](*(x.astype(np.float64) for x in inputs), **attributes)
        allowed = ALLOWED.get(node.op_type, 2) * unit(exact, found.dtype)
        near = np.abs(found - exact) <= np.maximum(np.abs(plain - exact), allowed)
        near |= (found == exact) | (np.isnan(found) & np.isnan(exact))
        return unlike & ~near
    if node.op_type == "Mod":
        return unlike & ~((inputs[1] == 0) & np.isnan(found))
    if node.op_type == "Cast" and {found.dtype.kind, inputs[0].dtype.kind} == {"i", "f"}:
        limits = np.iinfo(found.dtype if found.dtype.kind == "i" else inputs[0].dtype)
        return unlike & (inputs[0] > float(limits.min)) & (inputs[0] < float(limits.max))
    if node.op_type == "Gelu":  # what a sum of 1 and erf(x), or tanh(x), loses is as large as x's last places
        return unlike & ~(np.abs(found - plain) <= 4 * unit(inputs[0], found.dtype))
    if node.op_type.startswith("Reduce"):
        return unlike & ~sum_is_near(node.op_type, found, plain, inputs, attributes.get("keepdims", 1))
    if node.op_type in ROW_OPERATORS:
        return unlike & ~rows_are_near(node.op_type, found, plain, inputs, attributes, index)
    return unlike


def sum_is_near(op_type: str, found: np.ndarray, plain: np.ndarray, inputs: list[Any], keepdims: int) -> np.ndarray:
    x = inputs[0].astype(np.float64)
    axes = tuple(int(p) % x.ndim for p in inputs[1])
    keep = {"axis": axes, "keepdims": bool(keepdims)}
    if op_type in ("ReduceMax", "ReduceMin"):  # with NaN, the runtime's result depends on the order
        return np.isnan(x).any(**keep) & np.isnan(found)
    terms = {"ReduceSumSquare": x * x, "ReduceL2": x * x, "ReduceL1": np.abs(x)}.get(op_type, x)
    count = math.prod(x.shape[p] for p in axes)
    size, exact = np.abs(terms).sum(**keep), terms.sum(**keep)
    finite = np.where(np.isfinite(terms), np.abs(terms), 0).sum(**keep)
    overflows = finite > np.finfo(found.dtype).max / 2
    bound = (count + 2) * np.finfo(found.dtype).eps * size + (count + 2) * np.finfo(found.dtype).smallest_subnormal
    if op_type == "ReduceProd":
        exact = x.prod(**keep)
        bound = (count + 2) * unit(exact, found.dtype)
        lost = np.finfo(found.dtype)  # a product on the way may be out of range
        overflows = np.abs(np.log2(np.abs(x))).sum(**keep) > -lost.minexp
    elif op_type == "ReduceLogSum":
        overflows |= bound > np.abs(exact) / 2  # what cancels out
        exact, bound = np.log(exact), bound / np.abs(exact) + 3 * unit(np.log(exact), found.dtype)
    elif op_type == "ReduceMean":
        exact, bound = exact / count, bound / count + np.finfo(found.dtype).smallest_subnormal
    elif op_type == "ReduceL2":
        exact, bound = (
            np.sqrt(exact),
            np.sqrt(exact + bound) - np.sqrt(np.maximum(exact - bound, 0)) + unit(exact, found.dtype),
        )
    return (np.abs(found - exact) <= bound) | overflows


def rows_are_near(
    op_type: str, found: np.ndarray, plain: np.ndarray, inputs: list[Any], attributes: Any, index: int
) -> np.ndarray:
    x = inputs[0].astype(np.float64)
    eps = float(np.finfo(np.float32).eps)
    if op_type in ("Softmax", "LogSoftmax"):
        shifted = x - x.max(axis=-1, keepdims=True)
        total = np.exp(shifted).sum(axis=-1, keepdims=True)
        size = 8 + x.shape[-1] + np.abs(shifted)
        if op_type == "Softmax":
            exact = np.exp(shifted) / total
            return np.abs(found - exact) <= eps * size * exact + np.finfo(np.float32).tiny  # for 0
        return np.abs(found - shifted + np.log(total)) <= eps * (size + np.abs(np.log(total)))
    size = (x * x).mean(axis=-1, keepdims=True)
    beyond = ~(size * x.shape[-1] < np.finfo(np.float32).max)  # what overflows, and whether, is not the same
    mean = x.mean(axis=-1, keepdims=True) if op_type == "LayerNormalization" else 0 * size
    centered = x - mean
    inverse = 1 / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + attributes["epsilon"])
    condition = (4 + x.shape[-1]) * eps * (1 + size * inverse**2)
    if index:
        exact = (mean, inverse)[index - 1]
        bound = condition * (np.sqrt(size), inverse)[index - 1]
    else:
        scale = inputs[1].astype(np.float64)
        exact = centered * inverse * scale
        bound = condition * np.abs(scale) * (1 + np.abs(centered * inverse))
        if len(inputs) > 2:
            exact, bound = exact + inputs[2], bound + eps * np.abs(inputs[2])
    near = np.abs(found - exact) <= np.maximum(bound, 2 * np.abs(plain - exact))
    return near | beyond | (np.abs(exact) > np.finfo(np.float32).max / 2)


def check(graph: Graph, flush: bool = False) -> int:
    """Check each node of a graph in each run; return how many of the nodes are in kernels."""
    everything = graph.model(everything=True)
    native, model = lowered(everything)
    ends, other = lowered(graph.model(everything=False))
    left = {y.name for form in (model, other) for node in form.graph if node.op_type in FUNCTIONS for y in node.outputs}
    apart = session(graph.apart())
    failures: list[str] = []
    mode: Any = Flushing() if flush else contextlib.nullcontext()
    for number in range(3):
        feeds = graph.feeds(number)
        with mode:
            found = run(native, feeds)
            few = run(ends, feeds)
        known = feeds | found | graph.constants()
        reads = {
            f"{node.output[0]}.{i}": known[x]
            for part in graph.parts
            for node in part.nodes
            for i, x in enumerate(node.input)
            if x and x not in part.constants
        }
        with mode:
            plain = run(apart, reads)
        with np.errstate(all="ignore"):
            for part in graph.parts:
                for node in part.nodes:
                    inputs = [known[x] if x else None for x in node.input]
                    for i, name in enumerate(node.output):
                        assert found[name].shape == plain[name].shape
                        assert found[name].dtype == plain[name].dtype
                        pair = (found[name], plain[name])
                        if flush:
                            pair, inputs = (
                                tuple(map(flushed, pair)),
                                [x if x is None else flushed(x) for x in inputs],
                            )
                        bad = wrong(node, *pair, inputs, i)
                        if np.any(bad):
                            failures.append(explained(node, name, bad, found, plain, inputs))
            for name, y in few.items():
                part = graph.parts[int(name[1 : name.index("_")])]
                if not is_same(part, y, found[name], left):
                    failures.append(f"{name} is another where the values between are no outputs")
    assert not failures, "\n".join(failures)
    nodes = sum(len(part.nodes) for part in graph.parts)
    return nodes - sum(node.domain == "" for node in model.graph)


def is_same(part: Part, y: np.ndarray, other: np.ndarray, left: Set[str | None]) -> bool:
    """Return whether kernels with and without values between as outputs give the same.

    Compilers may add numbers up in another order. Then nearly all numbers are as near as that makes them: a step
    function or a small difference of sums may show it. So may a function that only one of them leaves to the runtime.
    """
    unlike = differs(y, other)
    if any(
        node.op_type in ROW_OPERATORS or node.op_type.startswith("Reduce") or node.output[0] in left
        for node in part.nodes
    ):
        unlike &= ~np.isclose(y, other, rtol=1e-3, atol=1e-6, equal_nan=True)
        return bool(np.sum(unlike) <= max(1, 0.1 * unlike.size))
    return not np.any(unlike)


def explained(node: onnx.NodeProto, name: str, bad: np.ndarray, found: Arrays, plain: Arrays, inputs: list[Any]) -> str:
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    read = [x if x is None or x.size < 40 else x.shape for x in inputs]
    same = [x[where] for x in inputs if x is not None and x.shape == bad.shape]
    return (
        f"{node.op_type} {name} at {where} of {bad.shape}: kernel {found[name][where]!r}, runtime "
        f"{plain[name][where]!r}, of {same or read}"
    )


@pytest.mark.slow
def test_random_clusters() -> None:
    graph = grown(0, PARTS, OPSET)
    assert check(graph) > 0.7 * sum(len(part.nodes) for part in graph.parts)


@pytest.mark.slow
def test_random_clusters_in_blocks(monkeypatch, tmp_path) -> None:
    """Loops over large arrays fetch one block while they compute another: here, of three numbers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "_LIMITS", f"{library._LIMITS}#define FETCHED 3\n#define LEAST_FETCHED 1\n")
    check(grown(GRAPHS, PARTS // 2, OPSET))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, GRAPHS))
def test_more_random_clusters(seed: int) -> None:
    check(grown(seed, PARTS, OPSET))


def test_random_clusters_have_every_operator_of_the_table() -> None:
    tables = (
        OF_ANY,
        OF_FLOATING,
        FOLDED,
        REDUCING,
        ROW_OPERATORS,
        {"Cast", "Clip", "Gelu", "IsInf", "Mod", "Pow"},
    )
    graphs = [grown(seed, PARTS, 24) for seed in range(GRAPHS)]
    drawn = {node.op_type for graph in graphs for part in graph.parts for node in part.nodes}
    assert drawn >= set().union(*tables)
    assert sum(len(graph.parts) for graph in graphs) > 1000


@pytest.mark.skipif(not supported(), reason="Linux on x86-64 alone")
@pytest.mark.slow
def test_denormals_are_flushed_where_the_runtime_flushes_them() -> None:
    check(grown(0, PARTS, OPSET), flush=True)


@pytest.mark.slow
def test_worst_errors_of_functions() -> None:
    """The runtime's: Erf 0.90, Exp 0.86, Log 2.71, Softsign 2.00; Tanh and Sigmoid lose digits of small results."""
    x = np.arange(0, 2**32, 1009, dtype=np.uint64).astype(np.uint32).view(np.float32)
    native, _ = lowered(
        text(
            f"(float[N] x) => ({', '.join(f'float[N] {name}' for name in WORST)})",
            *(f"{name} = {name}(x)" for name in WORST),
        )
    )
    found = run(native, {"x": x})
    worst = {}
    with np.errstate(all="ignore"):
        for name in WORST:
            exact = FUNCTIONS[name](x.astype(np.float64))
            rounded = exact.astype(np.float32)
            np.testing.assert_array_equal(np.isnan(found[name]), np.isnan(exact))
            np.testing.assert_array_equal(np.isinf(found[name]), np.isinf(rounded))
            off = np.abs(found[name] - exact) / unit(exact, np.float32)
            usual = np.isfinite(rounded) & ((np.abs(rounded) >= np.finfo(np.float32).tiny) | (name != "Sigmoid"))
            assert np.all(usual | ~(off > 2**23))  # no further from it than 0 is
            worst[name] = float(off[usual].max())
    assert worst == {name: pytest.approx(most, abs=0.01) for name, most in WORST.items()}


def test_extremes_of_one_sign_and_halves() -> None:
    """No maximum starts from 0, and halves are rounded to even."""
    proto = text(
        "(float[N,6] x) => (float[N,1] high, float[N,1] low, float[N,6] whole)",
        "n = Neg(x)",
        "high = ReduceMax(n, last)",
        "low = ReduceMin(x, last)",
        "h = Mul(n, half)",
        "whole = Round(h)",
    )
    constants = {"last": np.array([1]), "half": np.array(0.5, np.float32)}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(x, name) for name, x in constants.items())
    native, found = lowered(onnx.shape_inference.infer_shapes(proto))
    assert {node.domain for node in found.graph} == {"ai.graphopt"}
    x = np.arange(1, 25, dtype=np.float32).reshape(4, 6)
    y = run(native, {"x": x})
    np.testing.assert_array_equal(y["high"], -x.min(1, keepdims=True))
    np.testing.assert_array_equal(y["low"], x.min(1, keepdims=True))
    np.testing.assert_array_equal(y["whole"], np.rint(-x / 2))


@pytest.mark.slow
def test_powers_and_remainders() -> None:
    """Powers are rounded once, and remainders are exact, whatever the quotient."""
    r = np.random.default_rng(0)
    special = [*SPECIAL, 3.0, -3.0, 7.5, 16777215.0, 1e10]
    grid = np.meshgrid(special, special)
    base = np.exp(r.uniform(-100, 89, 10**6)) * r.choice([-1, 1], 10**6)
    exponent = r.standard_normal(10**6) * 10.0 ** r.integers(-3, 6, 10**6)
    exponent = np.where(r.random(10**6) < 0.3, np.rint(exponent), exponent)
    near = 1 + 1e-4 * r.standard_normal(10**6)
    bits = r.integers(0, 2**32, (2, 10**6), np.uint32).view(np.float32)
    with np.errstate(over="ignore"):
        x, y = (
            np.concatenate([*parts], dtype=np.float32)
            for parts in (
                (grid[0].ravel(), base, near, bits[0]),
                (grid[1].ravel(), exponent, 1e3 * exponent, bits[1]),
            )
        )
    native, found = lowered(
        text("(float[N] x, float[N] y) => (float[N] p, float[N] m)", "p = Pow(x, y)", "m = Mod<fmod = 1>(x, y)")
    )
    assert len(kernels_of(found)) == 1
    powers = run(native, {"x": x, "y": y})
    with np.errstate(all="ignore"):
        assert not np.any(differs(powers["m"], np.fmod(x, y)))
        exact = np.power(x.astype(np.float64), y.astype(np.float64))
        rounded = exact.astype(np.float32)
        off = np.abs(powers["p"] - exact) / unit(exact, np.float32)
        assert off[np.isfinite(rounded)].max() == pytest.approx(0.502, abs=0.002)
        assert not np.any(differs(powers["p"], rounded)[~np.isfinite(rounded) | (rounded == 0)])


def text(signature: str, *nodes: str) -> onnx.ModelProto:
    """Return a model in ONNX's text form."""
    return onnx.shape_inference.infer_shapes(
        onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 20]>\ng {signature} {{ {chr(10).join(nodes)} }}')
    )


def kernels_of(model: ir.Model) -> list[ir.Node]:
    return [node for graph in model.graphs() for node in graph if node.domain != ""]


def test_threads_do_not_change_a_bit() -> None:
    model = text(
        "(float[N,768] x, float[768] w) => (float[N,768] y, float[768] s, float[N] m, float t)",
        "z = Mul(x, w)",
        "y = Softmax(z)",
        "s = ReduceSum<keepdims=0>(z, first)",
        "m = ReduceMean<keepdims=0>(y, last)",
        "q = Mul(z, z)",
        "t = ReduceSum<keepdims=0>(q)",
    )
    for name, axis in (("first", 0), ("last", 1)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([axis]), name))
    model = onnx.shape_inference.infer_shapes(model)
    one, two = (lowered(model, threads)[0] for threads in (1, 2))
    for rows in (1, 2, 700):
        r = np.random.default_rng(rows)
        feeds = {"x": r.standard_normal((rows, 768), np.float32), "w": r.standard_normal(768, np.float32)}
        for name, y in run(one, feeds).items():
            for _ in range(3):
                np.testing.assert_array_equal(run(two, feeds)[name], y)


def test_extremes_of_all_numbers_keep_nan() -> None:
    proto = text(
        "(float[N] x) => (float high, float low)",
        "n = Relu(x)",
        "high = ReduceMax<keepdims=0>(n)",
        "low = ReduceMin<keepdims=0>(n)",
    )
    of_extremes = lowered(proto)[0]
    x = np.random.default_rng(0).standard_normal(2**20).astype(np.float32)
    assert run(of_extremes, {"x": x}) == {"high": x.max(), "low": 0}
    for place in (0, 5, 2**20 - 1):
        spoiled = x.copy()
        spoiled[place] = np.nan
        assert all(np.isnan(y) for y in run(of_extremes, {"x": spoiled}).values())


def test_another_shape_than_the_graph_says_is_an_error() -> None:
    native, _ = lowered(text("(float[N] x, float[N] z) => (float[N] y)", "a = Mul(x, z)", "y = Neg(a)"))
    with pytest.raises(Exception, match="an input has another shape than the graph says"):
        run(native, {"x": np.ones(3, np.float32), "z": np.ones(4, np.float32)})
    assert run(native, {"x": np.ones(0, np.float32), "z": np.ones(0, np.float32)})["y"].shape == (0,)


def test_names_that_may_be_one_size_or_two_make_no_kernel() -> None:
    """M may be 1: then x broadcasts, which the kernel would not do."""
    model = text("(float[N] x, float[M] z) => (float[K] y)", "a = Mul(x, z)", "y = Neg(a)")
    assert lower_to_kernels(ir.from_proto(model)) is None


def test_a_path_through_another_node_keeps_clusters_apart() -> None:
    model = text(
        "(float[4,4] x, float[4,4] z) => (float[4,4] y)",
        "a = Mul(x, z)",
        "b = Exp(a)",
        "c = MatMul(b, x)",
        "d = Sub(c, a)",
        "e = Tanh(d)",
        "y = Add(e, b)",
    )
    native, found = lowered(model)
    assert len(kernels_of(found)) == 2
    r = np.random.default_rng(0)
    feeds = {name: r.standard_normal((4, 4), np.float32) for name in "xz"}
    np.testing.assert_allclose(run(native, feeds)["y"], run(session(model), feeds)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_mask_of_dropout_is_one_kernel() -> None:
    """Its whole numbers wrap, and all have the length of a range."""
    model = text(
        "(float[N,64] x) => (float[N,10] y)",
        "a = MatMul(x, w)",
        "r = Relu(a)",
        "d = Dropout(r, ratio)",
        "y = MatMul(d, v)",
    )
    r = np.random.default_rng(0)
    weights = {"w": r.standard_normal((64, 256)), "v": r.standard_normal((256, 10)), "ratio": np.array(0.4)}
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    steps = {"training": passes.TrainingMode(), "loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    step = graphopt.compile(model, **steps)
    whole = [y for node in step.graph for y in node.outputs if y.dtype == ir.DataType.INT32]
    left = [y for node in plan(step).model.graph for y in node.outputs if y.dtype == ir.DataType.INT32]
    assert len(whole) > 12
    assert len(left) == 6  # the number of elements, the range, two keys, the mask, and the mask in another shape
    plain, native = (graphopt.Executor(step, native=native) for native in (False, True))
    for rows in (3, 128):
        batch = {"x": r.standard_normal((rows, 64), np.float32), "target": r.integers(0, 10, rows)}
        for _ in range(3):
            np.testing.assert_allclose(native.step(batch)["loss"], plain.step(batch)["loss"], rtol=max(1e-5, UNIT))


def test_the_body_of_a_scan_has_kernels_of_its_own() -> None:
    """Its kernel reads the state, a slice, and a value of the graph outside."""
    model = text(
        "(float[T,5] x, float[5] w) => (float[5] last, float[T,5] y)",
        "v = Sigmoid(w)",
        "u = Neg(v)",
        """last, y = Scan<num_scan_inputs = 1, body = b (float[5] s, float[5] row) => (float[5] next, float[5] out) {
            p = Mul(s, u)
            next = Add(p, row)
            out = Tanh(next)
        }>(w, x)""",
    )
    native, found = lowered(model)
    assert len(kernels_of(found)) == 2
    r = np.random.default_rng(0)
    feeds = {"x": r.standard_normal((7, 5), np.float32), "w": r.standard_normal(5, np.float32)}
    for name, y in run(session(model), feeds).items():
        np.testing.assert_allclose(run(native, feeds)[name], y, rtol=1e-5)


@pytest.mark.parametrize("op_type", ["Tanh", "Softmax", "ReduceSum", "Exp", "Sin"])
def test_each_result_of_16_bits_is_rounded(op_type: str) -> None:
    """So the graph says. The runtime rounds what leaves a chain of operators."""
    of = "p, axes" if op_type == "ReduceSum" else "p"
    model = text(
        "(float16[N,33] x, float16[33] w) => (float16[N,33] y, float16[N,33] z)",
        *("p = Mul(x, w)", f"q = {op_type}({of})", "y = Sub(p, q)", "z = Add(y, w)"),
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "axes"))
    model = onnx.shape_inference.infer_shapes(model)
    native, found = lowered(model)
    assert len(kernels_of(found)) == 1
    r = np.random.default_rng(0)
    feeds = {
        "x": r.standard_normal((5, 33)).astype(np.float16),
        "w": r.standard_normal(33).astype(np.float16),
    }
    p = rounded(feeds["x"].astype(np.float64) * feeds["w"])
    power = np.exp(p)
    q = {
        "Tanh": np.tanh(p),
        "Softmax": power / power.sum(axis=-1, keepdims=True),
        "ReduceSum": p.sum(axis=-1, keepdims=True),
        "Exp": power,
        "Sin": np.sin(p),
    }[op_type]
    y = rounded(p - rounded(q))
    found_y, found_z = run(native, feeds).values()
    assert found_y.dtype == found_z.dtype == np.float16
    assert np.mean(found_y != y) < 0.02  # where float32 rounds to the other side of a tie
    np.testing.assert_allclose(found_y, y, rtol=2e-3, atol=1e-3)
    np.testing.assert_array_equal(found_z, rounded(found_y.astype(np.float64) + feeds["w"]))


def rounded(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float64)


def test_a_number_beyond_16_bits_is_infinite_within_a_kernel() -> None:
    """As it is if something else reads it, too: which nodes a kernel takes in changes no number."""
    nodes = ("m = Mul(x, s)", "d = Div(m, s)", "y = Tanh(d)", "c = Cast<to = 1>(m)", "w = Exp(c)")
    feeds = {"x": np.array([1, 300], np.float16), "s": np.array(1000, np.float16)}
    for outputs in ("float16[N] y, float[N] w", "float16[N] y, float[N] w, float16[N] m"):
        native, found = lowered(text(f"(float16[N] x, float16 s) => ({outputs})", *nodes))
        assert len(kernels_of(found)) == 1
        results = run(native, feeds)
        np.testing.assert_array_equal(results["y"], np.tanh(np.array([1, np.inf])).astype(np.float16))
        assert np.isinf(results["w"]).all()


def test_generated_code_has_no_string_of_the_model() -> None:
    names = (
        "(float[evil_size] evil_in) => (float[evil_size] evil_out)",
        "evil = Exp(evil_in)",
        "evil_out = Neg(evil)",
    )
    found = plan(ir.from_proto(text(*names)))
    assert found.kernels
    assert all("evil" not in kernel.code for kernel in found.kernels)


def test_a_whole_number_becomes_floating_without_a_choice() -> None:
    """GCC makes two branches of a choice and the functions behind it, and does not vectorize them."""
    (kernel,) = plan(ir.from_proto(text("(int32[N] x) => (float[N] y)", "f = Cast<to = 1>(x)", "y = Log(f)"))).kernels
    assert "log_float(" in kernel.code and "?" not in kernel.code.partition("simd")[2].partition("}")[0]
