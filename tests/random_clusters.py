"""Random graphs for native kernels: independent parts, each a small graph of operators that one loop can compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

FLOAT, DOUBLE, INT64, INT32, BOOL = (
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.INT64,
    TensorProto.INT32,
    TensorProto.BOOL,
)
FLOATING = (FLOAT, DOUBLE)

Size = int | str

# Elementwise operators by what they take and give: `x` is a floating type, `n` a number's type, `b` a truth value.
UNARY = {
    **dict.fromkeys(("Abs", "Neg", "Sign", "Identity"), ({}, {})),
    **dict.fromkeys(("Ceil", "Floor", "Round", "Reciprocal", "Relu", "Softsign", "Sqrt"), ({},)),
    **dict.fromkeys(("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh", "Tan"), ({},)),
    **dict.fromkeys(("Erf", "Exp", "HardSwish", "Log", "Mish", "Sigmoid", "Softplus", "Tanh"), ({},)),
    "Celu": ({"alpha": 1.0}, {"alpha": 0.7}),
    "Elu": ({"alpha": 1.0}, {"alpha": 0.7}),
    "Gelu": ({"approximate": "none"}, {"approximate": "tanh"}),
    "Selu": ({"alpha": 1.6732632, "gamma": 1.0507010}, {"alpha": 1.5, "gamma": 0.9}),
    "HardSigmoid": ({}, {"alpha": 0.3, "beta": 0.4}),
    "LeakyRelu": ({}, {"alpha": 0.3}),
    "Shrink": ({}, {"lambd": 0.4, "bias": 0.25}),
    "Swish": ({}, {"alpha": 1.7}),
    "ThresholdedRelu": ({}, {"alpha": 0.25}),
}
BINARY = {"Add": {}, "Sub": {}, "Mul": {}, "Div": {}, "Mod": {"fmod": 1}}
GOLDEN = 0x9E3779B1 - 2**32  # products with it wrap
BITWISE = ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
LOGIC = ("And", "Or", "Xor")
VARIADIC = ("Mean", "Max", "Min", "Sum")
WHOLE_NUMBERS = {"Abs", "Neg", "Sign", "Identity"}
FLOAT_ALONE = {  # Cos in version 1.19
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Celu", "Cos", "Cosh", "Elu", "Erf", "Gelu"),
    *(
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "Mish",
        "Selu",
        "Shrink",
        "Sinh",
        "Softplus",
        "Softsign",
        "Tan",
    ),
    "ThresholdedRelu",
}
REDUCTIONS = (
    *("ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceL2"),
    *("ReduceL1", "ReduceLogSum", "ReduceMax", "ReduceMin", "ReduceProd"),  # not of nothing
)
ROWS = ("Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization")

SPECIAL = [
    *(np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-45, -1e-40, 1.1754942e-38, 1.17549435e-38),
    *(3.4028235e38, -3.4028235e38, 1e30, -1e30, 1e-30, 88.7, 89.5, -87.4, -103.9, -105.0, 16777216.0, 2.5),
    -3.5,
]


@dataclass(frozen=True)
class Value:
    name: str
    dtype: int
    dims: tuple[Size, ...]


@dataclass
class Part:
    """Grow a part of a graph: nodes over one list of dimensions.

    Args:
        sizes: the sizes of dimensions with a name, in each of several runs.
    """

    prefix: str
    r: np.random.Generator
    opset: int
    runs: int
    calm: bool = False  # ordinary numbers alone
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    sizes: dict[str, list[int]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        rank = int(self.r.integers(0, 6))
        self.dims: list[Size] = []
        self.calm = self.chance(0.5)
        big = self.chance(0.08) and rank
        for p in range(rank):
            choices = [1, 2, 3, 4, 5, 7] if rank > 2 else [1, 2, 3, 5, 8, 16, 17, 33, 64, 100]
            if self.chance(0.5):
                name = f"{self.prefix}n{p}"
                self.sizes[name] = [int(self.r.choice([0, *choices, *choices])) for _ in range(self.runs)]
                if big and p == 0:
                    self.sizes[name][0] = int(self.r.integers(400, 900))
                self.dims.append(name)
            else:
                self.dims.append(int(self.r.choice(choices)))
        self.calm = bool(self.calm)
        self.floating = DOUBLE if self.chance(0.12) else FLOAT
        self.new(self.floating, tuple(self.dims))

    def chance(self, share: float = 0.5) -> bool:
        return bool(self.r.random() < share)

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[int(self.r.integers(len(choices)))]

    def new(self, dtype: int, dims: Sequence[Size]) -> Value:
        value = Value(f"{self.prefix}x{len(self.inputs)}", dtype, tuple(dims))
        self.inputs.append(value)
        self.values.append(value)
        return value

    def constant(self, array: np.ndarray) -> str:
        name = f"{self.prefix}c{len(self.constants)}"
        self.constants[name] = array
        return name

    def pick(self, *dtypes: int, where: Callable[[Value], bool] = lambda x: True) -> Value:
        """Return a value of a type; a new input if there is none."""
        there = [x for x in self.values if x.dtype in dtypes and where(x)]
        if there and self.chance(0.9):
            return self.one_of(there[-5:])
        return self.new(dtypes[0], self.dims)

    def partner(self, x: Value, dtype: int) -> Value:
        """Return a value that broadcasts to another: one that is there, or a new input of fewer dimensions."""
        there = [y for y in self.values if y.dtype == dtype and self.broadcast(x.dims, y.dims) is not None]
        if there and self.chance(0.6):
            return self.one_of(there)
        dims: list[Size] = list(x.dims)
        kind = int(self.r.integers(0, 7))
        if kind == 0:  # a scalar, that varies or not
            if self.chance():
                array = self.numbers(dtype, (), 0).reshape(self.one_of([(), (1,)]))
                return Value(self.constant(array), dtype, array.shape)
            dims = []
        elif kind == 1:  # rows
            dims = dims[int(self.r.integers(0, len(dims) + 1)) :]
        elif kind == 2 and dims:  # columns
            keep = int(self.r.integers(0, len(dims)))
            dims = dims[:keep] + [1] * (len(dims) - keep)
        elif kind == 3:  # any
            dims = [1 if self.chance() else d for d in dims]
        elif kind == 4 and len(dims) > 2:  # an inner dimension
            keep = int(self.r.integers(1, len(dims) - 1))
            dims = [d if p == keep else 1 for p, d in enumerate(dims)]
        return self.new(dtype, dims)

    def broadcast(self, a: Sequence[Size], b: Sequence[Size]) -> tuple[Size, ...] | None:
        """Return the broadcast dimensions, if the names alone tell them."""
        n = max(len(a), len(b))
        left, right = ((1,) * (n - len(dims)) + tuple(dims) for dims in (a, b))
        if any(p != q and 1 not in (p, q) for p, q in zip(left, right, strict=True)):
            return None
        return tuple(q if p == 1 else p for p, q in zip(left, right, strict=True))

    def add(
        self, op_type: str, inputs: Sequence[str], *outputs: tuple[int, Sequence[Size]], **attributes: Any
    ) -> Value:
        values = [
            Value(f"{self.prefix}y{len(self.nodes)}_{i}", dtype, tuple(dims)) for i, (dtype, dims) in enumerate(outputs)
        ]
        self.nodes.append(helper.make_node(op_type, inputs, [y.name for y in values], **attributes))
        self.used.update(inputs)
        self.values += values
        return values[0]

    def numbers(self, dtype: int, shape: Sequence[int], run: int) -> np.ndarray:
        """Return contents of an input or a constant."""
        if dtype == BOOL:
            return np.asarray(self.r.random(shape) < 0.5)
        if dtype in (INT64, INT32):
            return np.asarray(self.r.integers(-5, 6, shape), np.int64 if dtype == INT64 else np.int32)
        x = self.r.standard_normal(shape) * (1 if self.calm else 10.0 ** self.r.integers(-3, 3))
        if not self.calm:
            x = np.where(self.r.random(shape) < 0.15, self.r.choice(SPECIAL, shape), x)
        return np.asarray(x, np.float32 if dtype == FLOAT else np.float64)

    def never_empty(self, dims: Sequence[Size]) -> bool:
        return not any(0 in self.sizes.get(d, []) for d in dims if isinstance(d, str))

    # --- Nodes ---

    def unary(self) -> None:
        op_type = self.one_of([name for name in UNARY if name != "Swish" or self.opset >= 24])
        types = [FLOAT] if op_type in FLOAT_ALONE else [self.floating]
        if op_type in WHOLE_NUMBERS and self.chance(0.2):
            types = [INT64]
        x = self.pick(*types)
        self.add(op_type, [x.name], (x.dtype, x.dims), **self.one_of(UNARY[op_type]))

    def binary(self) -> None:
        x = self.pick(self.floating, *([INT64] if self.chance(0.2) else []))
        op_type = self.one_of(list(BINARY)[: 3 if x.dtype == INT64 else None])
        y = self.partner(x, x.dtype)
        self.pair(op_type, x, y, x.dtype, **BINARY[op_type])

    def whole(self) -> None:
        x = self.pick(INT64, INT32)
        kind = int(self.r.integers(0, 5))
        if kind == 0:
            self.add("BitwiseNot", [x.name], (x.dtype, x.dims))
        elif kind <= 2:
            numbers = [GOLDEN, -3] if kind == 1 else [2, 1 << 16, 10, -7]
            constant = np.asarray(self.one_of(numbers), np.int64 if x.dtype == INT64 else np.int32)
            self.add("Mul" if kind == 1 else "Div", [x.name, self.constant(constant)], (x.dtype, x.dims))
        else:
            self.pair(self.one_of(BITWISE), x, self.partner(x, x.dtype), x.dtype)

    def pair(self, op_type: str, x: Value, y: Value, dtype: int, **attributes: Any) -> None:
        if self.chance(0.3):
            x, y = y, x
        dims = self.broadcast(x.dims, y.dims)
        assert dims is not None
        self.add(op_type, [x.name, y.name], (dtype, dims), **attributes)

    def variadic(self) -> None:
        x = self.pick(self.floating)
        others = [x]
        dims: tuple[Size, ...] | None = x.dims
        for _ in range(int(self.r.integers(0, 3))):
            y = self.partner(Value("", x.dtype, dims or ()), x.dtype)
            found = self.broadcast(dims or (), y.dims)
            if found is not None:
                dims, others = found, [*others, y]
        op_type = self.one_of(VARIADIC if x.dtype == FLOAT else VARIADIC[1:])
        self.add(op_type, [y.name for y in others], (x.dtype, dims or ()))

    def comparison(self) -> None:
        x = self.pick(self.floating, *([INT64] if self.chance(0.3) else []))
        self.pair(self.one_of(COMPARISONS), x, self.partner(x, x.dtype), BOOL)

    def logic(self) -> None:
        x = self.pick(BOOL)
        if self.chance(0.3):
            self.add("Not", [x.name], (BOOL, x.dims))
        else:
            self.pair(self.one_of(LOGIC), x, self.partner(x, BOOL), BOOL)

    def is_nan(self) -> None:
        x = self.pick(self.floating)
        self.add("IsNaN", [x.name], (BOOL, x.dims))

    def is_inf(self) -> None:
        x = self.pick(self.floating)
        options = (
            {} if self.chance() else {"detect_positive": int(self.chance()), "detect_negative": int(self.chance())}
        )
        self.add("IsInf", [x.name], (BOOL, x.dims), **options)

    def p_relu(self) -> None:
        x = self.pick(FLOAT)
        slope = self.partner(x, FLOAT)
        if self.opset >= 23 and self.broadcast(x.dims, slope.dims) == x.dims:  # 1.19 makes infinity NaN
            self.add("PRelu", [x.name, slope.name], (FLOAT, x.dims))

    def where(self) -> None:
        x = self.pick(self.floating, *([INT64] if self.chance(0.2) else []))
        c = self.partner(x, BOOL)
        dims = self.broadcast(x.dims, c.dims)
        assert dims is not None
        y = self.partner(Value("", x.dtype, dims), x.dtype)
        found = self.broadcast(dims, y.dims)
        assert found is not None
        self.add("Where", [c.name, x.name, y.name], (x.dtype, found))

    def cast(self) -> None:
        x = self.pick(BOOL, INT64, INT32, self.floating)
        to = self.one_of(
            [BOOL, INT64, INT32, self.floating, FLOAT, DOUBLE]
            if x.dtype in FLOATING
            else [BOOL, INT64, INT32, self.floating]
        )
        self.add("Cast", [x.name], (to, x.dims), to=to)

    def clip(self) -> None:
        x = self.pick(self.floating)
        kind = np.float32 if x.dtype == FLOAT else np.float64
        low, high = (self.constant(np.asarray(n, kind)) for n in (-0.5, 0.75))
        self.add("Clip", [x.name, *self.one_of([[low], [low, high], ["", high], []])], (x.dtype, x.dims))

    def power(self) -> None:
        x = self.pick(self.floating)
        dims: tuple[Size, ...] | None = x.dims
        if self.chance():
            number = self.one_of([0.0, 0.5, 1.0, 2.0, 3.0, -1.0, -0.5, 1.5])
            exponent = self.constant(np.asarray(number, np.float32))
        else:
            y = self.partner(x, self.one_of([FLOAT, DOUBLE, INT64, INT32]))
            exponent, dims = y.name, self.broadcast(x.dims, y.dims)
            assert dims is not None
        self.add("Pow", [x.name, exponent], (x.dtype, dims))

    def reduction(self) -> None:
        x = self.pick(self.floating, where=lambda x: len(x.dims) > 0)
        rank = len(x.dims)
        if not rank or (self.opset < 23 and not self.never_empty(x.dims)):  # onnxruntime 1.19 gives it a wrong shape
            return
        kind = int(self.r.integers(0, 6))
        if kind <= 2:
            axes = list(range(int(self.r.integers(1, rank + 1)) if rank > 1 and kind else rank - 1, rank))
            axes = axes or [rank - 1]
        elif kind == 3:
            axes = list(range(int(self.r.integers(1, rank + 1))))
        elif kind == 4:
            axes = [p for p in range(rank) if p != min(1, rank - 1)] or [0]
        else:
            axes = sorted(set(self.r.integers(0, rank, 2).tolist()))
        keep = self.chance(0.6)
        dims = [1 if p in axes else d for p, d in enumerate(x.dims) if keep or p not in axes]
        reduced = [x.dims[p] for p in axes]
        op_type = self.one_of(REDUCTIONS if self.never_empty(reduced) else REDUCTIONS[:4])
        if op_type in ("ReduceL2", "ReduceProd") and self.opset < 23 and x.dtype == DOUBLE:
            return  # onnxruntime 1.19 has none
        given = [p - (rank if self.chance() else 0) for p in axes]
        self.add(
            op_type,
            [x.name, self.constant(np.array(given))],
            (x.dtype, dims),
            keepdims=int(keep),
        )

    def view(self) -> None:
        x = self.pick(self.floating, BOOL)
        ones = [p for p, d in enumerate(x.dims) if d == 1]
        if ones and self.chance():
            p = self.one_of(ones)
            self.add("Squeeze", [x.name, self.constant(np.array([p]))], (x.dtype, [*x.dims[:p], *x.dims[p + 1 :]]))
        elif len(x.dims) < 5:
            p = int(self.r.integers(0, len(x.dims) + 1))
            dims = [*x.dims[:p], 1, *x.dims[p:]]
            self.add("Unsqueeze", [x.name, self.constant(np.array([p]))], (x.dtype, dims))

    def rows(self) -> None:
        x = self.pick(FLOAT, where=lambda x: len(x.dims) > 0 and self.never_empty(x.dims[-1:]))
        if not x.dims or not self.never_empty(x.dims[-1:]):
            return
        op_type = self.one_of(ROWS if self.opset >= 23 else ROWS[:3])
        axis = self.one_of([-1, len(x.dims) - 1])
        if "Softmax" in op_type:
            self.add(op_type, [x.name], (FLOAT, x.dims), axis=axis)
            return
        scale, shift = (self.new(FLOAT, x.dims[-1:]).name for _ in range(2))
        kept = (FLOAT, [*x.dims[:-1], 1])
        options: dict[str, Any] = {"axis": axis, "epsilon": self.one_of([1e-5, 1e-3])}
        if op_type == "RMSNormalization":
            self.add(op_type, [x.name, scale], (FLOAT, x.dims), **options)
        else:
            inputs = [x.name, scale, *([shift] if self.chance() else [])]
            more = [kept, kept] if self.chance() else []
            self.add(op_type, inputs, (FLOAT, x.dims), *more, **options)

    def grow(self) -> None:
        makers = [
            *[self.unary, self.binary] * 4,
            *[self.reduction, self.rows] * 2,
            *(self.variadic, self.comparison, self.logic, self.is_nan, self.where, self.cast, self.clip),
            *(self.power, self.view, self.is_inf, self.p_relu, self.whole, self.whole),
        ]
        wanted = int(self.r.integers(2, 11))
        while len(self.nodes) < wanted:
            self.one_of(makers)()


@dataclass
class Graph:
    """Hold the parts of a graph, and what they read in each run."""

    parts: list[Part]
    opset: int

    def feeds(self, run: int) -> dict[str, np.ndarray]:
        found = {}
        for part in self.parts:
            for x in part.inputs:
                if x.name in part.used:
                    shape = [d if isinstance(d, int) else part.sizes[d][run] for d in x.dims]
                    found[x.name] = part.numbers(x.dtype, shape, run)
        return found

    def model(self, everything: bool) -> onnx.ModelProto:
        """Return the model; its outputs are all values that nodes compute, or those that no node reads."""
        inputs, outputs, infos = [], [], []
        for part in self.parts:
            inputs += [x for x in part.inputs if x.name in part.used]
            computed = {name for node in part.nodes for name in node.output}
            for x in part.values:
                if x.name in computed:
                    (outputs if everything or x.name not in part.used else infos).append(x)
        nodes = [node for part in self.parts for node in part.nodes]
        return model_of(nodes, inputs, outputs, infos, self.constants(), self.opset)

    def constants(self) -> dict[str, np.ndarray]:
        return {name: array for part in self.parts for name, array in part.constants.items() if name in part.used}

    def apart(self) -> onnx.ModelProto:
        """Return a model with the same nodes, each of which reads inputs of its own: `NODE.INDEX`."""
        types = {x.name: x for part in self.parts for x in part.values}
        nodes, inputs, outputs, constants = [], [], [], {}
        for part in self.parts:
            for node in part.nodes:
                copy = onnx.NodeProto()
                copy.CopyFrom(node)
                for i, name in enumerate(node.input):
                    if not name:
                        continue
                    if name in part.constants:
                        constants[name] = part.constants[name]
                        continue
                    copy.input[i] = f"{node.output[0]}.{i}"
                    inputs.append(Value(copy.input[i], types[name].dtype, types[name].dims))
                nodes.append(copy)
                outputs += [types[name] for name in node.output]
        return model_of(nodes, inputs, outputs, [], constants, self.opset)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    infos: Sequence[Value],
    constants: dict[str, np.ndarray],
    opset: int,
) -> onnx.ModelProto:
    def info(x: Value) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(x.name, x.dtype, x.dims)

    graph = helper.make_graph(
        nodes,
        "clusters",
        [info(x) for x in inputs],
        [info(x) for x in outputs],
        [onnx.numpy_helper.from_array(x, name) for name, x in constants.items()],
        value_info=[info(x) for x in infos],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def grown(seed: int, parts: int, opset: int, runs: int = 3) -> Graph:
    """Return a random graph of independent parts."""
    found = []
    for i in range(parts):
        part = Part(f"p{i}_", np.random.default_rng([seed, i]), opset, runs)
        part.grow()
        found.append(part)
    return Graph(found, opset)
