"""The cases that prove the gradient rules: an operator, its inputs, its attributes, a line each.

An input is a shape (distinct numbers, none 0), an array of its own, or None where it is left out. Floating
inputs are differentiated, unless `constant`; integers and booleans are constants of the model, unless `fed`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

FLOAT, DOUBLE, INT64 = 1, 11, 7
INT_MAX = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Case:
    """One node, and what is special about it.

    Args:
        outputs: how many outputs it has; `used`: how many of them the objective depends on, if not on all.
        constant: the floating inputs that are constants of the model.
        fed: integers and booleans are inputs of the model too.
        rigid: why only the leading dimensions can be unknown.
        once: why its gradient has no gradient that could be proved.
        quirk: why the reference or a runtime needs a tolerance of its own, or cannot serve.
        tolerance: of the reference against finite differences.
        double: whether the operator has float64.
        runtime: whether ONNX Runtime has the operator.
        newer: why ONNX Runtime 1.19 computes another thing.
        opset: the first that has the operator, where that is no older one.
    """

    op_type: str
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    used: int | None = None
    constant: tuple[int, ...] = ()
    fed: bool = False
    rigid: str = ""
    once: str = ""
    quirk: str = ""
    tolerance: float = 1e-6
    double: bool = True
    runtime: bool = True
    newer: str = ""
    opset: int = 21

    @property
    def sized(self) -> tuple[int, ...]:
        """The inputs that always have a known shape: kernels."""
        return (1,) if "Conv" in self.op_type else ()

    def __str__(self) -> str:
        attributes = [f"{name}={value}" for name, value in self.attributes.items()]
        marks = [f"constant={self.constant}"] * bool(self.constant) + ["fed"] * self.fed
        marks += ["int32"] * any(getattr(x, "dtype", None) == np.int32 for x in self.inputs)
        return "-".join([self.op_type, *map(_shown, self.inputs), *attributes, *marks]).replace(" ", "")


def _shown(x: Any) -> str:
    if isinstance(x, np.ndarray):
        return "x".join(map(str, x.shape)) or "scalar" if x.dtype.kind == "f" else str(x.tolist())[:30]
    return "x".join(map(str, x)) or "scalar" if isinstance(x, tuple) else "none"


def case(op_type: str, *inputs: Any, **options: Any) -> Case:
    own = {name: options.pop(name) for name in list(options) if name in Case.__dataclass_fields__}
    return Case(op_type, inputs, options, **own)


def spaced(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> np.ndarray:
    """Return distinct numbers in random order, evenly spaced, none 0."""
    count = int(np.prod(shape))
    numbers = low + (high - low) * (np.arange(count) + 0.53) / count
    return np.random.default_rng((count, seed)).permutation(numbers).reshape(shape)


def positive(*shape: int) -> np.ndarray:
    return spaced(*shape, low=0.4, high=2.5)


def inner(*shape: int) -> np.ndarray:
    return spaced(*shape, low=-0.9, high=0.9)


def above(*shape: int) -> np.ndarray:
    return 1 + positive(*shape)


def ints(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.int64)


def bools(*numbers: Any) -> np.ndarray:
    return np.array(numbers, bool)


def scales(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def one(number: Any, dtype: type = np.float64) -> np.ndarray:
    return np.array(number, dtype)


PADS = "the pads for an output shape depend on the spatial sizes"
TRAINING = "ONNX Runtime for inference has no training mode"
BINS = "ONNX infers the shape of a whole transform"
NEW = "newer than ONNX Runtime"
POOL = "the reference computes other windows or none, and ONNX Runtime has no float64"
ALIAS = "ONNX Runtime's antialiasing differs from the reference"
COMPLEX = "ONNX Runtime's transform of complex numbers differs"
AXES_FED = "ONNX infers no rank of a Pad whose axes it does not know"

ROIS = np.array([[0.3, 0.4, 3.7, 4.6], [-1.37, 1.13, 2.59, 6.17], [1.23, 2.34, 1.91, 2.83]])
ROIS_POOLED = np.array([[0, 0, 0, 4, 4], [1, 1, 2, 4, 6], [0, 3, 1, 3, 1.0]])

# Extremes that come more than once. As in PyTorch, a reduction shares the gradient among them, and a pool does not.
TIES = np.array([[1.0, 3.0, 3.0, 0.5], [2.0, 2.0, -1.0, -1.0]])


def tied(*shape: int) -> np.ndarray:
    """Return 0, 1 and 2 at random: most windows have equal maxima."""
    return np.random.default_rng(0).integers(0, 3, shape).astype(float)


TIED_POOLS = [
    ((2, 3, 6, 4), dict(kernel_shape=[2, 2], strides=[2, 2])),
    ((2, 2, 7, 8), dict(kernel_shape=[3, 2], strides=[3, 2])),
    ((1, 2, 5, 7), dict(kernel_shape=[2, 3], strides=[2, 3], pads=[0, 1, 1, 1])),
    ((2, 2, 13), dict(kernel_shape=[4], strides=[4], pads=[1, 2])),
    ((1, 2, 4, 4, 6), dict(kernel_shape=[2, 2, 3], strides=[2, 2, 3])),
    ((1, 2, 5, 4), dict(kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)),
    ((1, 2, 5, 6), dict(kernel_shape=[3, 3])),
]

BROADCASTS = [
    ((2, 3), (2, 3)),
    ((2, 3), (3,)),
    ((2, 3), (2, 1)),
    ((3,), (2, 3)),
    ((2, 1, 3), (4, 1)),
    ((2, 3), ()),
]
MATRICES = [
    *[((2, 3), (3, 4)), ((3,), (3,)), ((3,), (3, 4)), ((2, 3), (3,)), ((2, 2, 3), (3,)), ((3,), (2, 3, 4))],
    *[((2, 2, 3), (3, 4)), ((2, 1, 2, 3), (3, 2)), ((2, 3), (2, 3, 4)), ((2, 2, 3), (2, 3, 4))],
    *[
        ((2, 1, 2, 3), (1, 2, 3, 2)),
        ((2, 2, 3), (1, 3, 2)),
        ((2, 3), (3, 2, 3, 2)),
        ((3, 2, 2, 3), (2, 3, 2)),
    ],
]
AXES = [
    *[dict(), dict(keepdims=0), dict(axes=[1]), dict(axes=[1], keepdims=0), dict(axes=[-1, 0], keepdims=0)],
    *[dict(axes=[0, 2]), dict(axes=[-2], keepdims=0), dict(axes=[], noop_with_empty_axes=1), dict(axes=[])],
]


def reduction(op_type: str, axes: list[int] | None = None, make: Any = spaced, **attributes: Any) -> Case:
    if "noop_with_empty_axes" in attributes and op_type in ("ReduceL1", "ReduceLogSum", "ReduceSumSquare"):
        attributes["newer"] = "it returns its input where it has no axes"
    return case(op_type, make(2, 3, 2), *[] if axes is None else [ints(*axes)], **attributes)


CASES: list[Case] = [
    # Arithmetic.
    *(case(op, spaced(*a), positive(*b)) for op in ("Add", "Sub", "Mul", "Div") for a, b in BROADCASTS),
    *(case("Pow", positive(*a), spaced(*b)) for a, b in BROADCASTS),
    *(case("Pow", positive(2, 3), one(n), constant=(1,)) for n in (0.0, 1.0, 2.0, 3.0, 0.5, -1.0, 2.7)),
    case("Pow", spaced(2, 3), one(2.0), constant=(1,)),
    case("Pow", (2, 3), one(3, np.int64)),
    case("Pow", np.array([0.7, 0.0, 0.0, 0.0]), np.array([1.5, 0.0, 1.0, 2.0]), constant=(1,)),
    case("Pow", np.array([[0.7], [0.0]]), ints(0, 1, 2, 3), fed=True),
    case("Pow", positive(2, 3), ints(2, -1, 5), fed=True),
    *(case("Mod", 3 * spaced(*a), 0.7 * positive(*b), fmod=1) for a, b in BROADCASTS[:3]),
    *(case(op, (2, 3)) for op in ("Sum", "Mean", "Max", "Min")),
    *(case(op, spaced(2, 3), 1.3 * spaced(3), spaced(2, 1) / 2.9) for op in ("Sum", "Mean", "Max", "Min")),
    *(case(op, spaced(2, 3), 1.3 * spaced(2, 3)) for op in ("Max", "Min")),
    # Elementwise operators and activations.
    *(case(op, (2, 3)) for op in ("Abs", "Exp", "Erf", "Sin", "Cos", "Atan", "Sinh", "Cosh", "Tanh", "Asinh")),
    *(case(op, (2, 3)) for op in ("Identity", "Neg", "Reciprocal", "Relu", "Elu", "Selu", "Gelu", "Mish")),
    *(case(op, (2, 3)) for op in ("Sigmoid", "HardSigmoid", "HardSwish", "Softplus", "Softsign")),
    *(case(op, (2, 3)) for op in ["LeakyRelu", "ThresholdedRelu", "Shrink"]),
    *(case(op, positive(2, 3)) for op in ("Sqrt", "Log")),
    *(case(op, inner(2, 3)) for op in ("Tan", "Asin", "Acos", "Atanh")),
    case("Acosh", above(2, 3)),
    case("Abs", ()),
    case("Softsign", ()),
    case("HardSwish", 3 * spaced(3, 4)),
    case("HardSigmoid", 3 * spaced(3, 4), alpha=0.25, beta=0.4),
    case("LeakyRelu", (2, 3), alpha=0.2),
    *(case(op, (2, 3), alpha=alpha) for op in ("Elu", "Selu") for alpha in (0.7, 1.9)),
    *(case("Celu", (2, 3), alpha=a, double=False, tolerance=1e-4, quirk="float32 alone") for a in (1.0, 0.7, 1.9)),
    case("Elu", (2, 3), alpha=-0.7),
    case("Selu", (2, 3), alpha=1.2, gamma=0.8),
    case("ThresholdedRelu", (3, 4), alpha=0.6),
    case("Gelu", (3, 4), approximate="tanh"),
    case("Shrink", (3, 4), lambd=0.7, bias=0.2),
    *(case("PRelu", spaced(*a), positive(*b)) for a, b in [((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 3, 2), (3, 1))]),
    case("Clip", (3, 4), one(-0.8), one(1.1)),
    case("Clip", (3, 4), one(-0.8)),
    case("Clip", (3, 4), None, one(0.7), constant=(2,)),
    case("Clip", (3, 4)),
    case("Clip", (3, 4), one(1.1), one(-0.8)),
    case("Where", bools([True, False, True], [False, False, True]), (2, 3), (2, 3)),
    case("Where", bools([True], [False]), (2, 3), (3,), fed=True),
    case("Where", bools(True, False, False), (), (2, 1)),
    *(case("Cast", (2, 3), to=to) for to in (FLOAT, DOUBLE)),
    case("CastLike", (2, 3), (1,), quirk="the target's value does not matter: it has no gradient"),
    case(
        "OptionalGetElement",
        (2, 3),
        rigid="ONNX infers no shape",
        runtime=False,
        quirk="no kernel for tensors",
    ),
    case("Dropout", (2, 3)),
    case("Dropout", (2, 3), one(0.3), bools(False)[0], constant=(1,)),
    case(
        "Dropout",
        (3, 4),
        one(0.3),
        one(True, bool),
        constant=(1,),
        seed=7,
        runtime=False,
        quirk="draws its own",
    ),
    case(
        "Dropout",
        (3, 4),
        one(0.6),
        one(True, bool),
        constant=(1,),
        fed=True,
        seed=7,
        runtime=False,
        quirk="draws its own",
    ),
    # Matrix products.
    *(case("MatMul", a, b) for a, b in MATRICES),
    *(
        case("Gemm", (3, 2) if s else (2, 3), (4, 3) if t else (3, 4), transA=s, transB=t, alpha=0.7)
        for s, t in itertools.product((0, 1), repeat=2)
    ),
    *(case("Gemm", (2, 3), (3, 4), c, beta=1.3) for c in [(4,), (2, 1), (1, 4), (2, 4), (1,), ()]),
    case("Gemm", (3, 2), (4, 3), (4,), transA=1, transB=1),
    *(
        case("Einsum", (2, 3), (3, 4), equation=e)
        for e in ("ab,bc->ac", "ab,bc->ca", "ab,bc", "ab,bc->b", "ij, jk -> i")
    ),
    *(case("Einsum", (2, 3, 2), equation=e) for e in ("abc->cab", "abc->b", "abc->")),
    case("Einsum", (2, 3, 2), (2, 2, 4), equation="bij,bjk->bik"),
    case("Einsum", (2, 1, 3, 2), (2, 2, 2, 4), equation="...ij,...jk->...ik"),
    case("Einsum", (2, 3), (3, 2), (2,), equation="ab,bc,c->a"),
    case("Einsum", (2,), (3,), equation="a,b->ab"),
    case("Einsum", (2, 3), equation="...a->a..."),
    *(case("Einsum", (2, 3, 3), equation=e) for e in ("bii->bi", "bii->b", "...ii->...i")),
    case("Einsum", (3, 3, 3), (3, 2), equation="iii,ij->ij"),
    case("Einsum", (2, 1, 3, 2), (2, 2, 2, 4), equation="...ij,...jk"),
    case("Einsum", (2, 3, 2), (2, 3), equation="b...a,b..."),
    case("Einsum", (2, 3, 4), equation="c...a"),
    *(case("Det", shape, rigid="its cofactors depend on the size") for shape in [(3, 3), (2, 2, 2), (2, 1, 1)]),
    # Convolutions.
    case("Conv", (2, 3, 5, 5), (4, 3, 3, 3), (4,)),
    case("Conv", (2, 2, 5, 6), (3, 2, 3, 2), strides=[2, 2], pads=[1, 0, 1, 1]),
    case("Conv", (1, 2, 7, 6), (2, 2, 3, 2), (2,), strides=[3, 2], dilations=[2, 1], pads=[2, 1, 0, 1]),
    case("Conv", (1, 2, 8, 7), (2, 2, 2, 2), strides=[3, 3]),
    case("Conv", (1, 2, 8, 7), (2, 2, 2, 2), strides=[3, 3], pads=[0, 0, 1, 1]),
    case("Conv", (1, 1, 3, 3), (1, 1, 1, 1), strides=[2, 2]),
    case("Conv", (1, 2, 4, 4), (2, 2, 1, 1), strides=[2, 2]),
    case("Conv", (2, 4, 3, 4), (6, 2, 2, 3), (6,), group=2, pads=[1, 1, 0, 1]),
    case("Conv", (2, 3, 5, 4), (3, 1, 3, 3), group=3, pads=[1, 1, 1, 1], strides=[2, 2]),
    case("Conv", (1, 2, 5, 5), (4, 1, 2, 3), group=2, dilations=[2, 2]),
    *(case("Conv", (1, 2, 5, 6), (2, 2, 2, 3), auto_pad=pad) for pad in ("VALID", "SAME_UPPER", "SAME_LOWER")),
    *(case("Conv", (1, 2, 5, 6), (2, 2, 3, 2), auto_pad=pad, strides=[2, 2]) for pad in ("SAME_UPPER", "SAME_LOWER")),
    case("Conv", (1, 1, 6, 7), (1, 1, 1, 2), auto_pad="SAME_UPPER", strides=[2, 3]),
    case("Conv", (2, 2, 7), (3, 2, 3), (3,), pads=[1, 2], strides=[2]),
    case("Conv", (2, 4, 7), (4, 2, 3), group=2, dilations=[2]),
    case("Conv", (1, 2, 3, 4, 3), (2, 2, 2, 3, 2), (2,), pads=[1, 1, 0, 0, 1, 0], strides=[1, 2, 1]),
    case("Conv", (1, 2, 3, 4, 3), (2, 1, 2, 2, 2), group=2),
    case("ConvTranspose", (2, 3, 3, 4), (3, 2, 3, 2), (2,)),
    case("ConvTranspose", (1, 2, 3, 4), (2, 2, 3, 2), strides=[2, 3], pads=[1, 0, 0, 1], output_padding=[1, 2]),
    case("ConvTranspose", (1, 4, 3, 3), (4, 2, 2, 2), (4,), group=2, dilations=[2, 1]),
    case(
        "ConvTranspose",
        (1, 2, 3, 4),
        (2, 2, 2, 2),
        strides=[1, 2],
        dilations=[2, 3],
        output_padding=[1, 2],
        newer="it mistakes an output padding as large as the stride, which later ones refuse",
    ),
    case(
        "ConvTranspose",
        (1, 2, 3, 3),
        (2, 2, 3, 3),
        strides=[2, 2],
        output_shape=[6, 6],
        output_padding=[1, 1],
        rigid=PADS,
    ),
    case(
        "ConvTranspose",
        (1, 2, 3, 3),
        (2, 1, 3, 3),
        strides=[2, 2],
        auto_pad="SAME_LOWER",
        output_shape=[6, 5],
        rigid=PADS,
    ),
    case("ConvTranspose", (1, 2, 3, 3), (2, 2, 3, 3), strides=[2, 2], auto_pad="SAME_UPPER"),
    *(
        case(
            "ConvTranspose",
            (1, 2, 3, 4),
            (2, 1, *kernel),
            strides=[2, 3],
            auto_pad=pad,
            output_padding=[1, 1],
        )
        for pad in ("SAME_UPPER", "SAME_LOWER")
        for kernel in ([3, 3], [1, 4])
    ),
    case("ConvTranspose", (1, 2, 5), (2, 3, 3), strides=[2], pads=[1, 1]),
    case("Col2Im", (2, 12, 9), ints(4, 4), ints(2, 2)),
    case("Col2Im", (1, 6, 9), ints(5, 6), ints(2, 3), strides=[2, 2], pads=[1, 0, 0, 1], dilations=[1, 1]),
    # Pooling.
    case("MaxPool", (2, 2, 4, 4), kernel_shape=[2, 2], strides=[2, 2]),
    case("MaxPool", (2, 2, 5, 4), kernel_shape=[3, 2], pads=[1, 0, 1, 1]),
    case("MaxPool", (1, 2, 5, 5), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
    case("MaxPool", (1, 2, 6, 5), kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1),
    case("MaxPool", (1, 2, 6, 6), kernel_shape=[2, 2], dilations=[2, 3]),
    *(
        case("MaxPool", (1, 2, 5, 4), kernel_shape=[3, 2], strides=[2, 1], auto_pad=p)
        for p in ("SAME_UPPER", "SAME_LOWER")
    ),
    case("MaxPool", (1, 2, 5, 4), kernel_shape=[2, 2], auto_pad="VALID", storage_order=1),
    case("MaxPool", (2, 2, 5, 7), kernel_shape=[2, 2], strides=[2, 3], pads=[1, 0, 0, 1]),
    case("MaxPool", (2, 2, 7), kernel_shape=[3], strides=[2]),
    case("MaxPool", (2, 2, 3, 4, 3), kernel_shape=[2, 2, 2], strides=[1, 2, 1]),
    case("MaxPool", (2, 2, 5, 7), kernel_shape=[2, 3], strides=[2, 3], pads=[0, 1, 1, 1]),
    case("MaxPool", (1, 2, 6), kernel_shape=[2], strides=[2]),
    case("AveragePool", (2, 2, 4, 4), kernel_shape=[2, 2], strides=[2, 2]),
    *(case("AveragePool", (1, 2, 5, 4), kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=n) for n in (0, 1)),
    *(
        case(
            "AveragePool",
            (1, 2, 5, 6),
            kernel_shape=[2, 3],
            strides=[2, 2],
            ceil_mode=1,
            pads=pads,
            count_include_pad=n,
            newer="it counts what is beyond the pads, too" if n else "",
        )
        for n in (0, 1)
        for pads in ([0, 0, 0, 0], [1, 1, 0, 0])
    ),
    case("AveragePool", (1, 2, 6, 6), kernel_shape=[2, 2], dilations=[2, 1]),
    *(
        case(
            "AveragePool",
            (1, 2, 5, 7),
            kernel_shape=[3, 3],
            strides=[2, 2],
            ceil_mode=ceil,
            pads=pads,
            count_include_pad=n,
            newer="it counts what is beyond the pads, too" if ceil and n else "",
        )
        for n in (0, 1)
        for ceil in (0, 1)
        for pads in ([0, 0, 1, 1], [1, 0, 0, 1])
    ),
    *(
        case(
            "AveragePool",
            (1, 2, 7, 6),
            kernel_shape=[2, 3],
            dilations=[3, 2],
            pads=[1, 2, 1, 1],
            count_include_pad=n,
        )
        for n in (0, 1)
    ),
    case("AveragePool", (2, 3, 4, 5), kernel_shape=[2, 2], strides=[1, 2], pads=[0, 1, 0, 0]),
    *(
        case("AveragePool", (1, 2, 5, 4), kernel_shape=[3, 2], strides=[2, 1], auto_pad=p)
        for p in ("SAME_UPPER", "SAME_LOWER")
    ),
    case("AveragePool", (1, 2, 5, 4), kernel_shape=[3, 2], strides=[2, 1], auto_pad="VALID"),
    case("AveragePool", (2, 2, 7), kernel_shape=[3], strides=[2]),
    case("AveragePool", (1, 2, 3, 4, 3), kernel_shape=[2, 2, 2], strides=[1, 2, 1]),
    *(case("LpPool", (1, 2, 5, 4), kernel_shape=[3, 2], p=p) for p in (2, 3)),
    case("LpPool", (2, 2, 7), kernel_shape=[3], p=1),
    case("LpPool", (1, 2, 5, 6), kernel_shape=[2, 3], strides=[2, 1], pads=[1, 0, 0, 2], p=3),
    case("LpPool", (1, 2, 6, 6), kernel_shape=[2, 2], dilations=[2, 3]),
    *(case("LpPool", (1, 2, 5, 6), kernel_shape=[2, 3], auto_pad=p) for p in ("SAME_UPPER", "SAME_LOWER")),
    case("LpPool", (1, 2, 6, 5), kernel_shape=[3, 2], strides=[2, 2], ceil_mode=1, quirk=POOL, double=False),
    *(
        case(op, (1, 2, 6, 5), kernel_shape=[1, 2], strides=[2, 3], auto_pad="SAME_LOWER", **quirk)
        for op, quirk in [
            *((op, {"quirk": POOL, "double": False}) for op in ("AveragePool", "LpPool")),
            ("MaxPool", {}),
        ]
    ),
    *(  # a last window begins beyond the elements, and is none
        case(op, (1, 2, 6, 6), kernel_shape=[1, 2], strides=[2, 3], ceil_mode=1)
        for op in ("AveragePool", "LpPool", "MaxPool")
    ),
    case("MaxUnpool", (1, 1, 2, 2), ints([[[5, 2], [8, 15]]]), kernel_shape=[2, 2], strides=[2, 2]),
    case(
        "MaxUnpool",
        (1, 1, 2, 2),
        ints([[[5, 2], [8, 15]]]),
        ints(1, 1, 5, 6),
        kernel_shape=[2, 2],
        strides=[2, 2],
    ),
    *(case(op, shape) for op in ("GlobalAveragePool", "GlobalMaxPool") for shape in [(2, 2, 3, 2), (2, 2, 5)]),
    *(case("GlobalLpPool", (2, 2, 3, 2), p=p) for p in (1, 2, 3)),
    *(
        case("MaxRoiPool", (2, 2, 6, 5), ROIS_POOLED, constant=(1,), pooled_shape=[2, 3], spatial_scale=s)
        for s in (1.0, 0.5)
    ),
    case("MaxRoiPool", (2, 3, 6, 5), ROIS_POOLED, constant=(1,), pooled_shape=[3, 1]),
    # Sampling.
    *(
        case("GridSample", (2, 2, 3, 4), 0.8 * spaced(2, 2, 3, 2), mode=mode, padding_mode=pad, align_corners=n)
        for mode in ("linear", "nearest", "cubic")
        for pad in ("zeros", "border", "reflection")
        for n in (0, 1)
    ),
    *(
        case("GridSample", (1, 2, 3, 4), 2.3 * spaced(1, 2, 4, 2), mode=mode, padding_mode=pad)
        for mode in ("linear", "cubic")
        for pad in ("zeros", "border", "reflection")
    ),
    *(
        case("GridSample", (1, 2, 2, 3, 2), 0.7 * spaced(1, 1, 2, 2, 3), mode="linear", padding_mode=pad)
        for pad in ("zeros", "border", "reflection")
    ),
    case("GridSample", (1, 2, 5), 0.6 * spaced(1, 4, 1), runtime=False, quirk="ONNX Runtime samples no lines"),
    *(case("AffineGrid", (2, 2, 3), ints(2, 3, 4, 5), align_corners=n) for n in (0, 1)),
    case("AffineGrid", (2, 3, 4), ints(2, 1, 2, 3, 4), fed=True),
    *(
        case(
            "RoiAlign",
            (2, 2, 6, 5),
            ROIS,
            ints(0, 1, 0),
            mode=mode,
            coordinate_transformation_mode=coordinates,
            output_height=2,
            output_width=3,
            sampling_ratio=samples,
            spatial_scale=0.9,
        )
        for mode in ("avg", "max")
        for coordinates in ("half_pixel", "output_half_pixel")
        for samples in (0, 2)
    ),
    case(
        "RoiAlign",
        (2, 3, 5, 6),
        ROIS + np.array([0, 0, 0.05, 0.07]),
        ints(1, 0, 1),
        output_height=3,
        output_width=1,
        sampling_ratio=3,
    ),
    case("DeformConv", (2, 2, 4, 4), (3, 2, 2, 2), 0.3 * spaced(2, 8, 3, 3)),
    case(
        "DeformConv",
        (1, 4, 5, 4),
        (4, 2, 2, 2),
        0.3 * spaced(1, 16, 3, 2),
        (4,),
        (1, 8, 3, 2),
        group=2,
        offset_group=2,
        pads=[1, 0, 0, 1],
        strides=[2, 2],
    ),
    case("DeformConv", (1, 1, 5, 5), (1, 1, 2, 2), 0.3 * spaced(1, 8, 3, 3), dilations=[2, 2]),
    # Normalization.
    *(case("BatchNormalization", x, (2,), (2,), (2,), positive(2)) for x in [(2, 2, 3, 2), (3, 2), (2, 2, 4)]),
    case("BatchNormalization", (2, 2, 3), (2,), (2,), (2,), positive(2), epsilon=0.1),
    case(
        "BatchNormalization",
        (3, 2, 3),
        (2,),
        (2,),
        (2,),
        positive(2),
        training_mode=1,
        outputs=3,
        used=1,
        runtime=False,
        quirk=TRAINING,
    ),
    case(
        "BatchNormalization",
        (3, 2, 3),
        (2,),
        (2,),
        (2,),
        positive(2),
        training_mode=1,
        momentum=0.7,
        outputs=3,
        runtime=False,
        quirk=TRAINING,
    ),
    *(case("LayerNormalization", (2, 3, 4), (4,), (4,), **a) for a in [dict(), dict(axis=2), dict(epsilon=0.1)]),
    case("LayerNormalization", (2, 3, 4), (3, 4), axis=1),
    case("LayerNormalization", (2, 3, 4), (3, 4), (3, 4), axis=-2),
    case(
        "LayerNormalization",
        (2, 3, 4),
        (4,),
        (3, 1),
        axis=-2,
        runtime=False,
        quirk="1.19 broadcasts no scale",
    ),
    case("InstanceNormalization", (2, 2, 3, 2), (2,), (2,)),
    case("InstanceNormalization", (3, 2, 4), (2,), (2,), epsilon=0.1),
    case("LayerNormalization", (2, 3, 4), (4,), (4,), epsilon=0.1, outputs=3),
    case("LayerNormalization", (2, 3, 4), (3, 4), axis=1, outputs=3),
    *(case(op, (2, 3, 4), **a) for op in ("Softmax", "LogSoftmax") for a in [dict(), dict(axis=1), dict(axis=-3)]),
    *(case("LpNormalization", positive(2, 3, 4), axis=axis, p=p) for axis in (-1, 1) for p in (1, 2)),
    *(case("LpNormalization", (2, 3, 4), axis=axis, p=p) for axis in (-1, 0) for p in (1, 2)),
    *(case("LRN", (2, 5, 2, 3), size=n, alpha=0.3, beta=0.6, bias=1.5) for n in (3, 5)),
    *(case("LRN", (2, 5, 2, 3), size=n, alpha=0.8, beta=1.3, bias=0.9) for n in (1, 2, 4)),
    case("LRN", (1, 4, 3, 2), size=3),
    # Resampling.
    *(
        case("Resize", (1, 2, 3, 4), None, scales(1, 1, 2, 1.5), constant=(2,), mode=mode, **a)
        for mode in ("nearest", "linear", "cubic")
        for a in [
            dict(),
            dict(coordinate_transformation_mode="align_corners"),
            dict(coordinate_transformation_mode="asymmetric"),
        ]
    ),
    case("Resize", (1, 2, 3, 4), None, scales(1, 1, 2, 2), constant=(2,), mode="nearest", nearest_mode="floor"),
    *(
        case(
            "Resize",
            (1, 1, 5, 6),
            None,
            scales(1, 1, 0.6, 0.5),
            constant=(2,),
            mode=mode,
            antialias=1,
            runtime=False,
            quirk=ALIAS,
        )
        for mode in ("linear", "cubic")
    ),
    case("Resize", (1, 2, 3, 4), None, None, ints(1, 2, 5, 2), mode="linear"),
    *(
        case("Resize", (1, 2, 4, 5), None, scales(1, 1, 1.5, 0.8), constant=(2,), mode="cubic", **a)
        for a in [
            dict(cubic_coeff_a=-0.5),
            dict(cubic_coeff_a=-0.5, exclude_outside=1),
            dict(exclude_outside=1, coordinate_transformation_mode="asymmetric"),
        ]
    ),
    case(
        "Resize",
        (1, 1, 4, 5),
        np.array([0, 0, 0.2, 0.1, 1, 1, 0.8, 1.2], np.float32),
        None,
        ints(1, 1, 3, 4),
        constant=(1,),
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=2.5,
    ),
    case("Resize", (1, 2, 4), None, scales(1, 1, 2.5), constant=(2,), mode="linear"),
    *(
        case(
            "Resize",
            (1, 1, 2, 4),
            None,
            None,
            ints(1, 3),
            axes=[2, 3],
            mode=mode,
            keep_aspect_ratio_policy=policy,
        )
        for mode in ("nearest", "linear")
        for policy in ("not_larger", "not_smaller")
    ),
    # Quantization.
    *(
        case(
            "DequantizeLinear",
            np.arange(12, dtype=np.uint8).reshape(3, 4),
            x,
            z,
            double=False,
            tolerance=1e-3,
            **a,
        )
        for x, z, a in [
            ((), None, dict()),
            (positive(4), np.array([3, 1, 4, 1], np.uint8), dict(axis=-1)),
            (positive(3), None, dict(axis=0)),
        ]
    ),
    *(
        case(
            "DequantizeLinear",
            np.arange(12, dtype=np.uint8).reshape(3, 4),
            positive(3, 2),
            double=False,
            tolerance=1e-3,
            axis=1,
            block_size=size,
            rigid="the blocks depend on the size",
        )
        for size in (2, 3)
    ),
    # Fourier transforms.
    *(
        case("DFT", (2, 6, n), length, ints(1)[0], runtime=n == 1, quirk=COMPLEX, **a)
        for n, length, a in [
            (1, None, dict()),
            (2, None, dict()),
            (2, None, dict(inverse=1)),
            (1, None, dict(onesided=1)),
            (1, ints(4)[0], dict()),
            (2, ints(8)[0], dict()),
        ]
    ),
    *(
        case("DFT", (2, n, 2), ints(m)[0], inverse=1, onesided=1, runtime=False, quirk=COMPLEX)
        for n, m in [(4, 6), (4, 7)]
    ),
    case("STFT", (2, 10, 1), ints(2)[0], positive(4), once=BINS, runtime=False, quirk=COMPLEX),
    case("STFT", (2, 10, 1), ints(2)[0], positive(4), once=BINS, runtime=False, quirk=COMPLEX, onesided=0),
    case("STFT", (2, 10, 1), ints(3)[0], None, ints(4)[0], once=BINS, runtime=False, quirk=COMPLEX),
    # Reductions.
    *(reduction(op, **a) for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin") for a in AXES),
    *(reduction(op, **a) for op in ("ReduceL1", "ReduceL2", "ReduceProd", "ReduceSumSquare") for a in AXES),
    *(reduction(op, make=positive, **a) for op in ("ReduceLogSum", "ReduceLogSumExp") for a in AXES),
    *(case("ReduceProd", np.array([[1.5, 0, 2], [0, 0, 3], [1, 2, 3]]), ints(1), keepdims=k) for k in (0, 1)),
    case("ReduceMean", (2, 3, 2), ints(1), fed=True, once="ONNX infers no rank of it"),
    *(case(op, TIES, ints(1), keepdims=k, once="equal extremes") for op in ("ReduceMax", "ReduceMin") for k in (0, 1)),
    case("ReduceMax", TIES, once="equal extremes"),
    *(case("MaxPool", tied(*shape), once="equal extremes", **a) for shape, a in TIED_POOLS),
    *(
        case("GlobalMaxPool", tied(*shape), once="equal extremes")
        for shape in ((2, 3, 5), (2, 2, 3, 4), (1, 2, 3, 3, 3))
    ),
    case("MaxRoiPool", tied(2, 2, 6, 8), ROIS_POOLED, once="equal extremes", pooled_shape=[2, 3]),
    case("ReduceL2", np.array([[1.5, 0, 2], [0, 0, 0], [-1, 2, 0]]), ints(1), once="a norm of 0"),
    case("ReduceL1", np.array([[1.5, 0, 2], [0, 0, 0], [-1, 2, 0]]), ints(1), once="a norm of 0"),
    case("ReduceLogSumExp", (2, 3, 2), ints(-1)),
    *(case("CumSum", (2, 3), one(n, np.int64), **a) for n in (0, -1) for a in [dict(), dict(exclusive=1, reverse=1)]),
    *(
        case("CumProd", positive(2, 3), one(1, np.int64), opset=26, runtime=False, quirk=NEW, **a)
        for a in [dict(), dict(exclusive=1, reverse=1)]
    ),
    case("Range", one(0.3), one(2.2), one(0.5), constant=(1,), double=False, tolerance=1e-3),
    # Shapes.
    *(case("Reshape", (2, 3, 4), ints(*shape)) for shape in [(6, 4), (0, -1), (-1,), (2, 2, 3, 2)]),
    case("Reshape", (2, 6), ints(3, -1), fed=True),
    case("Reshape", (0, 3, 4), ints(3, 4, 0), allowzero=1, rigid="no size is left to tell the others"),
    *(case("Flatten", (2, 3, 2), **a) for a in [dict(), dict(axis=0), dict(axis=2), dict(axis=-1)]),
    *(case("Squeeze", (2, 1, 3, 1), *axes) for axes in [[], [ints(1)], [ints(-1, 1)]]),
    *(case("Unsqueeze", (2, 3), axes) for axes in [ints(0), ints(-1, 1)]),
    *(case("Transpose", (2, 3, 4), **a) for a in [dict(), dict(perm=[2, 0, 1]), dict(perm=[0, 2, 1])]),
    *(case("Expand", x, ints(2, 3, 4)) for x in [(4,), (3, 1), (2, 1, 4), (), (2, 3, 4)]),
    case("Expand", (3, 1), ints(1, 4)),
    case("Concat", (2, 3), axis=0),
    *(case("Concat", (2, 3), (2, 2), (2, 1), axis=n) for n in (1, -1)),
    case("Concat", (2, 3), (1, 3), axis=0),
    case("Split", (2, 6), ints(1, 3, 2), axis=1, outputs=3),
    case("Split", (4, 3), num_outputs=2, outputs=2),
    case("Split", (2, 5), num_outputs=2, axis=-1, outputs=2),
    case("Slice", (4, 5), ints(1), ints(3)),
    case("Slice", (4, 5), ints(1, 0), ints(INT_MAX, -2), ints(1, 0)),
    case("Slice", (4, 5), ints(-3), ints(-1), ints(-1), ints(1)),
    case("Slice", (4, 5), ints(0, 4), ints(4, -INT_MAX), ints(0, 1), ints(2, -2)),
    case("Slice", (4, 5), ints(-1), ints(-INT_MAX), ints(0), ints(-1)),
    case("Slice", (4, 5), ints(1, 1), ints(3, 4), fed=True),
    case("Slice", (4, 5), ints(3), ints(2)),
    *(case("Tile", (2, 3), ints(*r)) for r in [(2, 1), (3, 2)]),
    case("Tile", (2, 3), ints(2, 2), fed=True),
    case("Pad", (2, 3), ints(1, 0, 0, 2), one(0.5)),
    case("Pad", (2, 3), ints(1, 2), None, ints(-1)),
    case("Pad", (2, 3), ints(0, 1, 1, 0), fed=True),
    case("Pad", (2, 3), ints(0, 0, 0, 0)),
    case("Pad", (2, 3, 2), ints(1, 0, 2, -1), None, ints(2, -2)),
    case("Pad", (2, 3, 2), ints(1, 0, 2, -1), None, ints(2, -2), fed=True, once=AXES_FED),
    case("Pad", (2, 3), ints(1, 1), None, ints(-1), mode="reflect"),
    *(case("Pad", (3, 4), ints(2, 1, 1, 2), mode=mode) for mode in ("reflect", "edge", "wrap")),
    *(case("Trilu", (2, 3, 3), upper=n) for n in (0, 1)),
    case("Trilu", (3, 4), one(-1, np.int64), upper=0),
    *(case("DepthToSpace", (1, 8, 2, 3), blocksize=2, mode=mode) for mode in ("DCR", "CRD")),
    *(case("DepthToSpace", (2, 18, 1, 2), blocksize=3, mode=mode) for mode in ("DCR", "CRD")),
    case("SpaceToDepth", (1, 2, 6, 3), blocksize=3),
    case("SpaceToDepth", (2, 2, 4, 6), blocksize=2),
    case("ReverseSequence", (4, 3, 2), ints(2, 4, 1)),
    case("ReverseSequence", (3, 4), ints(2, 4, 1), batch_axis=0, time_axis=1),
    # Indexing.
    case("Gather", (4, 3), ints(2, 0, 2)),
    case("Gather", (4, 3), ints([2, -1], [0, 3]), fed=True),
    case("Gather", (4,), ints([2, -1], [0, 2]), fed=True),
    *(case("Gather", (2, 4, 3), ints([2, 0], [1, 2]), axis=n) for n in (1, -1)),
    *(case("Gather", (2, 4, 3), one(n, np.int64), axis=1) for n in (0, -1)),
    case("Gather", (2, 4, 3), one(2, np.int64), axis=1, fed=True),
    case("Gather", (2, 4, 3), ints(1), axis=2),
    *(case("GatherElements", (3, 3), ints([0, 2, 2], [1, 1, -1]), axis=n) for n in (0, -1)),
    case("GatherND", (2, 3, 2), ints([0, 2], [1, 0], [0, 2])),
    case("GatherND", (2, 3, 2), ints([[0, 2, 1]], [[1, 0, -1]])),
    case("GatherND", (2, 3, 2), ints([2], [0]), batch_dims=1),
    case("GatherND", (3, 2, 2), ints([2], [-1], [2]), fed=True),
    case("GatherND", (2, 3), ints([0, -1], [-1, 0], [0, 2]), fed=True),
    case("TopK", (3, 4), ints(2), outputs=2),
    case("TopK", (3, 4), ints(2), outputs=2, axis=0, largest=0),
    case("TopK", (3, 4), ints(3), outputs=2, sorted=0, once="the order is each evaluator's own", runtime=False),
    case("Unique", (2, 3)),
    case("Unique", (3, 2), axis=0),
    case("Unique", np.array([3.0, 1, 3, 2, 1]), sorted=0, once="equal elements"),
    case("Unique", np.array([[3.0, 1, 3], [2, 1, 2]]), axis=1, once="equal elements"),
    case("Unique", (2, 3), outputs=4, sorted=0),
    case("Unique", (2, 3), outputs=4, axis=1, sorted=0),
    *(case("OneHot", ints(1, 0, 2), ints(3)[0], (2,), axis=axis) for axis in (-1, 0)),
    *(
        case("TensorScatter", (2, 4, 3), (2, 2, 3), *start, opset=24, runtime=False, quirk=NEW, **a)
        for start, a in [([], dict()), ([ints(1, 2)], dict()), ([ints(3, 1)], dict(mode="circular"))]
    ),
    case("TensorScatter", (2, 4, 3), (2, 4, 2), ints(1, 0), opset=24, runtime=False, quirk=NEW, axis=-1),
    case("Compress", (3, 4), bools(True, False, True), axis=0),
    case("Compress", (2, 3), bools(True, False, True, False, True)),
    *(case("ScatterElements", (3, 4), ints([0, 2], [1, 0]), (2, 2), axis=1, reduction=r) for r in ("none", "add")),
    *(
        case("ScatterElements", (3, 2), ints([0, 2], [0, 1]), 2 * positive(2, 2), reduction=r)
        for r in ("add", "mul", "max", "min")
    ),
    case(
        "ScatterElements",
        np.array([[1.5, 0.0, 2.0, 0.0]]),
        ints([1, 2, 2, 3]),
        np.array([[3.0, 0.0, 2.5, 0.0]]),
        axis=1,
        reduction="mul",
        once="zeros",
    ),
    *(case("ScatterND", (3, 4), ints([2], [0]), (2, 4), reduction=r) for r in ("none", "add")),
    *(case("ScatterND", (3, 2), ints([2, 1], [0, 0]), (2,), reduction=r) for r in ("none", "add", "mul", "max", "min")),
    *(
        case(
            "ScatterElements",
            TIES,
            ints([1, 2, 2], [0, 0, 1]),
            TIES[::-1, :3],
            axis=1,
            reduction=r,
            once="equal extremes",
        )
        for r in ("max", "min")
    ),
    *(
        case(
            "ScatterND",
            TIES[0],
            ints([1], [2], [0], [1]),
            np.array([3.0, 3.0, 5.0, 1.0]),
            reduction=r,
            once="equal extremes",
        )
        for r in ("max", "min")
    ),
]


def narrowed(case: Case) -> Case:
    """Return a case with integers of 32 bits in the place of those of 64, where the operator takes them."""
    formals = onnx.defs.get_schema(case.op_type, case.opset).inputs
    takes = {i for i, formal in enumerate(formals) if {"tensor(int32)", "tensor(int64)"} <= formal.types}
    inputs = [
        x.astype(np.int32) if i in takes and getattr(x, "dtype", None) == np.int64 else x
        for i, x in enumerate(case.inputs)
    ]
    return replace(case, inputs=tuple(inputs))


# Of each operator that takes integers of 32 bits one case with constants, and one with inputs. ONNX infers no Pad's
# shape from axes of 32 bits.
NARROW_INTEGERS = {
    (case.op_type, case.fed): narrow
    for case in reversed(CASES)
    for narrow in [narrowed(case)]
    if case.op_type != "Pad" and any(x is not y for x, y in zip(narrow.inputs, case.inputs, strict=True))
}
CASES += reversed(NARROW_INTEGERS.values())

# Operators that stop the gradient, of floating inputs to floating outputs.
NON_DIFFERENTIABLE: list[Case] = [
    case(op, (2, 3)) for op in ("Ceil", "Floor", "Round", "Sign", "Hardmax", "RandomNormalLike", "RandomUniformLike")
]


def arrays(case: Case) -> dict[str, np.ndarray]:
    """Return a case's inputs by name."""
    inputs = {f"x{i}": x for i, x in enumerate(case.inputs) if x is not None}
    return {name: spaced(*x, seed=int(name[1:])) if isinstance(x, tuple) else x for name, x in inputs.items()}


