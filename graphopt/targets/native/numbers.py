"""Turn the nodes of a cluster into numbers, what is read and expressions of other numbers, and schedule them.

A row is passed over several times if numbers need the sum of the whole row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import onnx_ir as ir

from graphopt.graph.operators import CHOOSING
from graphopt.graph.values import dtype_of
from graphopt.targets.native.clusters import Cluster, leaves
from graphopt.targets.native.forms import NodeForm, NodeKind, ctype_of, number_of, operands_of
from graphopt.targets.native.operators import (
    FLOATING,
    FOLDED,
    REDUCING,
    ROUNDED,
    cast,
    expression,
    in_type,
    literal,
    power,
)
from graphopt.targets.native.space import Axes, varying

# Columns that a loop has at most if the compiler is to know how many, which is faster; other sizes are not in the code.
MOST_FIXED_COLUMNS = 31


class Extent(IntEnum):
    """What a number belongs to: an element, a row, or the whole kernel."""

    ELEMENT, ROW, ALL = range(3)


ELEMENT, ROW, ALL = Extent


@dataclass(eq=False)
class Scalar:
    """A number of each element, of each row, or of the whole kernel."""

    name: str  # its variable in C, or a literal
    ctype: str
    extent: Extent
    code: str = ""  # its expression, with operands in braces
    operands: tuple[Scalar, ...] = ()
    reduces: str | None = None  # how it is reduced from the operand along a row, as in `operators.REDUCTIONS`
    source: tuple[ir.Value, Axes] | None = None  # the value that it is read from, and that value's dimensions

    @property
    def expression(self) -> str:
        return self.code.format(*(x.name for x in self.operands))

    @property
    def is_read(self) -> bool:
        """Return whether the number is read or a literal, not computed."""
        return not self.code and not self.reduces

    @functools.cached_property
    def is_cut(self) -> bool:
        """Return whether the number is computed from floating ones."""
        return any(y.ctype in FLOATING or y.is_cut for y in self.operands)


@dataclass(frozen=True)
class TaskTotal:
    """A reduction over all tasks."""

    how: str  # the reduction, as `operators.REDUCTIONS` names it
    operand: Scalar
    output: ir.Value
    axes: tuple[int, ...]  # the dimensions that the output varies over
    after: str  # what becomes of the reduced number, with it in braces


@dataclass(frozen=True)
class Store:
    """A number that becomes an output."""

    output: ir.Value
    number: Scalar
    axes: Axes


@dataclass
class Numbers:
    """Hold the numbers of a cluster, in an order in which they can be computed.

    Attributes:
        fixed: the sizes that the code of the kernel contains; others come from the shapes of its inputs, so that
            clusters of other sizes have the same code.
    """

    cluster: Cluster
    all: list[Scalar] = field(default_factory=list)
    read: dict[tuple[ir.Value, Axes], Scalar] = field(default_factory=dict)
    totals: list[TaskTotal] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dimensions = self.cluster.space.dimensions
        split = self.cluster.split()
        assert split is not None
        self.rows, self.columns = split
        sizes = self.cluster.space.sizes
        columns = [size for d in self.columns if isinstance(size := sizes[d], int)]
        are_known = len(columns) == len(self.columns) and bool(self.rows) and not self.cluster.has_channels
        self.fixed = {*columns} if are_known and math.prod(columns) <= MOST_FIXED_COLUMNS else set()
        self._same: dict[tuple[str, str, tuple[Scalar, ...]], Scalar] = {}
        self._of: dict[ir.Value, Scalar] = {}
        for node, form in self.cluster.nodes.items():
            self._compute(node, form)
        self.stores = [
            Store(y, number, varying(self.cluster.axes[y]))
            for y, number in self._of.items()
            if leaves(y, self.cluster.nodes)
        ]

    @property
    def inputs(self) -> list[ir.Value]:
        return list(dict.fromkeys(x for x, _ in self.read))

    @property
    def outputs(self) -> list[ir.Value]:
        return [store.output for store in self.stores] + [total.output for total in self.totals]

    def stores_of(self, extent: Extent) -> list[Store]:
        """Return the outputs that vary as numbers of an extent do."""
        return [store for store in self.stores if self._extent(store.axes) is extent]

    def _extent(self, axes: Axes) -> Extent:
        """Return what the numbers of a tensor belong to."""
        columns = set(self.columns)
        return ELEMENT if columns and columns <= set(axes) else ROW if axes else ALL

    @property
    def reduces_rows(self) -> bool:
        """Return whether a number of a row needs all its columns."""
        return any(x.reduces for x in self.all)

    def size(self, dimension: int) -> str:
        """Return the size of a dimension in C: a number if it is fixed, else a field of the kernel's arguments."""
        size = self.cluster.space.sizes[dimension]
        return str(size) if size in self.fixed else f"a->n{self.dimensions.index(dimension)}"

    def product(self, dimensions: Sequence[int]) -> str:
        return " * ".join(map(self.size, dimensions)) or "1"

    # --- New numbers ---

    def _new(self, x: Scalar) -> Scalar:
        """Name and add a number."""
        x.name = f"v{len(self.all)}"
        self.all.append(x)
        return x

    def _map(self, code: str, ctype: str, *operands: Scalar) -> Scalar:
        """Return the number of an expression, the same one for the same expression."""
        if code == "{0}" and operands[0].ctype == ctype:
            return operands[0]
        key = (code, ctype, operands)
        if key not in self._same:
            extent = min((x.extent for x in operands), default=ALL)
            self._same[key] = self._new(Scalar("", ctype, extent, code, operands))
        return self._same[key]

    def _reduced(self, how: str, operand: Scalar) -> Scalar:
        """Return the number that a row's elements reduce to."""
        return self._new(Scalar("", operand.ctype, ROW, operands=(operand,), reduces=how))

    def _literal(self, code: str, ctype: str) -> Scalar:
        return self._same.setdefault((code, ctype, ()), Scalar(code, ctype, ALL))

    def _operand(self, node: ir.Node, index: int, x: ir.Value) -> Scalar:
        if x in self._of:
            return self._of[x]
        ctype, constant = ctype_of(x), number_of(x)
        if constant is not None:
            return self._literal(literal(constant, ctype), ctype)
        axes = varying(self.cluster.read[node, index])
        if (x, axes) not in self.read:
            self.read[x, axes] = self._new(Scalar("", ctype, self._extent(axes), source=(x, axes)))
        return self.read[x, axes]

    # --- Nodes ---

    def _compute(self, node: ir.Node, form: NodeForm) -> None:
        """Add the numbers of a node's outputs."""
        operands = {i: self._operand(node, i, x) for i, x in operands_of(node, form).items()}
        xs, y = list(operands.values()), node.outputs[0]
        if form.kind is NodeKind.VIEW:
            self._of[y] = xs[0]
            return
        if form.kind is NodeKind.REDUCE:
            self._reduce(node, form, xs[0])
        elif form.kind is NodeKind.ROWS:
            results = self._softmax(node, xs) if len(xs) == 1 else self._normalization(node, form, xs)
            self._of.update(zip(node.outputs, results, strict=False))
        elif node.op_type == "Clip":
            self._of[y] = self._clipped(operands)
        elif node.op_type in FOLDED:
            ctype = ctype_of(y)
            step, after = (in_type(part, ctype) for part in FOLDED[node.op_type])
            result = functools.reduce(functools.partial(self._map, step, ctype), xs)
            self._of[y] = self._map(after.replace("{N}", str(len(xs))), ctype, result)
        else:
            self._of[y] = self._map(self._expression(node, form, xs), ctype_of(y), *xs)
        if (rounded := ROUNDED.get(dtype_of(y))) and y in self._of and node.op_type not in CHOOSING:
            self._of[y] = self._map(rounded, ctype_of(y), self._of[y])

    def _expression(self, node: ir.Node, form: NodeForm, xs: Sequence[Scalar]) -> str:
        y = node.outputs[0]
        if node.op_type == "Cast":
            return cast(dtype_of(y), xs[0].ctype, xs[0].is_cut)
        if node.op_type == "Pow":
            return power(number_of(node.inputs[1]), ctype_of(y))
        code = expression(node.op_type, ctype_of(y), xs[0].ctype, form.attributes)
        assert code is not None
        return code

    def _clipped(self, operands: dict[int, Scalar]) -> Scalar:
        """Bound a number; a missing bound is the type's largest finite number, as in the runtime."""
        ctype = operands[0].ctype
        largest = "FLT_MAX" if ctype == "float" else "DBL_MAX"
        low = operands.get(1, self._literal(f"-{largest}", ctype))
        high = operands.get(2, self._literal(largest, ctype))
        bounded = self._map("{0} < {1} ? {1} : {0}", ctype, operands[0], low)
        return self._map("{0} > {1} ? {1} : {0}", ctype, bounded, high)

    def _reduce(self, node: ir.Node, form: NodeForm, x: Scalar) -> None:
        y, axes = node.outputs[0], self.cluster.read[node, 0]
        reduced = varying([axes[p] for p in form.reduced])
        before, how, after = (in_type(part, x.ctype) for part in REDUCING[node.op_type])
        after = after.replace("{N}", self.product(reduced))
        term = self._map(before, x.ctype, x)
        if y in self.cluster.totals:
            after = ROUNDED.get(dtype_of(y), "{0}").replace("{0}", after)
            self.totals.append(TaskTotal(how, term, y, varying(self.cluster.axes[y]), after))
        else:
            total = self._reduced(how, term) if reduced else term
            self._of[y] = self._map(after, x.ctype, total)

    # --- Operators that are computed row by row, in float32 ---

    def _softmax(self, node: ir.Node, xs: Sequence[Scalar]) -> list[Scalar]:
        shifted = self._map("{0} - {1}", "float", xs[0], self._reduced("largest number", xs[0]))
        power = self._map("exp_negative_float({0})", "float", shifted)
        total = self._reduced("sum", power)
        if node.op_type == "LogSoftmax":
            return [self._map("{0} - {1}", "float", shifted, self._map("log_float({0})", "float", total))]
        return [self._map("{0} * {1}", "float", power, self._map("1 / {0}", "float", total))]

    def _normalization(self, node: ir.Node, form: NodeForm, xs: Sequence[Scalar]) -> list[Scalar]:
        """Return the normalized number, and of LayerNormalization the mean and the inverse deviation."""
        mean_of = f"{{0}} / (float)({self.product(self.columns)})"
        epsilon = literal(float(form.attributes["epsilon"]), "float")
        centered, moments = xs[0], []
        if node.op_type == "LayerNormalization":
            moments = [self._map(mean_of, "float", self._reduced("sum", xs[0]))]
            centered = self._map("{0} - {1}", "float", xs[0], moments[0])
        squares = self._reduced("sum", self._map("{0} * {0}", "float", centered))
        inverse = self._map(f"1 / sqrtf({mean_of} + {epsilon})", "float", squares)
        normal = self._map("{0} * {1}", "float", centered, inverse)
        y = self._map("{0} * {1}", "float", normal, xs[1])
        if len(xs) > 2:
            y = self._map("{0} + {1}", "float", y, xs[2])
        return [y, *moments, inverse]


