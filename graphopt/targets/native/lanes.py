"""Write the C function of a cluster whose rows have few columns: 16 rows at a time, each in a lane of vectors."""

from __future__ import annotations

from graphopt.targets.native.loops import Loops, indented, stored_type
from graphopt.targets.native.numbers import ALL, ELEMENT, ROW, Number, Total
from graphopt.targets.native.operators import REDUCTIONS

LANES = 16
MOST_COLUMNS = 31  # with 32 and more, vectors along the rows are faster
BY_ROW, BY_COLUMN = "l * columns + j", f"j * {LANES} + l"


class LaneLoops(Loops):
    """Write loops over the lanes within loops over the columns.

    In C, `r_` is a number of each lane's row, and `x_`, `y_` and `s_` are what the rows read, write and leave for later
    loops, column by column: in memory, a lane's next column is next to it, which no vector loads fast.
    """

    @property
    def fits(self) -> bool:
        """Return whether rows are reduced, are short, and are all or none of what each value has."""
        numbers = self.numbers
        sizes = [numbers.cluster.space.sizes[d] for d in numbers.columns]
        count = 1
        for size in sizes:
            count *= size if isinstance(size, int) else MOST_COLUMNS + 1
        axes = [axes for _, axes in numbers.read] + [x.axes for x in numbers.stores]
        rows = set(numbers.rows)
        return (
            numbers.reduces_rows
            and count <= MOST_COLUMNS
            and all(self.has_whole_rows(one) or rows.isdisjoint(one) for one in axes)
            and all(rows.isdisjoint(total.axes) for total in numbers.totals)
        )

    def function(self) -> list[str]:
        """Return the function `body`; `@` stands for the kernel's name."""
        columns = self.numbers.product(self.numbers.columns)
        block = [f"enum {{ columns = {columns} }};"]
        block += [f"{x.ctype} s_{x.name}[columns * {LANES}];" for x in self.stages.kept]
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
            f"    for (; r + {LANES} <= row1; r += {LANES}) block_@(a, r, {LANES}{task});",
            f"    if (r < row1) block_@(a, r, row1 - r{task});",
            *("}", ""),
        ]

    def _row(self) -> list[str]:
        numbers = self.numbers
        lines = []
        for (x, axes), number in numbers.read.items():
            if number.extent != ALL:
                start = f"a->{self.names[x]} + {self.offset(axes)}"
                lines.append(f"const {stored_type(x)} *restrict p_{number.name} = {start};")
            if self.is_turned(number):
                lines.append(f"{number.ctype} x_{number.name}[columns * {LANES}];")
                lines += _turned(f"x_{number.name}[{BY_COLUMN}] = p_{number.name}[{BY_ROW}];")
        for store in numbers.stores:
            name = self.names[store.output]
            start = f"a->{name} + {self.offset(store.axes)}"
            lines.append(f"{stored_type(store.output)} *restrict q_{name} = {start};")
            if store in self._stores(ELEMENT):
                lines.append(f"{store.number.ctype} y_{name}[columns * {LANES}];")
        lines += [f"{x.ctype} r_{x.name}[{LANES}];" for x in numbers.all if x.extent == ROW and not x.is_read]
        for stage in range(self.stages.count):
            lines += self._rows_of(stage)
            lines += self._columns_of(stage)
        for store in self._stores(ELEMENT):
            name = self.names[store.output]
            lines += _turned(f"q_{name}[{BY_ROW}] = y_{name}[{BY_COLUMN}];")
        return lines

    def is_turned(self, x: Number) -> bool:
        """Return whether rows read a number of their own for each column."""
        return x.extent == ELEMENT and x.source is not None and self.has_whole_rows(x.source[1])

    def _rows_of(self, stage: int) -> list[str]:
        """Return the loops over the lanes that compute rows' own numbers before a stage, and put them away."""
        loop = _Lanes(self, stage, computes_rows=True)
        after = []
        for x in self.numbers.all:
            if x.extent == ROW and x.code and self.stages.of[x] == stage:
                loop.need(x)
        last = stage == self.stages.count - 1
        for store in self.numbers.stores if last else []:
            if store not in self._stores(ELEMENT):
                loop.need(store.number)
                at = "l" if store.axes else "0"
                loop.body.append(f"q_{self.names[store.output]}[{at}] = {store.number.name};")
        for i, total in enumerate(self.numbers.totals):
            x = total.operand
            if x.extent != ELEMENT and self.stages.of[x] == stage:
                loop.need(x)
                after += self._total_of_lanes(i, total, loop, "0")
        return [*loop.lines(), *after]

    def _columns_of(self, stage: int) -> list[str]:
        """Return the loop over columns that computes the numbers of elements of a stage."""
        loop = _Lanes(self, stage)
        before: list[str] = []
        each: list[str] = []
        for x in self.numbers.all:
            if x.extent == ELEMENT and not x.is_read and self.stages.of[x] == stage:
                loop.need(x)
        for x in self.numbers.all:
            if x.reduces and self.stages.of[x] == stage + 1:
                start, step, _ = REDUCTIONS[x.reduces]
                before.append(f"for (int l = 0; l < {LANES}; l++) r_{x.name}[l] = {start};")
                loop.need(x.operands[0])
                loop.body.append(step.format(f"r_{x.name}[l]", x.operands[0].name))
        for i, total in enumerate(self.numbers.totals):
            x = total.operand
            if x.extent == ELEMENT and self.stages.of[x] == stage:
                loop.need(x)
                each += self._total_of_lanes(i, total, loop, "j" if total.axes else "0")
        for store in self._stores(ELEMENT):
            if self.stages.of.get(store.number, 0) == stage:
                loop.need(store.number)
                loop.body.append(f"y_{self.names[store.output]}[{BY_COLUMN}] = {store.number.name};")
        if not loop.body:
            return before
        inner = indented([*loop.lines(), *each])
        return [*before, "for (int j = 0; j < columns; j++) {", *inner, "}"]

    def _total_of_lanes(self, i: int, total: Total, loop: _Lanes, place: str) -> list[str]:
        """Sum a number up over the lanes in a loop; return the statement that takes the sum into a total."""
        start, step, operator = REDUCTIONS[total.how]
        loop.before.append(f"{total.operand.ctype} u{i} = {start};")
        loop.clauses.append(f" reduction({operator}:u{i})")
        loop.body.append(step.format(f"u{i}", total.operand.name))
        return [step.format(f"t_{i}[{place}]", f"u{i}")]


