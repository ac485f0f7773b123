"""Write the C function that computes some rows of a cluster: loops over the columns within a loop over the rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.targets.native.numbers import ALL, ELEMENT, ROW, Number, Numbers, Store, Total
from graphopt.targets.native.operators import REDUCTIONS, STORED
from graphopt.targets.native.space import Axes
from graphopt.targets.native.stages import Stages


def stored_type(x: ir.Value) -> str:
    """Return the C type of a value's elements in memory."""
    assert x.dtype is not None
    return STORED[x.dtype]


def indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


@dataclass
class Loops:
    """Write the loops of a cluster.

    In C, `p_` is what a row reads of an input, `q_` what it writes of an output, `s_` a row that one loop leaves for
    the next, and `t_` the part of a total that a task sums up.

    Args:
        names: the fields of the kernel's arguments that point to inputs and outputs.
    """

    numbers: Numbers
    stages: Stages
    names: dict[ir.Value, str]

    @property
    def splits_columns(self) -> bool:
        """Return whether a task may compute some of the columns."""
        return bool(self.numbers.dimensions) and not self.numbers.reduces_rows

    def function(self) -> list[str]:
        """Return the function `body`; `@` stands for the kernel's name."""
        scratch = [x for x in self.stages.kept if self._stored(x) is None]
        lines = [f"const int64_t columns = {self.numbers.product(self.numbers.columns)};"]
        lines += [f"{x.ctype} *restrict s_{x.name} = allocate(sizeof({x.ctype}) * columns);" for x in scratch]
        lines += [*self._before_rows(), *self._totals_start()]
        lines += ["for (int64_t r = row0; r < row1; r++) {", *indented(self._row()), "}"]
        lines += [f"free(s_{x.name});" for x in scratch]
        return [self._signature(), *indented(lines), "}", ""]

    def _signature(self) -> str:
        parameters = ["const args_@ *a", "int64_t row0", "int64_t row1"]
        parameters += ["int64_t column0", "int64_t column1"] if self.splits_columns else []
        parameters += ["size_t task"] if self.numbers.totals else []
        wide = "WIDE " if self.numbers.calls_functions else ""
        return f"static {wide}void body_@({', '.join(parameters)}) {{"

    def _before_rows(self) -> list[str]:
        """Return the numbers that are one for all rows, and where a task's parts of totals are."""
        lines = [self._constant(x, "0") for x in self.numbers.all if x.extent == ALL]
        for i, total in enumerate(self.numbers.totals):
            lines.append(f"{total.operand.ctype} *restrict t_{i} = a->sum{i} + task * a->length{i};")
        return lines

    def _totals_start(self) -> list[str]:
        """Return the start of a task's parts of totals."""
        return [
            f"for (int64_t i = 0; i < a->length{i}; i++) t_{i}[i] = {REDUCTIONS[total.how][0]};"
            for i, total in enumerate(self.numbers.totals)
        ]

    def _constant(self, x: Number, place: str) -> str:
        """Return the declaration of a number that is read at a place, or computed from others."""
        code = x.expression if x.source is None else f"a->{self.names[x.source[0]]}[{place}]"
        return f"const {x.ctype} {x.name} = {code};"

    # --- A row ---

    def _row(self) -> list[str]:
        """Return what is computed of each row: what it reads, its loops and its own numbers by turns, its results."""
        numbers = self.numbers
        axes = (
            [axes for _, axes in numbers.read]
            + [x.axes for x in numbers.stores]
            + [x.axes for x in numbers.totals]
        )
        lines = self._row_indices(axes)
        for (x, axes_of_x), number in numbers.read.items():
            if number.extent == ELEMENT:
                start = f"a->{self.names[x]} + {self.offset(axes_of_x)}"
                lines.append(f"const {stored_type(x)} *p_{number.name} = {start};")
            elif number.extent == ROW:
                lines.append(self._constant(number, self.offset(axes_of_x)))
        for store in self._stores(ELEMENT):
            name = self.names[store.output]
            start = f"a->{name} + {self.offset(store.axes)}"
            lines.append(f"{stored_type(store.output)} *q_{name} = {start};")
        for stage in range(self.stages.count):
            lines += [
                self._constant(x, "")
                for x in numbers.all
                if x.extent == ROW and self.stages.of[x] == stage and x.code
            ]
            lines += self._loop(stage)
        for store in [*self._stores(ROW), *self._stores(ALL)]:
            lines.append(f"a->{self.names[store.output]}[{self.offset(store.axes)}] = {store.number.name};")
        return lines

    def _stores(self, extent: str) -> list[Store]:
        """Return the outputs that vary as numbers of an extent do."""
        columns = set(self.numbers.columns)

        def extent_of(store: Store) -> str:
            return ELEMENT if columns and columns <= set(store.axes) else ROW if store.axes else ALL

        return [store for store in self.numbers.stores if extent_of(store) == extent]

    def _row_indices(self, axes: Iterable[Axes]) -> list[str]:
        """Return the declarations of a row's indices along the dimensions that some value lacks."""
        rows = self.numbers.rows
        needed = {d for one in axes if not self.has_whole_rows(one) for d in one if d in rows}
        return [
            f"const int64_t i{i} = r / ({self.numbers.product(rows[i + 1 :])}) % {self.numbers.size(d)};"
            for i, d in enumerate(rows)
            if d in needed
        ]

    def has_whole_rows(self, axes: Axes) -> bool:
        return [d for d in axes if d in self.numbers.rows] == self.numbers.rows

    def offset(self, axes: Axes) -> str:
        """Return the index of a row's first element in a tensor with some of the dimensions."""
        rows = self.numbers.rows
        row = ""
        if self.has_whole_rows(axes):
            row = "r" if rows else ""
        else:
            for d in axes:
                if d in rows:
                    i = f"i{rows.index(d)}"
                    row = f"({row} * {self.numbers.size(d)} + {i})" if row else i
        if not row:
            return "0"
        return f"{row} * columns" if any(d in self.numbers.columns for d in axes) else row

    # --- A loop over the columns ---

    def _loop(self, stage: int) -> list[str]:
        """Return the loop that computes the numbers of a stage, with what comes before and after it."""
        loop = _Loop(self, stage)
        for x in self.numbers.all:
            if x.extent == ELEMENT and not x.is_read and self.stages.of[x] == stage:
                loop.need(x)
        for x in self.numbers.all:
            if x.reduces and self.stages.of[x] == stage + 1:
                loop.reduce(x.reduces, x.name, x.operands[0])
        for i, total in enumerate(self.numbers.totals):
            if self.stages.of[total.operand] == stage:
                loop.add_to_total(i, total)
        for store in self._stores(ELEMENT):
            if self.stages.of.get(store.number, 0) == stage:
                loop.need(store.number)
                loop.body.append(f"q_{self.names[store.output]}[j] = {store.number.name};")
        return loop.lines()

    def _stored(self, x: Number) -> str | None:
        """Return the row of an output that holds a number as it is."""
        for store in self._stores(ELEMENT):
            if store.number is x and stored_type(store.output) == x.ctype:
                return f"q_{self.names[store.output]}"
        return None

    def kept(self, x: Number) -> str | None:
        """Return the row in which later loops find a number; None if they compute it again."""
        return (self._stored(x) or f"s_{x.name}") if x in self.stages.kept else None