@dataclass
class Stages:
    """Assign each number to a loop over the columns; later loops compute again the numbers that are not kept."""

    of: dict[Scalar, int] = field(default_factory=dict)  # a row's number: before that loop
    kept: list[Scalar] = field(default_factory=list)  # of elements, which a loop leaves for later ones

    @property
    def count(self) -> int:
        return max(self.of.values(), default=0) + 1

    def computed(self, stage: int, extent: Extent) -> list[Scalar]:
        """Return the numbers of an extent whose expressions belong to a loop, or come before it."""
        return [x for x, at in self.of.items() if at == stage and x.extent is extent and x.code]

    def reduced(self, stage: int) -> list[tuple[str, Scalar]]:
        """Return the reductions of a loop, and the numbers that they give."""
        return [(x.reduces, x) for x, at in self.of.items() if at == stage + 1 and x.reduces]


def scheduled(numbers: Numbers) -> Stages:
    """Return the stages of numbers: each is computed as late as its readers allow, if that needs nothing kept."""
    stages = Stages()
    for x in numbers.all:
        known = max((stages.of.get(operand, 0) for operand in x.operands), default=0)
        stages.of[x] = known + 1 if x.reduces else known
    readers: dict[Scalar, list[Scalar]] = {}
    for x in numbers.all:
        for operand in x.operands:
            readers.setdefault(operand, []).append(x)
    results = {store.number for store in numbers.stores} | {total.operand for total in numbers.totals}
    computed = [x for x in _elements(numbers.all) if not x.is_read]
    for x in reversed(computed):
        late = min(_uses(stages, readers.get(x, [])), default=0)
        if x not in results and late > stages.of[x] and all(y.is_read for y in _elements(x.operands)):
            stages.of[x] = late
    for x in computed:
        crosses = max(_uses(stages, readers.get(x, [])), default=0) > stages.of[x]
        is_there = all(y.is_read or y in stages.kept for y in _elements(x.operands))
        is_cheap = is_there and not any(sign in x.code for sign in "/(")  # no function, no division
        if crosses and not is_cheap:
            stages.kept.append(x)
    return stages


def _uses(stages: Stages, readers: Iterable[Scalar]) -> list[int]:
    """Return the loops that read a number."""
    return [stages.of[x] - 1 if x.reduces else stages.of[x] for x in readers]


def _elements(numbers: Iterable[Scalar]) -> list[Scalar]:
    return [x for x in numbers if x.extent is ELEMENT]
