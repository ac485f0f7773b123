"""Write the C function that computes some rows of a cluster: loops over the columns within a loop over the rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import onnx_ir as ir

from graphopt.graph.roles import Role, role_of
from graphopt.graph.sizes import sizes_of
from graphopt.graph.values import dtype_of
from graphopt.targets.native.numbers import (
    ALL,
    ELEMENT,
    ROW,
    Extent,
    Numbers,
    Scalar,
    Stages,
    Store,
    TaskTotal,
)
from graphopt.targets.native.operators import REDUCTIONS, STORED_TYPES, loaded, store_statement
from graphopt.targets.native.space import Axes


def stored_type(x: ir.Value) -> str:
    """Return the C type of a value's elements in memory."""
    return STORED_TYPES[dtype_of(x)]


def elements_of(y: ir.Value) -> int:
    """Return the number of a value's elements; 0 if it is not known."""
    return math.prod(size if isinstance(size, int) else 0 for size in sizes_of(y))


def indented(lines: Iterable[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]


@dataclass
class VectorLoop:
    """Collect the statements of a vectorized loop."""

    head: str  # the first line
    varying: Collection[Extent]  # of the numbers that it declares; others are declared before it
    place: Callable[[Scalar], tuple[str | None, str | None]]  # where a number is loaded from, and stored to
    before: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    clauses: str = ""
    around: str = ""  # the first line of a loop around it
    declared: set[Scalar] = field(default_factory=set)

    def load(self, x: Scalar) -> None:
        """Declare a number, and first what it is computed from."""
        if x.extent not in self.varying or x in self.declared:
            return
        self.declared.add(x)
        loaded, stored = self.place(x)
        for operand in x.operands if loaded is None else ():
            self.load(operand)
        self.body.append(f"const {x.ctype} {x.name} = {loaded or x.expression};")
        if stored:
            self.store(x, stored)

    def store(self, x: Scalar, place: str, dtype: ir.DataType | None = None) -> None:
        """Store a number in memory, in an array of its C type or of an element type."""
        self.load(x)
        self.body.append(store_statement(dtype, place, x.name))

    def accumulate(self, how: str, x: Scalar, place: str) -> None:
        """Reduce a number to what lies in memory."""
        self.load(x)
        self.body.append(REDUCTIONS[how][1].format(place, x.name))

    def reduce(self, how: str, x: Scalar, name: str) -> None:
        """Reduce a number to a variable of the loop."""
        start, _, operator = REDUCTIONS[how]
        self.before.append(f"{x.ctype} {name} = {start};")
        self.clauses += f" reduction({operator}:{name})"
        self.accumulate(how, x, name)

    def lines(self) -> list[str]:
        if not self.body:
            return self.before + self.after
        loop = [f"#pragma omp simd{self.clauses}", f"{self.head} {{", *indented(self.body), "}"]
        loop = [f"{self.around} {{", *indented(loop), "}"] if self.around else loop
        return [*self.before, *loop, *self.after]


@dataclass
class Loops:
    """Write the loops of a cluster.

    In C, `p_` is what a row reads of an input, `q_` what it writes of an output, `s_` a row that one loop leaves for
    the next, and `t_` the part of a total that a task sums up.
    """

    numbers: Numbers
    stages: Stages
    names: dict[ir.Value, str]  # the fields of the kernel's arguments that point to inputs and outputs
    is_large: bool = False  # no cache keeps the new state

    element: ClassVar[str] = "j"  # in C, the place of an element in a row of an input or output
    left: ClassVar[str] = "j"  # and in a row that one loop leaves for the next

    @property
    def splits_columns(self) -> bool:
        """Return whether a task may compute some of the columns."""
        return bool(self.numbers.dimensions) and not self.numbers.reduces_rows

    @property
    def has_blocks(self) -> bool:
        """Return whether one loop over blocks of columns reads and writes all elements."""
        return self.splits_columns and self.stages.count == 1

    @functools.cached_property
    def far(self) -> list[Store]:
        """Return the new state that nothing reads in this step, if no cache keeps all of it until the next."""
        if not self.is_large or self.numbers.rows or not self.has_blocks:
            return []
        return [store for store in self.numbers.stores_of(ELEMENT) if self._is_far(store.output)]

    def _is_far(self, y: ir.Value) -> bool:
        is_read = any(use.node not in self.numbers.cluster.nodes for use in y.uses())
        return role_of(y) is Role.NEXT and not is_read and y.dtype == ir.DataType.FLOAT

    def function(self) -> list[str]:
        """Return the function `body`; `@` stands for the kernel's name."""
        scratch = [x for x in self.stages.kept if self._stored(x) is None]
        lines = [f"const int64_t columns = {self.numbers.product(self.numbers.columns)};"]
        lines += [f"{x.ctype} *restrict s_{x.name} = allocate(sizeof({x.ctype}) * columns);" for x in scratch]
        if self.has_blocks and not self.far:
            lines.append("const int fetches = columns >= FETCHED && a->rows * columns >= LEAST_FETCHED;")
            lines.append("const int64_t block = fetches ? FETCHED : columns;")
        lines += [*self._before_rows(), *self._totals_start()]
        row = [*self._row(), *self._next_row()]
        lines += [*self._first_row(), "for (int64_t r = row0; r < row1; r++) {", *indented(row), "}"]
        lines += [f"free(s_{x.name});" for x in scratch]
        lines += ["end_far_stores();"] if self.far else []
        return [self._signature(), *indented(lines), "}", ""]

    def _signature(self) -> str:
        parameters = ["const args_@ *a", "int64_t row0", "int64_t row1"]
        parameters += ["int64_t column0", "int64_t column1"] if self.splits_columns else []
        parameters += ["size_t task"] if self.numbers.totals else []
        wide = "WIDE " if any("_float(" in x.code for x in self.numbers.all) else ""  # it calls functions.h
        return f"static {wide}void body_@({', '.join(parameters)}) {{"

    def _before_rows(self) -> list[str]:
        """Return the numbers that are the same for all rows, and where a task's parts of totals are."""
        lines = [self._constant(x, "0") for x in self.numbers.all if x.extent is ALL]
        for i, total in enumerate(self.numbers.totals):
            lines.append(f"{total.operand.ctype} *restrict t_{i} = a->sum{i} + task * a->length{i};")
        return lines

    def _totals_start(self) -> list[str]:
        """Return the start of a task's parts of totals."""
        return [
            f"for (int64_t i = 0; i < a->length{i}; i++) t_{i}[i] = {REDUCTIONS[total.how][0]};"
            for i, total in enumerate(self.numbers.totals)
        ]

    def _constant(self, x: Scalar, place: str) -> str:
        """Return the declaration of a number that is read at a place, or computed from others."""
        code = x.expression
        if x.source is not None:
            code = loaded(x.source[0].dtype, f"a->{self.names[x.source[0]]}[{place}]")
        return f"const {x.ctype} {x.name} = {code};"

    # --- A row ---

    def _row(self) -> list[str]:
        """Return what is computed of each row: what it reads, its loops and its own numbers by turns, its results."""
        numbers = self.numbers
        lines = []
        for (x, axes), number in numbers.read.items():
            if number.extent is ELEMENT:
                lines.append(f"const {self._pointer(x, axes, f'p_{number.name}')}")
            elif number.extent is ROW:
                lines.append(self._constant(number, self.offset(axes)))
        for store in numbers.stores_of(ELEMENT):
            lines.append(self._pointer(store.output, store.axes, f"q_{self.names[store.output]}"))
        for stage in range(self.stages.count):
            lines += [self._constant(x, "") for x in self.stages.computed(stage, ROW)]
            loop = self._columns_of(stage).lines()
            lines += self._in_blocks(loop) if self.has_blocks else loop
        for store in [*numbers.stores_of(ROW), *numbers.stores_of(ALL)]:
            place = f"a->{self.names[store.output]}[{self.offset(store.axes)}]"
            lines.append(store_statement(store.output.dtype, place, store.number.name))
        return lines

    def _in_blocks(self, loop: list[str]) -> list[str]:
        """Return the loop over all columns around that over a block of them."""
        before, size, after = self._far_block() if self.far else self._fetched_block()
        return [
            "for (int64_t j0 = column0, j1; j0 < column1; j0 = j1) {",
            f"    j1 = j0 + {size} < column1 ? j0 + {size} : column1;",
            *indented([*before, *loop, *after]),
            "}",
        ]

    def _fetched_block(self) -> tuple[list[str], str, list[str]]:
        """Return what comes before a block, its size, and what comes after: the memory of the next block is fetched."""
        places = [f"p_{x.name}" for (_, axes), x in self.numbers.read.items() if self._is_contiguous(x, axes)]
        places += [f"q_{self.names[store.output]}" for store in self.numbers.stores_of(ELEMENT)]
        fetched = [f"if (fetches) fetch_next({place} + j0, sizeof *{place});" for place in places]
        return fetched, "block", []

    def _is_contiguous(self, x: Scalar, axes: Axes) -> bool:
        """Return whether an input's rows lie one after the other."""
        return x.extent is ELEMENT and [*axes] == self.numbers.dimensions

    def _far_block(self) -> tuple[list[str], str, list[str]]:
        """Return what comes before a block, its size, and what comes after: results are stored at once."""
        block, stores = [], []
        for store in self.far:
            name = self.names[store.output]
            is_far = ["columns >= LEAST_FAR"]
            is_far += [f"(void *)a->{name} != a->{self.names[x]}" for x in self.numbers.inputs]
            block.append(f"{stored_type(store.output)} y_{name}[FAR_BLOCK];")
            stores.append(f"store_far(q_{name} + j0, y_{name}, j1 - j0, {' && '.join(is_far)});")
        return block, "FAR_BLOCK", stores

    def _pointer(self, x: ir.Value, axes: Axes, name: str) -> str:
        """Return the declaration of a pointer to a row's first element of an input or output."""
        return f"{stored_type(x)} *{name} = a->{self.names[x]} + {self.offset(axes)};"

    def _row_indices(self) -> list[int]:
        """Return the dimensions of rows along which indices are counted: from the first that some value lacks."""
        rows, axes = self.numbers.rows, [axes for _, axes in self.numbers.read]
        axes += [x.axes for x in self.numbers.stores] + [x.axes for x in self.numbers.totals]
        needed = [rows.index(d) for each in axes if not self.has_whole_rows(each) for d in each if d in rows]
        return [*range(min(needed, default=len(rows)), len(rows))]

    def _first_row(self) -> list[str]:
        """Return the declarations of the first row's indices."""
        rows, size = self.numbers.rows, self.numbers.size
        strides = {i: self.numbers.product(rows[i + 1 :]) for i in self._row_indices()}
        return [
            f"int64_t i{i} = row0 / AT_LEAST_1({stride}) % AT_LEAST_1({size(rows[i])});"
            for i, stride in strides.items()
        ]

    def _next_row(self) -> list[str]:
        """Return the statement that goes on to the next row's indices."""
        step = ""
        for i in self._row_indices():
            step = f"if (++i{i} == {self.numbers.size(self.numbers.rows[i])}) {{ i{i} = 0; {step} }}"
        return [step] if step else []

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

    def _columns_of(self, stage: int) -> VectorLoop:
        """Return the loop that computes the numbers of a stage, with what comes before and after it."""
        loop = self._loop(stage)
        for x in self.stages.computed(stage, ELEMENT):
            loop.load(x)
        for how, x in self.stages.reduced(stage):
            self._reduce_row(loop, how, x)
        for i, total in enumerate(self.numbers.totals):
            if self.stages.of[total.operand] == stage:
                self._add_to_total(loop, i, total)
        for store in self.numbers.stores_of(ELEMENT):
            if self.stages.of.get(store.number, 0) == stage:
                loop.store(store.number, self._output(store), store.output.dtype)
        return loop

    def _loop(self, stage: int) -> VectorLoop:
        first, end = ("column0", "column1") if self.splits_columns else ("0", "columns")
        first, end = ("j0", "j1") if self.has_blocks else (first, end)
        head = f"for (int64_t j = {first}; j < {end}; j++)"
        return VectorLoop(head, {ELEMENT}, functools.partial(self._place, stage))

    def _place(self, stage: int, x: Scalar) -> tuple[str | None, str | None]:
        """Return where a loop finds a number, and where it leaves it for later ones."""
        if x.source is not None:
            return loaded(x.source[0].dtype, f"p_{x.name}[{self.element}]"), None
        if x not in self.stages.kept:
            return None, None
        stored, computed = self._stored(x), self.stages.of[x]
        kept = f"{stored}[{self.element}]" if stored else f"s_{x.name}[{self.left}]"
        return kept if computed < stage else None, kept if computed == stage and not stored else None

    def _stored(self, x: Scalar) -> str | None:
        """Return the row of an output that holds a number as it is."""
        for store in self.numbers.stores_of(ELEMENT):
            if store.number is x and stored_type(store.output) == x.ctype:
                return f"q_{self.names[store.output]}"
        return None

    def _output(self, store: Store) -> str:
        """Return where a loop stores a number of an output."""
        if store in self.far:
            return f"y_{self.names[store.output]}[j - j0]"
        return f"q_{self.names[store.output]}[{self.element}]"

    def _reduce_row(self, loop: VectorLoop, how: str, x: Scalar) -> None:
        """Reduce a number along the row."""
        loop.reduce(how, x.operands[0], x.name)

    def _add_to_total(self, loop: VectorLoop, i: int, total: TaskTotal) -> None:
        """Take a number into a total: for each column, along the row first, or once a row."""
        offset, x = self.offset(total.axes), total.operand
        if any(d in self.numbers.columns for d in total.axes):
            loop.accumulate(total.how, x, f"t_{i}[j]" if offset == "0" else f"t_{i}[{offset} + j]")
        else:
            if x.extent is ELEMENT:
                loop.reduce(total.how, x, f"u{i}")
            name = f"u{i}" if x.extent is ELEMENT else x.name
            loop.after.append(REDUCTIONS[total.how][1].format(f"t_{i}[{offset}]", name))
