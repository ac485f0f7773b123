"""Write the C function of a cluster whose rows have few columns: 16 rows at a time, each in a lane of vectors."""

from __future__ import annotations

import functools

from graphopt.targets.native.loops import Loops, VectorLoop, indented, stored_type
from graphopt.targets.native.numbers import ALL, ELEMENT, ROW, Scalar, Store, TaskTotal
from graphopt.targets.native.operators import REDUCTIONS, loaded

_LANES = 16
_BY_ROW, _BY_COLUMN = "l * columns + j", f"j * {_LANES} + l"


class LaneLoops(Loops):
    """Write loops over the lanes within loops over the columns.

    In C, `r_` is a number of each lane's row, and `x_`, `y_` and `s_` are what the rows read, write and leave for later
    loops, column by column: in memory, a lane's next column is next to it, which no vector loads fast.
    """

    @property
    def fits(self) -> bool:
        """Return whether rows are reduced, are short, and are all or none of what each value has."""
        numbers = self.numbers
        axes = [axes for _, axes in numbers.read] + [x.axes for x in numbers.stores]
        rows = set(numbers.rows)
        return (
            numbers.reduces_rows
            and bool(numbers.fixed)
            and all(self.has_whole_rows(each) or rows.isdisjoint(each) for each in axes)
            and all(rows.isdisjoint(total.axes) for total in numbers.totals)
        )

    def function(self) -> list[str]:
        """Return the function `body`; `@` stands for the kernel's name."""
        block = [f"enum {{ columns = {self.numbers.product(self.numbers.columns)} }};"]
        block += [f"{x.ctype} s_{x.name}[columns * {_LANES}];" for x in self.stages.kept]
        block += [*self._before_rows(), *self._row()]
        totals = self.numbers.totals
        task = ", task" if totals else ""
        return [
            f"INLINE void block_@(const args_@ *a, int64_t r, int lanes{', size_t task' if totals else ''}) {{",
            *indented(block),
            "}",
            "",
            self._signature(),
            *indented([*(self._before_rows() if totals else []), *self._totals_start()]),
            "    int64_t r = row0;",
            f"    for (; r + {_LANES} <= row1; r += {_LANES}) block_@(a, r, {_LANES}{task});",
            f"    if (r < row1) block_@(a, r, row1 - r{task});",
            *("}", ""),
        ]

    def _row(self) -> list[str]:
        """Return what is computed of a block of rows."""
        numbers = self.numbers
        lines = []
        for (x, axes), number in numbers.read.items():
            if number.extent is not ALL:
                lines.append(f"const {self._pointer(x, axes, f'restrict p_{number.name}')}")
            if self.is_transposed(number):
                lines.append(f"{number.ctype} x_{number.name}[columns * {_LANES}];")
                element = loaded(x.dtype, f"p_{number.name}[{_BY_ROW}]")
                lines += _transposed(f"x_{number.name}[{_BY_COLUMN}] = {element};")
        of_elements = numbers.stores_of(ELEMENT)
        for store in numbers.stores:
            name = self.names[store.output]
            lines.append(self._pointer(store.output, store.axes, f"restrict q_{name}"))
            if store in of_elements:
                lines.append(f"{stored_type(store.output)} y_{name}[columns * {_LANES}];")
        lines += [f"{x.ctype} r_{x.name}[{_LANES}];" for x in numbers.all if x.extent is ROW and not x.is_read]
        for stage in range(self.stages.count):
            lines += self._rows_of(stage).lines()
            loop = self._columns_of(stage)
            for how, y in self.stages.reduced(stage):
                lines.append(f"for (int l = 0; l < {_LANES}; l++) r_{y.name}[l] = {REDUCTIONS[how][0]};")
            if loop.body:
                lines += ["for (int j = 0; j < columns; j++) {", *indented(loop.lines()), "}"]
        for store in of_elements:
            name = self.names[store.output]
            lines += _transposed(f"q_{name}[{_BY_ROW}] = y_{name}[{_BY_COLUMN}];")
        return lines

    def is_transposed(self, x: Scalar) -> bool:
        """Return whether rows read a number of their own for each column."""
        return x.extent is ELEMENT and x.source is not None and self.has_whole_rows(x.source[1])

    def _rows_of(self, stage: int) -> VectorLoop:
        """Return the loop over the lanes that computes rows' own numbers before a stage, and stores them."""
        loop = self._loop(stage, computes_rows=True)
        for x in self.stages.computed(stage, ROW):
            loop.load(x)
        if stage == self.stages.count - 1:
            of_elements = self.numbers.stores_of(ELEMENT)
            for store in self.numbers.stores:
                if store not in of_elements:
                    place = f"q_{self.names[store.output]}[{'l' if store.axes else '0'}]"
                    loop.store(store.number, place, store.output.dtype)
        for i, total in enumerate(self.numbers.totals):
            if total.operand.extent is not ELEMENT and self.stages.of[total.operand] == stage:
                self._add_lanes(loop, i, total, "0")
        return loop

    def _loop(self, stage: int, computes_rows: bool = False) -> VectorLoop:
        place = functools.partial(self._place, stage, computes_rows=computes_rows)
        return VectorLoop("for (int l = 0; l < lanes; l++)", {ELEMENT, ROW}, place)

    def _place(self, stage: int, x: Scalar, computes_rows: bool = False) -> tuple[str | None, str | None]:
        if x.source is not None:
            place = f"p_{x.name}[{'l' if x.extent is ROW else 'j'}]"
            if self.is_transposed(x):
                return f"x_{x.name}[{_BY_COLUMN}]", None
            return loaded(x.source[0].dtype, place), None
        is_earlier = self.stages.of[x] < stage
        if x.extent is ROW:
            array = f"r_{x.name}[l]"
            is_there = is_earlier or bool(x.reduces) or not computes_rows
        elif x in self.stages.kept:
            array, is_there = f"s_{x.name}[{_BY_COLUMN}]", is_earlier
        else:
            return None, None
        return (array, None) if is_there else (None, array)

    def _output(self, store: Store) -> str:
        return f"y_{self.names[store.output]}[{_BY_COLUMN}]"

    def _reduce_row(self, loop: VectorLoop, how: str, x: Scalar) -> None:
        loop.accumulate(how, x.operands[0], f"r_{x.name}[l]")

    def _add_to_total(self, loop: VectorLoop, i: int, total: TaskTotal) -> None:
        if total.operand.extent is ELEMENT:
            self._add_lanes(loop, i, total, "j" if total.axes else "0")

    def _add_lanes(self, loop: VectorLoop, i: int, total: TaskTotal, place: str) -> None:
        """Reduce a number over the lanes, and take the result into a total."""
        loop.reduce(total.how, total.operand, f"u{i}")
        loop.after.append(REDUCTIONS[total.how][1].format(f"t_{i}[{place}]", f"u{i}"))


def _transposed(statement: str) -> list[str]:
    """Return the loops over rows and columns of a statement that moves a number."""
    return ["for (int l = 0; l < lanes; l++)", f"    for (int j = 0; j < columns; j++) {statement}"]