def is_fed(case: Case, name: str, x: np.ndarray) -> bool:
    return int(name[1:]) not in case.constant if x.dtype.kind == "f" else case.fed


def cast(x: np.ndarray, dtype: type) -> np.ndarray:
    return x.astype(dtype) if x.dtype == np.float64 else x


def point(case: Case, dtype: type) -> dict[str, np.ndarray]:
    """Return what the model of a case is fed."""
    return {name: cast(x, dtype) for name, x in arrays(case).items() if is_fed(case, name, x)}


def model_of(case: Case, dtype: type, dims: str = "static") -> ir.Model:
    """Return the model of one node, its floating inputs of one type; its dimensions `static`, all but the
    `leading` ones static, or `unknown`."""
    inputs, initializers = [], []
    for i, (name, x) in enumerate(arrays(case).items()):
        x = cast(x, dtype)
        if not is_fed(case, name, x):
            initializers.append(onnx.numpy_helper.from_array(x, name))
            continue
        shape: list[Any] = list(x.shape)
        if dims == "unknown" and x.dtype.kind == "f" and i not in case.sized:
            shape = [f"{name}_{axis}" for axis in range(x.ndim)]
        elif dims == "leading" and x.dtype.kind == "f" and shape and i not in case.sized:
            shape[0] = f"d{shape[0]}"
        inputs.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), shape))
    names = ["" if x is None else f"x{i}" for i, x in enumerate(case.inputs)]
    outputs = [onnx.ValueInfoProto(name=f"y{i}") for i in range(case.outputs)]
    node = helper.make_node(case.op_type, names, [y.name for y in outputs], "node", **case.attributes)
    graph = helper.make_graph([node], "graph", inputs, outputs[: case.used], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=10)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True))