class _Loop:
    """Collect the statements of one loop over the columns."""

    def __init__(self, loops: Loops, stage: int) -> None:
        self.loops, self.stage = loops, stage
        self.before: list[str] = []
        self.body: list[str] = []
        self.after: list[str] = []
        self._clauses: list[str] = []
        self._there: set[Number] = set()

    def need(self, x: Number) -> None:
        """Declare a number of an element and what it is computed from."""
        if x.extent != ELEMENT or x in self._there:
            return
        self._there.add(x)
        kept = self.loops.kept(x)
        if x.source is not None:
            code = f"p_{x.name}[j]"
        elif kept and self.loops.stages.of[x] < self.stage:
            code = f"{kept}[j]"
        else:
            for operand in x.operands:
                self.need(operand)
            code = x.expression
        self.body.append(f"const {x.ctype} {x.name} = {code};")
        if kept == f"s_{x.name}" and self.loops.stages.of[x] == self.stage:
            self.body.append(f"{kept}[j] = {x.name};")

    def reduce(self, how: str, name: str, operand: Number) -> None:
        """Reduce a number along the row."""
        start, step, operator = REDUCTIONS[how]
        self.need(operand)
        self.before.append(f"{operand.ctype} {name} = {start};")
        self.body.append(step.format(name, operand.name))
        self._clauses.append(f" reduction({operator}:{name})")

    def add_to_total(self, i: int, total: Total) -> None:
        """Take a number into a total: for each column, along the row first, or once a row."""
        step, columns = REDUCTIONS[total.how][1], self.loops.numbers.columns
        place = f"t_{i}[{self.loops.offset(total.axes)}]"
        if any(d in columns for d in total.axes):
            offset = self.loops.offset(total.axes)
            place = f"t_{i}[j]" if offset == "0" else f"t_{i}[{offset} + j]"
            self.need(total.operand)
            self.body.append(step.format(place, total.operand.name))
        elif total.operand.extent == ELEMENT:
            self.reduce(total.how, f"u{i}", total.operand)
            self.after.append(step.format(place, f"u{i}"))
        else:
            self.after.append(step.format(place, total.operand.name))

    def lines(self) -> list[str]:
        if not self.body:
            return self.before + self.after
        first, end = ("column0", "column1") if self.loops.splits_columns else ("0", "columns")
        return [
            *self.before,
            f"#pragma omp simd{''.join(self._clauses)}",
            f"for (int64_t j = {first}; j < {end}; j++) {{",
            *indented(self.body),
            "}",
            *self.after,
        ]
