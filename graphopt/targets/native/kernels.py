"""Write a cluster as a kernel: the operator that a session calls, which computes its rows in parallel tasks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import onnx_ir as ir

from graphopt.graph.roles import Role, with_role
from graphopt.graph.sizes import Size, has_sizes, sizes_of
from graphopt.graph.values import dtype_of, is_floating
from graphopt.targets.native.channels import ChannelLoops
from graphopt.targets.native.clusters import Cluster
from graphopt.targets.native.lanes import LaneLoops
from graphopt.targets.native.library import Kernel, braced
from graphopt.targets.native.loops import Loops, elements_of, indented, stored_type
from graphopt.targets.native.numbers import Numbers, TaskTotal, scheduled
from graphopt.targets.native.operators import REDUCTIONS, store_statement

_GRAIN = 16384  # elements of a task
_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # such as 32768K
_CACHE_BYTES = 2**27  # of a last cache whose size the system does not tell
_MOST_TASKS = 16  # of a kernel with totals, of which each task has a part


@functools.cache
def last_cache_bytes() -> int:
    """Return the size of the cache that a processor shares with others."""
    with contextlib.suppress(OSError, ValueError):
        return int(_LAST_CACHE.read_text().strip().removesuffix("K")) * 1024 or _CACHE_BYTES  # 0 in some machines
    return _CACHE_BYTES


def has_large_state(model: ir.Model) -> bool:
    """Return whether no cache keeps the new state until the next step.

    It would have to keep what it replaces, too: a step reads one set of state and writes another.
    """
    state = [y for y in with_role(model, Role.NEXT) if is_floating(y) and has_sizes(y)]
    return 2 * sum(elements_of(y) * dtype_of(y).itemsize for y in state) >= last_cache_bytes()


def cluster_kernel(cluster: Cluster, *, is_large: bool = False) -> Kernel:
    """Return the kernel of a cluster. In its lines, `@` stands for the kernel's name.

    Args:
        is_large: no cache keeps the new state until the next step.
    """
    numbers = Numbers(cluster)
    fields = {x: f"in{i}" for i, x in enumerate(numbers.inputs)}
    fields |= {y: f"out{i}" for i, y in enumerate(numbers.outputs)}
    stages = scheduled(numbers)
    lanes = LaneLoops(numbers, stages, fields)
    loops = lanes if lanes.fits else Loops(numbers, stages, fields, is_large)
    if cluster.has_channels:
        loops = ChannelLoops(numbers, stages, fields)
    lines = [*_arguments(numbers), *loops.function(), *_task(loops), *_compute(loops)]
    code, aligned, nodes = "\n".join(lines) + "\n", tuple(_aligned(loops)), len(cluster.nodes)
    return Kernel.named("k", code, numbers.inputs, numbers.outputs, aligned=aligned, nodes=nodes)


def _aligned(loops: Loops) -> Iterator[tuple[int, int]]:
    """Yield the inputs and outputs whose elements are read and written once, in one loop over all dimensions."""
    numbers = loops.numbers
    if loops.stages.count > 1 or not numbers.dimensions:
        return
    for x, axes in numbers.read:
        for store in numbers.stores:
            whole = list(axes) == list(store.axes) == numbers.dimensions
            once = sum(other is x for other, _ in numbers.read) == 1
            if whole and once and x.dtype == store.output.dtype:
                yield numbers.inputs.index(x), numbers.outputs.index(store.output)


def _arguments(numbers: Numbers) -> list[str]:
    """Return the structure that all tasks share."""
    fields = [f"const {stored_type(x)} *in{i};" for i, x in enumerate(numbers.inputs)]
    fields += [f"{stored_type(y)} *out{i};" for i, y in enumerate(numbers.outputs)]
    fields += [f"{total.operand.ctype} *sum{i};" for i, total in enumerate(numbers.totals)]
    whole = ["rows", "columns", "tasks"]
    whole += [f"n{i}" for i in range(len(numbers.dimensions))]
    whole += [f"length{i}" for i in range(len(numbers.totals))]
    return ["typedef struct {", *indented([*fields, f"int64_t {', '.join(whole)};"]), "} args_@;", ""]


def _task(loops: Loops) -> list[str]:
    """Return the function that computes one task: some rows, or some columns where there are few rows."""
    rows, columns = (f"a->{x} * task / a->tasks, a->{x} * (task + 1) / a->tasks" for x in ("rows", "columns"))
    last = ", task" if loops.numbers.totals else ""
    lines = ["const args_@ *a = user;"]
    if loops.splits_columns:
        lines.append(f"if (a->rows < a->tasks) body_@(a, 0, a->rows, {columns}{last});")
        lines.append(f"else body_@(a, {rows}, 0, a->columns{last});")
    else:
        lines.append(f"body_@(a, {rows}{last});")
    return ["static void task_@(void *user, size_t task) {", *indented(lines), "}", ""]


def _compute(loops: Loops) -> list[str]:
    """Return the function that ONNX Runtime calls: it checks shapes, makes outputs and starts tasks."""
    numbers = loops.numbers
    symbols: dict[Size, str] = {}
    lines = ["args_@ arguments, *a = &arguments;"]
    for i, x in enumerate(numbers.inputs):
        lines += _input(i, x, symbols, numbers.fixed)
    lines += _extents(loops, symbols)
    for i, y in enumerate(numbers.outputs):
        sizes = ["1" if d is None else numbers.size(d) for d in numbers.cluster.axes[y]]
        shape = f"(int64_t[]){braced(sizes)}" if sizes else "NULL"
        lines.append(f"CHECK(output(context, {i}, &a->out{i}, {shape}, {len(sizes)}));")
    first = len(numbers.stores)
    for i, total in enumerate(numbers.totals):
        ctype = total.operand.ctype
        memory = f"allocate(sizeof({ctype}) * a->tasks * a->length{i})"
        if stored_type(total.output) == ctype:  # a single task has the output
            memory = f"a->tasks == 1 ? a->out{first + i} : {memory}"
        lines += [f"a->length{i} = {numbers.product(total.axes)};", f"a->sum{i} = {memory};"]
    lines.append("CHECK(in_parallel(context, task_@, a->tasks, a));")
    for i, total in enumerate(numbers.totals):
        lines += _merged(i, total, first + i)
    return ["OrtStatus *compute_@(Context *context) {", *indented([*lines, "return NULL;"]), "}", ""]


def _extents(loops: Loops, symbols: Mapping[Size, str]) -> list[str]:
    """Return the statements that set the numbers of rows, columns and tasks."""
    numbers = loops.numbers
    lines = []
    for i, size in enumerate(numbers.cluster.space.sizes.values()):
        lines.append(f"a->n{i} = {symbols.get(size, size)};")
    lines.append(f"a->rows = {numbers.product(numbers.rows)};")
    lines.append(f"a->columns = {numbers.product(numbers.columns)};")
    lines.append(f"a->tasks = (a->rows * a->columns + {_GRAIN - 1}) / {_GRAIN};")
    if not loops.splits_columns:
        lines.append("if (a->tasks > a->rows) a->tasks = a->rows;")
    if numbers.totals:
        lines.append(f"if (a->tasks > {_MOST_TASKS}) a->tasks = {_MOST_TASKS};")
    lines.append("if (a->tasks < 1) a->tasks = 1;")
    return lines


def _input(i: int, x: ir.Value, symbols: dict[Size, str], fixed: Collection[Size]) -> list[str]:
    """Return the statements that read an input and check its shape; note where sizes come from that are not fixed."""
    sizes = sizes_of(x)
    lines = [
        f"int64_t d{i}[{max(len(sizes), 1)}];",
        f"CHECK(input(context, {i}, &a->in{i}, d{i}, {len(sizes)}));",
    ]
    unlike = []
    for p, size in enumerate(sizes):
        actual = f"d{i}[{p}]"
        expected = str(size) if size == 1 or size in fixed else symbols.setdefault(size, actual)
        if expected != actual:
            unlike.append(f"{actual} != {expected}")
    return [*lines, f"if ({' || '.join(unlike)}) return unlike();"] if unlike else lines


def _merged(i: int, total: TaskTotal, output: int) -> list[str]:
    """Return the statements that put the tasks' parts of a total together."""
    step = REDUCTIONS[total.how][1].format("x", f"a->sum{i}[t * a->length{i} + i]")
    return [
        f"for (int64_t i = 0; i < a->length{i}; i++) {{",
        f"    {total.operand.ctype} x = a->sum{i}[i];",
        f"    for (int64_t t = 1; t < a->tasks; t++) {{ {step} }}",
        f"    {store_statement(total.output.dtype, f'a->out{output}[i]', total.after.format('x'))}",
        "}",
        f"if ((void *)a->sum{i} != (void *)a->out{output}) free(a->sum{i});",
    ]