def _turned(statement: str) -> list[str]:
    """Return the loops over rows and columns of a statement that moves a number."""
    return ["for (int l = 0; l < lanes; l++)", f"    for (int j = 0; j < columns; j++) {statement}"]


class _Lanes:
    """Collect the statements of one loop over the lanes."""

    def __init__(self, loops: LaneLoops, stage: int, computes_rows: bool = False) -> None:
        self.loops, self.stage, self.computes_rows = loops, stage, computes_rows
        self.before: list[str] = []
        self.body: list[str] = []
        self.clauses: list[str] = []
        self._there: set[Number] = set()

    def need(self, x: Number) -> None:
        """Declare a number of a lane and what it is computed from."""
        if x.extent == ALL or x in self._there:
            return
        self._there.add(x)
        if x.source is not None:
            place = f"p_{x.name}[{'l' if x.extent == ROW else 'j'}]"
            turned = f"x_{x.name}[{BY_COLUMN}]"
            self.body.append(f"const {x.ctype} {x.name} = {turned if self.loops.is_turned(x) else place};")
            return
        earlier = self.loops.stages.of[x] < self.stage
        if x.extent == ROW:
            array = f"r_{x.name}[l]"
            is_there = earlier or bool(x.reduces) or not self.computes_rows
        else:
            array = f"s_{x.name}[{BY_COLUMN}]" if x in self.loops.stages.kept else ""
            is_there = earlier and bool(array)
        if is_there:
            self.body.append(f"const {x.ctype} {x.name} = {array};")
            return
        for operand in x.operands:
            self.need(operand)
        self.body.append(f"const {x.ctype} {x.name} = {x.expression};")
        if array and not earlier:
            self.body.append(f"{array} = {x.name};")

    def lines(self) -> list[str]:
        if not self.body:
            return []
        return [
            *self.before,
            f"#pragma omp simd{''.join(self.clauses)}",
            "for (int l = 0; l < lanes; l++) {",
            *indented(self.body),
            "}",
        ]
