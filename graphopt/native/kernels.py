"""Write a cluster as a C function, and as the operator that a session calls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from graphopt.graph.values import constant_of
from graphopt.native.clusters import Axes, Cluster, Form, Size, operands_of, sizes_of
from graphopt.native.operators import CTYPES, REDUCING, REDUCTIONS, expression, literal

GRAIN = 16384  # elements of a task
MOST_TASKS = 16  # of a kernel that sums over tasks, each of which has sums of its own


@dataclass(frozen=True)
class Kernel:
    """A C function with the values that it reads and writes, in order."""

    name: str
    code: str
    inputs: tuple[ir.Value, ...]
    outputs: tuple[ir.Value, ...]
    header: str = "functions.h"


@dataclass
class Variable:
    """A number of an element (`full`), of a row (`row`), or of the whole cluster (`once`)."""

    name: str
    ctype: str
    kind: str
    code: str
    operands: tuple[Variable, ...] = ()
    stage: int = (
        0  # the loop over columns that computes it; of a row's number, the loop before which it is known
    )
    loads: bool = False
    reduces: str | None = None
    scratch: int | None = None


@dataclass
class _Total:
    kind: str
    operand: Variable
    output: ir.Value
    axes: Axes
    scale: str


@dataclass
class Writer:
    """Write one cluster."""

    cluster: Cluster
    versions: dict[str, int]
    inputs: dict[tuple[ir.Value, Axes], Variable] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    values: dict[ir.Value, Variable] = field(default_factory=dict)
    totals: list[_Total] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = list(self.cluster.sizes)
        split = self.cluster.outer()
        assert split is not None
        self.rows, self.columns = self.order[:split], self.order[split:]

    def kernel(self) -> Kernel:
        """Return the kernel."""
        for node, form in self.cluster.nodes.items():
            self._emit(node, form)
        stores = [
            (y, self.values[y], self.cluster.axes[y])
            for node in self.cluster.nodes
            for y in node.outputs
            if y not in self.cluster.totals and self._leaves(y)
        ]
        totals = self.totals
        inputs = list(dict.fromkeys(value for value, _ in self.inputs))
        outputs = [y for y, _, _ in stores] + [total.output for total in totals]
        self._schedule(stores, totals)
        code = self._function(inputs, outputs, stores)
        name = "k" + hashlib.sha256(code.encode()).hexdigest()[:16]
        return Kernel(name, code.replace("@", name), tuple(inputs), tuple(outputs))

    # --- Numbers of an element ---

    def _leaves(self, y: ir.Value) -> bool:
        return y.is_graph_output() or any(use.node not in self.cluster.nodes for use in y.uses())

    def _kind(self, axes: Axes) -> str:
        dims = {d for d in axes if d is not None}
        if self.columns and dims >= set(self.columns):
            return "full"
        return "row" if dims else "once"

    def _new(self, ctype: str, kind: str, code: str, *operands: Variable) -> Variable:
        variable = Variable(f"v{len(self.variables)}", ctype, kind, code, operands)
        self.variables.append(variable)
        return variable

    def _map(self, template: str, ctype: str, *operands: Variable) -> Variable:
        kinds = {x.kind for x in operands}
        kind = "full" if "full" in kinds else "row" if "row" in kinds else "once"
        return self._new(ctype, kind, template, *operands)

    def _reduced(self, how: str, operand: Variable) -> Variable:
        variable = self._new(operand.ctype, "row" if self.rows else "once", "", operand)
        variable.reduces = how
        if variable.kind == "once":
            variable.kind = "row"
        return variable

    def _operand(self, node: ir.Node, i: int) -> Variable:
        x = node.inputs[i]
        assert x is not None and x.dtype is not None
        if x in self.values:
            return self.values[x]
        ctype = CTYPES[x.dtype]
        constant = constant_of(x)
        if constant is not None and constant.size == 1:
            return Variable(literal(constant.item(), ctype), ctype, "once", "", loads=True)
        axes = tuple(d for d in self.cluster.read[node, i] if d is not None)
        if (x, axes) not in self.inputs:
            variable = self._new(ctype, self._kind(axes), "")
            variable.loads = True
            self.inputs[x, axes] = variable
        return self.inputs[x, axes]

    def _emit(self, node: ir.Node, form: Form) -> None:
        xs = [self._operand(node, i) for i in operands_of(node, form)]
        y = node.outputs[0]
        assert y.dtype is not None
        ctype = CTYPES[y.dtype]
        if form.kind == "view":
            self.values[y] = xs[0]
        elif form.kind == "reduce":
            self._reduce(node, form, xs[0])
        elif form.kind == "rows":
            for output, variable in zip(node.outputs, self._normalized(node, form, xs), strict=False):
                self.values[output] = variable
        elif node.op_type == "Clip":
            self.values[y] = self._clipped(node, xs, ctype)
        elif node.op_type == "Pow":
            exponent = constant_of(node.inputs[1])
            powers = {1.0: "{0}", 2.0: "{0} * {0}"}
            known = "" if exponent is None else powers.get(float(exponent.item()), "")
            self.values[y] = self._map(known or "powf({0}, {1})", ctype, *xs)
        else:
            code = expression(node.op_type, ctype, xs[0].ctype, form.attributes, len(xs))
            assert code is not None
            self.values[y] = self._map(code, ctype, *xs)

    def _clipped(self, node: ir.Node, xs: list[Variable], ctype: str) -> Variable:
        """Bound a number; a bound that is not given is the type's largest finite number, as in the runtime."""
        bounds = iter(xs[1:])
        inputs = [*node.inputs[1:], None, None]
        largest = "FLT_MAX" if ctype == "float" else "DBL_MAX"
        low = (
            next(bounds) if inputs[0] is not None else Variable(f"-{largest}", ctype, "once", "", loads=True)
        )
        high = next(bounds) if inputs[1] is not None else Variable(largest, ctype, "once", "", loads=True)
        bounded = self._map("{0} < {1} ? {1} : {0}", ctype, xs[0], low)
        return self._map("{0} > {1} ? {1} : {0}", ctype, bounded, high)

    def _reduce(self, node: ir.Node, form: Form, x: Variable) -> None:
        y = node.outputs[0]
        if node.op_type in ("ReduceSumSquare", "ReduceL2"):
            x = self._map("{0} * {0}", x.ctype, x)
        axes = self.cluster.read[node, 0]
        reduced = [d for p in form.reduced if (d := axes[p]) is not None]
        after = self._after_sum(node.op_type, x.ctype, reduced)
        if y in self.cluster.totals:
            kept = tuple(d for d in self.cluster.axes[y] if d is not None)
            self.totals.append(_Total(REDUCING[node.op_type], x, y, kept, after))
            return
        total = self._reduced(REDUCING[node.op_type], x) if reduced else x
        self.values[y] = total if after == "{0}" else self._map(after, x.ctype, total)

    def _after_sum(self, op_type: str, ctype: str, reduced: Sequence[int]) -> str:
        """Return what a reduction does with the sum; the mean of no number is 0, as the runtime's."""
        if op_type == "ReduceL2":
            return "sqrtf({0})" if ctype == "float" else "sqrt({0})"
        if op_type != "ReduceMean" or not reduced:
            return "{0}"
        count = " * ".join(self._size(d) for d in reduced)
        return f"{{0}} / ({ctype})AT_LEAST_1({count})"

    def _normalized(self, node: ir.Node, form: Form, xs: list[Variable]) -> list[Variable]:
        """Return the outputs of a node that is computed row by row, in float32."""
        x = xs[0]
        width = f"(float)({' * '.join(self._size(d) for d in self.columns)})"
        if node.op_type in ("Softmax", "LogSoftmax"):
            highest = self._reduced("largest number", x)
            shifted = self._map("{0} - {1}", "float", x, highest)
            power = self._map("exp_float({0})", "float", shifted)
            total = self._reduced("sum", power)
            if node.op_type == "Softmax":
                return [self._map("{0} / {1}", "float", power, total)]
            return [self._map("{0} - {1}", "float", shifted, self._map("log_float({0})", "float", total))]
        epsilon = literal(float(form.attributes["epsilon"]), "float")
        centered, mean = x, None
        if node.op_type == "LayerNormalization":
            mean = self._map(f"{{0}} / {width}", "float", self._reduced("sum", x))
            centered = self._map("{0} - {1}", "float", x, mean)
        square = self._reduced("sum", self._map("{0} * {0}", "float", centered))
        inverse = self._map(f"1 / sqrtf({{0}} / {width} + {epsilon})", "float", square)
        y = self._map("{0} * {1}", "float", self._map("{0} * {1}", "float", centered, inverse), xs[1])
        if len(xs) > 2:
            y = self._map("{0} + {1}", "float", y, xs[2])
        return [y, inverse] if mean is None else [y, mean, inverse]

    def _size(self, d: int | None) -> str:
        assert d is not None
        size = self.cluster.sizes[d]
        return f"{size}LL" if isinstance(size, int) else f"a->n{self.order.index(d)}"

    # --- Loops ---

    def _schedule(self, stores: Sequence[tuple[ir.Value, Variable, Axes]], totals: Sequence[_Total]) -> None:
        """Say in which loop over the columns each number is computed: as late as its readers allow."""
        for v in self.variables:
            if v.reduces:
                v.stage = v.operands[0].stage + 1
            elif not v.loads:
                v.stage = max((x.stage for x in v.operands), default=0)
        readers: dict[int, list[Variable]] = {}
        for v in self.variables:
            for x in v.operands:
                readers.setdefault(id(x), []).append(v)
        pinned = {id(v) for _, v, _ in stores} | {id(total.operand) for total in totals}
        for v in reversed(self.variables):
            if v.kind != "full" or v.loads or id(v) in pinned:
                continue
            after = [r.stage - 1 if r.reduces else r.stage for r in readers.get(id(v), [])]
            late = min(after, default=v.stage)
            if late > v.stage and all(x.loads or x.kind != "full" for x in v.operands):
                v.stage = late
        scratch = 0
        for v in self.variables:
            if v.kind == "full" and not v.loads:
                after = [
                    r.stage - 1 if r.reduces else r.stage
                    for r in readers.get(id(v), [])
                    if r.kind == "full" or r.reduces
                ]
                if max(after, default=v.stage) > v.stage:
                    v.scratch, scratch = scratch, scratch + 1
        self.scratch = scratch

    def _function(
        self,
        inputs: Sequence[ir.Value],
        outputs: Sequence[ir.Value],
        stores: Sequence[tuple[ir.Value, Variable, Axes]],
    ) -> str:
        pointers = {x: f"in{i}" for i, x in enumerate(inputs)} | {y: f"out{i}" for i, y in enumerate(outputs)}
        lines = ["typedef struct {"]
        lines += [f"    const {_ctype(x)} *in{i};" for i, x in enumerate(inputs)]
        lines += [f"    {_ctype(y)} *out{i};" for i, y in enumerate(outputs)]
        lines += [f"    int64_t {', '.join(f'n{i}' for i in range(len(self.order)))};"] if self.order else []
        lines += ["    int64_t rows, columns, tasks, width;"]
        lines += [f"    {t.operand.ctype} *sum{i};" for i, t in enumerate(self.totals)]
        lines += ["} args_@;", ""]
        lines += self._body(pointers, stores)
        lines += self._task()
        lines += self._compute(inputs, outputs)
        return "\n".join(lines) + "\n"

    def _body(
        self, pointers: dict[ir.Value, str], stores: Sequence[tuple[ir.Value, Variable, Axes]]
    ) -> list[str]:
        lines = [
            "static void body_@(const args_@ *a, int64_t row0, int64_t row1, int64_t column0, int64_t column1,",
            "                   size_t task) {",
        ]
        lines += [
            "    const int64_t columns = a->columns;",
            "    (void)columns, (void)column0, (void)column1, (void)task;",
        ]
        loaded = {id(v): (x, axes) for (x, axes), v in self.inputs.items()}
        for v in self.variables:
            if v.kind == "once":
                if id(v) in loaded:
                    lines.append(f"    const {v.ctype} {v.name} = a->{pointers[loaded[id(v)][0]]}[0];")
                elif not v.reduces:
                    lines.append(f"    const {v.ctype} {v.name} = {_code(v)};")
        if not self.order:
            lines += [f"    a->{pointers[y]}[0] = {v.name};" for y, v, _ in stores]
            return [*lines, "}", ""]
        if self.scratch:
            ctypes = {v.ctype for v in self.variables if v.scratch is not None}
            largest = "double" if "double" in ctypes or "int64_t" in ctypes else "float"
            lines.append(f"    {largest} *scratch = malloc(sizeof({largest}) * {self.scratch} * columns);")
            for v in self.variables:
                if v.scratch is not None:
                    lines.append(
                        f"    {v.ctype} *restrict s_{v.name} = ({v.ctype} *)(scratch + {v.scratch} * columns);"
                    )
        lines.append("    for (int64_t r = row0; r < row1; r++) {")
        lines += [f"        {line}" for line in self._row(pointers, loaded, stores)]
        lines.append("    }")
        if self.scratch:
            lines.append("    free(scratch);")
        return [*lines, "}", ""]

    def _row(
        self,
        pointers: dict[ir.Value, str],
        loaded: dict[int, tuple[ir.Value, Axes]],
        stores: Sequence[tuple[ir.Value, Variable, Axes]],
    ) -> list[str]:
        lines: list[str] = []
        indexed: set[int] = set()

        def offset(axes: Axes) -> str:
            """Return the index of a row's first element in a tensor with some of the dimensions."""
            dims = [d for d in axes if d in self.rows]
            inner = any(d in self.columns for d in axes)
            if not dims:
                return "0"
            if dims == self.rows:
                return "r * columns" if inner else "r"
            text = ""
            for d in dims:
                i = self.rows.index(d)
                if i not in indexed:
                    indexed.add(i)
                    below = " * ".join(self._size(e) for e in self.rows[i + 1 :]) or "1"
                    lines.append(f"const int64_t i{i} = r / ({below}) % {self._size(d)};")
                text = f"({text} * {self._size(d)} + i{i})" if text else f"i{i}"
            return f"{text} * columns" if inner else text

        for v in self.variables:
            if id(v) in loaded and v.kind != "once":
                x, axes = loaded[id(v)]
                at = offset(axes)
                if v.kind == "full":
                    lines.append(f"const {v.ctype} *restrict p_{v.name} = a->{pointers[x]} + {at};")
                else:
                    lines.append(f"const {v.ctype} {v.name} = a->{pointers[x]}[{at}];")
        for y, v, axes in stores:
            if v.kind == "full":
                lines.append(f"{_ctype(y)} *restrict q_{pointers[y]} = a->{pointers[y]} + {offset(axes)};")
        kept = []
        for i, total in enumerate(self.totals):
            full = any(d in self.columns for d in total.axes)
            kept.append(full)
            lines.append(
                f"{total.operand.ctype} *restrict t{i} = a->sum{i} + task * a->width + {offset(total.axes)};"
            )
        stages = max([v.stage for v in self.variables] + [0])
        for stage in range(stages + 1):
            for v in self.variables:
                if v.kind == "row" and v.stage == stage and not v.reduces and not v.loads:
                    lines.append(f"const {v.ctype} {v.name} = {_code(v)};")
            lines += self._loop(stage, loaded, stores, pointers, kept)
        for y, v, axes in stores:
            if v.kind == "row":
                lines.append(f"a->{pointers[y]}[{offset(axes)}] = {v.name};")
        return lines

    def _loop(
        self,
        stage: int,
        loaded: dict[int, tuple[ir.Value, Axes]],
        stores: Sequence[tuple[ir.Value, Variable, Axes]],
        pointers: dict[ir.Value, str],
        kept: Sequence[bool],
    ) -> list[str]:
        """Return the loop over columns that computes the numbers of a stage."""
        body: list[str] = []
        here: set[int] = set()

        def need(x: Variable) -> None:
            if x.kind != "full" or id(x) in here:
                return
            here.add(id(x))
            if id(x) in loaded:
                body.append(f"const {x.ctype} {x.name} = p_{x.name}[j];")
            elif x.stage < stage:
                body.append(f"const {x.ctype} {x.name} = s_{x.name}[j];")
            else:
                for y in x.operands:
                    need(y)
                body.append(f"const {x.ctype} {x.name} = {_code(x)};")
                if x.scratch is not None:
                    body.append(f"s_{x.name}[j] = {x.name};")

        before, after, reductions = [], [], []
        for v in self.variables:
            if v.kind == "full" and not v.loads and v.stage == stage:
                need(v)
        for v in self.variables:
            if v.reduces and v.stage == stage + 1:
                start, step, _ = REDUCTIONS[v.reduces]
                need(v.operands[0])
                before.append(f"{v.ctype} {v.name} = {start};")
                body.append(step.format(v.name, v.operands[0].name))
                reductions.append((v.reduces, v.name))
        for i, total in enumerate(self.totals):
            x = total.operand
            if x.stage != stage:
                continue
            start, step, _ = REDUCTIONS[total.kind]
            need(x)
            if kept[i]:
                body.append(step.format(f"t{i}[j]", x.name))
            elif x.kind == "full":
                before.append(f"{x.ctype} u{i} = {start};")
                body.append(step.format(f"u{i}", x.name))
                reductions.append((total.kind, f"u{i}"))
                after.append(step.format(f"t{i}[0]", f"u{i}"))
            else:
                after.append(step.format(f"t{i}[0]", x.name))
        for y, v, _ in stores:
            if v.kind == "full" and ((v.stage == stage and not v.loads) or (v.loads and stage == 0)):
                need(v)
                body.append(f"q_{pointers[y]}[j] = {v.name};")
        if not body:
            return before + after
        clauses = "".join(f" reduction({REDUCTIONS[kind][2]}:{name})" for kind, name in reductions)
        return [
            *before,
            f"#pragma omp simd{clauses}",
            "for (int64_t j = column0; j < column1; j++) {",
            *(f"    {line}" for line in body),
            "}",
            *after,
        ]

    # --- Tasks ---

    def _task(self) -> list[str]:
        splits_columns = not any(v.reduces for v in self.variables)
        lines = ["static void task_@(void *user, size_t task) {", "    const args_@ *a = user;"]
        if splits_columns and self.order:
            lines += [
                "    if (a->rows < a->tasks) {",
                "        const int64_t c0 = a->columns * task / a->tasks, c1 = a->columns * (task + 1) / a->tasks;",
                "        body_@(a, 0, a->rows, c0, c1, task);",
                "        return;",
                "    }",
            ]
        lines += [
            "    body_@(a, a->rows * task / a->tasks, a->rows * (task + 1) / a->tasks, 0, a->columns, task);",
            "}",
            "",
        ]
        return lines

    def _compute(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> list[str]:
        """Return the function that ONNX Runtime calls: it reads shapes, makes outputs and starts tasks."""
        types = ", ".join(str(x.dtype.value) for x in [*inputs, *outputs] if x.dtype is not None)
        lines = [
            f"static const unsigned char types_@[] = {{{types}}};",
            "",
            "static OrtStatus *compute_@(OrtKernelContext *context) {",
            "    args_@ arguments, *a = &arguments;",
        ]
        symbols: dict[str, str] = {}
        for i, x in enumerate(inputs):
            sizes = sizes_of(x)
            lines.append(f"    int64_t d{i}[{max(len(sizes), 1)}];")
            lines.append(f"    CHECK(input(context, {i}, &a->in{i}, d{i}, {len(sizes)}));")
            checks = []
            for p, size in enumerate(sizes):
                expected = str(size) if isinstance(size, int) else symbols.setdefault(size, f"d{i}[{p}]")
                if expected != f"d{i}[{p}]":
                    checks.append(f"d{i}[{p}] != {expected}")
            if checks:
                lines.append(f"    if ({' || '.join(checks)}) return unlike();")
        for i, d in enumerate(self.order):
            lines.append(f"    a->n{i} = {_symbolic(self.cluster.sizes[d], symbols)};")
        for name, part in (("rows", self.rows), ("columns", self.columns)):
            lines.append(f"    a->{name} = {' * '.join(f'a->n{self.order.index(d)}' for d in part) or '1'};")
        for i, y in enumerate(outputs):
            dims = [_symbolic(size, symbols) for size in sizes_of(y)]
            shape = f"(int64_t[]){{{', '.join(dims)}}}" if dims else "NULL"
            lines.append(f"    CHECK(output(context, {i}, &a->out{i}, {shape}, {len(dims)}));")
        lines += [f"    a->tasks = (a->rows * a->columns + {GRAIN - 1}) / {GRAIN};"]
        if any(v.reduces for v in self.variables):
            lines.append("    if (a->tasks > a->rows) a->tasks = a->rows;")
        if self.totals:
            lines.append(f"    if (a->tasks > {MOST_TASKS}) a->tasks = {MOST_TASKS};")
        lines.append("    if (a->tasks < 1) a->tasks = 1;")
        lines += self._finished()
        return [*lines, "    return NULL;", "}", ""]

    def _finished(self) -> list[str]:
        run = [
            "    if (a->tasks == 1) task_@(a, 0);",
            "    else CHECK(api->KernelContext_ParallelFor(context, task_@, a->tasks, 0, a));",
        ]
        if not self.totals:
            return run
        lines, lengths = [], []
        for total in self.totals:
            dims = [f"a->n{self.order.index(d)}" for d in total.axes if d is not None]
            lengths.append(" * ".join(dims) or "1")
        lines.append(f"    const int64_t lengths[] = {{{', '.join(lengths)}}};")
        lines.append(f"    a->width = {' + '.join(f'lengths[{i}]' for i in range(len(lengths)))};")
        ctype = "double" if any(t.operand.ctype == "double" for t in self.totals) else "float"
        lines.append(f"    {ctype} *sums = malloc(sizeof({ctype}) * a->width * a->tasks);")
        start = "0"
        for i, total in enumerate(self.totals):
            lines.append(f"    a->sum{i} = sums + {start};")
            start += f" + lengths[{i}]"
            initial = REDUCTIONS[total.kind][0]
            lines.append("    for (int64_t t = 0; t < a->tasks; t++)")
            lines.append(
                f"        for (int64_t i = 0; i < lengths[{i}]; i++) a->sum{i}[t * a->width + i] = {initial};"
            )
        lines += run
        for i, total in enumerate(self.totals):
            step = REDUCTIONS[total.kind][1].format("x", f"a->sum{i}[t * a->width + i]")
            out = f"a->out{self._total_output(i)}"
            lines.append(f"    for (int64_t i = 0; i < lengths[{i}]; i++) {{")
            lines.append(f"        {total.operand.ctype} x = a->sum{i}[i];")
            lines.append(f"        for (int64_t t = 1; t < a->tasks; t++) {{ {step} }}")
            lines.append(f"        {out}[i] = {total.scale.format('x')};")
            lines.append("    }")
        return [*lines, "    free(sums);"]

    def _total_output(self, index: int) -> int:
        stored = sum(
            self._leaves(y) and y not in self.cluster.totals
            for node in self.cluster.nodes
            for y in node.outputs
        )
        return stored + index


def _code(v: Variable) -> str:
    return v.code.format(*(x.name for x in v.operands))


def _ctype(x: ir.Value) -> str:
    assert x.dtype is not None
    return CTYPES[x.dtype]


def _symbolic(size: Size, symbols: dict[str, str]) -> str:
    return str(size) if isinstance(size, int) else symbols[size]
