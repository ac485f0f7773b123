"""Report how a pipeline changes a model: what trains, what blocks training, and how the graph grows."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphopt.errors import BlockingOperator, GraphoptError, NoGradient, some
from graphopt.graph.declarations import Misdeclared
from graphopt.graph.listing import listing, size, type_text
from graphopt.graph.loading import Source, load
from graphopt.graph.memory import estimate
from graphopt.graph.merging import Adapted, adapted
from graphopt.graph.metadata import EXPORTED_GRAPH, FAKE, RUNTIME
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.origins import EXPORT_ANEW, Exported, Kind, LeftOut, Origin
from graphopt.graph.roles import FED, STATE, Role, role_of, with_role
from graphopt.graph.shown import elements
from graphopt.graph.traversal import nodes_of
from graphopt.graph.values import is_floating, name_of, operator_of
from graphopt.inspection.plot import plot
from graphopt.inspection.words import counted
from graphopt.pipeline import Pipeline
from graphopt.runtime.contest import measured
from graphopt.runtime.executor import Executor
from graphopt.runtime.frozen import frozen_bytes, placement_by_size
from graphopt.runtime.random_inputs import SIZES, open_sizes
from graphopt.runtime.signature import InputSpec
from graphopt.targets.bfloat16 import computes_bfloat16
from graphopt.targets.native.lowering import plan

MOST_DRAWN = 200  # nodes: reports do not draw larger graphs
MEASURED = 2 << 30  # bytes: reports time no step that takes more


@dataclass
class Report:
    """Hold the results of running a pipeline on a model.

    Args:
        model: the model before the first pass.
        stages: for each pass that ran, its step, its repr, the model after it and its duration in seconds.
        blocked: the step that raised an error, and the error; None without an error.
        batch: the number of rows in the estimate of memory; None for no estimate.
        step_time: what was measured of the step with kernels and without, as a line; None if nothing was.
        kernels: whether the summary counts the kernels that would run the step.
    """

    model: ir.Model
    stages: list[tuple[str, str, ir.Model, float]] = field(default_factory=list)
    blocked: tuple[str, GraphoptError] | None = None
    batch: int | None = None
    step_time: str | None = None
    kernels: bool = True

    @functools.cached_property
    def sizes(self) -> tuple[dict[str, int], int | None] | None:
        """Return sizes of open axes of the step's inputs, and that of axes other than the first; None if none runs."""
        return open_sizes(self.final, self.batch or 1)

    @property
    def final(self) -> ir.Model:
        """Return the model after the last pass that ran."""
        return self.stages[-1][2] if self.stages else self.model

    @property
    def step(self) -> ir.Model | None:
        """Return the training graph; None if a step raised an error, or if there is no optimizer."""
        return self.final if not self.blocked and with_role(self.final, Role.NEXT) else None

    def summary(self) -> str:
        """Return what trains, what blocks training, the operators, and the number of nodes after each pass."""
        return "\n".join(_summary(self)) + "\n"

    def listings(self) -> str:
        """Return the graph before the first pass and after each pass, one line per node."""
        parts = [("before the first pass", self.model)]
        parts += [(f"after {step}: {text}", model) for step, text, model, _ in self.stages]
        return "\n".join(f"== {title} ==\n{listing(model)}" for title, model in parts)

    def picture(self, path: str | os.PathLike[str]) -> bool:
        """Draw the graph before and after all passes; return False if it is large, or without pygraphviz."""
        if importlib.util.find_spec("pygraphviz") is None or size(self.final) > MOST_DRAWN:
            return False
        plot(self.model, self.final, titles=["before the first pass", "after the last"], path=path)
        return True


def report(source: Source, pipeline: Pipeline, batch: int | None = None) -> Report:
    """Run the steps of a pipeline on a copy of a model until one raises an error.

    Args:
        batch: the number of rows in the estimate of memory, which counts at most 2^20 of them.

    Raises:
        GraphoptError: the model cannot be read.
    """
    model = load(source)
    result = Report(model.clone(), batch=None if batch is None else min(batch, MOST_ROWS))
    for name, steps in pipeline.items():
        for step in steps:
            start = time.perf_counter()
            try:
                step(model)
            except GraphoptError as error:
                result.blocked = name, error
                return result
            result.stages.append((name, repr(step), model.clone(), time.perf_counter() - start))
    return result


def saved_by_kernels(result: Report, opened: Callable[[bool], Executor]) -> str:
    """Return a line with the time of a step with kernels and without, on random numbers and on labels of 0.

    Args:
        result: a report that has a step.
        opened: returns an executor of the step, with kernels or without.
    """
    if result.sizes is None:
        return f"  a step     not timed: {_OPEN}"
    sizes, _ = result.sizes
    needed = estimate(result.final, sizes).peak
    if needed > MEASURED:
        return f"  a step     not timed: it takes {_megabytes(needed)} at {_at(result)}"
    rng = np.random.default_rng(0)
    feeds = {}
    for x in with_role(result.final, *FED):
        zeros = InputSpec(x).zeros({None: result.batch or 1} | sizes)
        noise = rng.standard_normal(zeros.shape).astype(zeros.dtype)
        feeds[name_of(x)] = noise if is_floating(x) else zeros
    try:
        calls = {str(kind): functools.partial(opened(kind).step, feeds) for kind in (True, False)}
        times = measured(calls)
    except GraphoptError as error:
        return f"  saves      not measured: {error}"
    native, plain = times["True"], times["False"]
    shown = f"{1e3 * native:.3g} ms with kernels, {1e3 * plain:.3g} ms without"
    return f"  a step     {shown}: {plain / native:.2f} times as fast, at {_at(result)}"


MOST_ROWS = 2**20  # of an estimate, whose own memory grows with them: inference lists what a Range computes
_OPEN = f"no size of the open axes runs, of {', '.join(map(str, SIZES))}"


def _at(result: Report) -> str:
    """Return the sizes for which a report measures, in words."""
    assert result.sizes is not None
    _, size = result.sizes
    more = "" if size is None else f" and size {size} of other open axes"
    return f"batch size {result.batch or 1}{more}"


def _summary(result: Report) -> Iterator[str]:
    """Yield what decides whether a model trains first, then what would run, and then each weight and pass."""
    weights, final = list(result.model.graph.initializers.values()), result.final
    decided = [model for _, _, model, _ in result.stages if with_role(model, Role.PARAMETER)]
    reached = [model for model in decided if with_role(model, Role.GRADIENT)]
    kinds = _weights_by_kind((reached or decided or [final])[0])
    opset = result.model.opset_imports.get("", 0)
    yield f"model      opset {opset}, {size(result.model)} nodes, {_counted([elements([x]) for x in weights])}"
    yield f"takes      {_described(x for x in result.model.graph.inputs if x not in weights)}"
    yield f"gives      {_described(result.model.graph.outputs)}"
    if result.blocked:
        yield from _blocked(*result.blocked)
    else:
        yield "blocked    by nothing"
    for kind, group in kinds.items():
        if group or kind == "trains":
            yield f"{kind:10} {_counted([count for _, _, count, _ in group]) if group else 'nothing'}"
    yield from _adapters((reached or decided or [final])[0], sum(elements([x]) for x in weights))
    if missing := LeftOut.read((reached or decided or [final])[0]):
        yield f"left out   {some([*missing.names])}: by the exporter, which folds and drops parameters; {EXPORT_ANEW}"
    if result.model.producer_name == "pytorch":
        yield from _lost(result.model, final)
    if wrong := Misdeclared.read(final):
        yield f"shapes     {wrong.count} of the file are wrong, such as {wrong.example}: inferred ones replace them"
    if not result.blocked:
        yield from _step(result)
    yield from _integers(result)
    yield f"operators  {_operators(result.model)}"
    if not result.blocked:
        yield f"of a step  {_operators(final)}"
    for kind, group in kinds.items():
        if group:
            yield f"{kind}:"
            yield from _table([(f"  {name}", shape, f"{count:,}", why) for name, shape, count, why in group])
    stages = [(f"  {name}", str(size(model)), f"{time:.3f}", text) for name, text, model, time in result.stages]
    yield from _table([("passes", "nodes", "seconds", ""), *stages])


def _described(values: Iterable[ir.Value]) -> str:
    return ", ".join(f"{name_of(x)} {type_text(x)}" for x in values) or "nothing"


def _step(result: Report) -> Iterator[str]:
    """Describe the training step: its size, its memory, and what runs it."""
    final = result.final
    state = [value for value in final.graph.inputs if role_of(value) in STATE]
    yield f"step       {size(final)} nodes, state {_counted([elements([x]) for x in state])}"
    if runtime := RUNTIME.read(final):
        yield f"needs      {runtime}"
    if result.step is None:
        return
    if result.batch is not None:
        yield from _memory(result)
        if (frozen := frozen_bytes(final)) >= 1_000_000:
            yield f"frozen     {_megabytes(frozen)} of weights: {_FROZEN[placement_by_size(final)]}"
    if result.kernels:
        yield from _native(final)
    if result.step_time is not None:
        yield result.step_time


def _native(model: ir.Model) -> Iterator[str]:
    """Describe the nodes of a step after it is lowered to the machine."""
    kernels = plan(model)
    if not kernels.calls:
        yield "native     nothing to lower"
        return
    yield f"native     {size(kernels.model)} nodes in place of {size(model)}, on a CPU with a C compiler"
    if narrow := sum(map(computes_bfloat16, model.graph.all_nodes())):
        yield _in_bfloat16(narrow, kernels.wide)
    nodes = [kernel.nodes for kernel in kernels.kernels]
    functions = len({kernel.name for kernel in kernels.kernels})
    rows = {
        "kernels": f"each in place of up to {max(nodes)} nodes",
        "products": "with the transposes around them",
        "convolutions": "with the transposes around them, and gradients of both operands",
        "pools": "whose windows tile the input, gradients of maxima, and Resize by whole factors",
        "scans": "each with the kernels of its body",
        "functions": "to compile: kernels with equal code are one function",
    }
    counts = {**kernels.counts, "functions": functions}
    yield from _table([(f"  {name}", str(counts.get(name, 0)), text) for name, text in rows.items()])


def _in_bfloat16(nodes: int, wide: Sequence[ir.Node]) -> str:
    """Name the nodes that compute with bfloat16 numbers and run in float32."""
    names = some([f"{node.op_type} {name_of(node)!r}" for node in wide])
    return f"  bfloat16   {nodes - len(wide)} of {counted(nodes, 'node')}" + (
        f"; in float32, between casts: {names}" if wide else ""
    )


_FROZEN = {
    "packed": "packed by each session, which takes up to three times as much",
    "mapped": "mapped, shared by all sessions",
    "low": "mapped, shared by all sessions, and values of a step are freed early (low)",
}


def _memory(result: Report) -> Iterator[str]:
    if result.sizes is None:
        yield f"memory     not estimated: {_OPEN}"
        return
    try:
        memory = estimate(result.final, result.sizes[0])
    except GraphoptError as error:
        yield f"memory     not estimated: {error}"
        return
    yield f"memory     {_megabytes(memory.peak)} at {_at(result)}, estimated"
    state = f"in two sets of buffers; parameters alone are {_megabytes(memory.parameters)}"
    step = f"at most; {_megabytes(memory.saved)} are saved for the backward pass"
    yield from _table([("  state", _megabytes(memory.state), state), ("  a step", _megabytes(memory.step), step)])


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g} MB"


_Row = tuple[str, str, int, str]  # the name of a weight, its type, the count of its numbers, and why


def _weights_by_kind(model: ir.Model) -> dict[str, list[_Row]]:
    """Return the weights by what becomes of them, such as trained, frozen or constant."""
    names = ("trains", "frozen", "tied", "buffer", "constant", "unsure")
    rows: dict[str, list[_Row]] = {name: [] for name in names}
    for value, origin in Origin.of_values(model):
        row = (name_of(value), type_text(value), elements([value]), origin.reason)
        if role_of(value) is Role.PARAMETER:
            rows["trains"].append(row)
            rows["tied"] += [
                (copy.name, str(list(copy.shape)), math.prod(copy.shape), copy.how) for copy in origin.copies
            ]
        else:
            rows["frozen" if origin.trains else origin.kind.value].append(row)
        if not origin.certain:
            rows["unsure"].append((*row[:3], _way(value, origin)))
    return rows


def _lost(model: ir.Model, final: ir.Model) -> Iterator[str]:
    """Name the facts that PyTorch's exporter did not write into a file, and the line that keeps them."""
    if (exported := Exported.read(model)) is not None:
        yield f"recorded   by graphopt.export, exporter={exported.exporter}: what trains in the module trains here"
        return
    stops = "torch.no_grad()"
    if EXPORTED_GRAPH.read(model.graph) is None:
        stops = "which weights are buffers, detach(), torch.no_grad()"
    yield f"not known  requires_grad=False, {stops} and the modes of modules: PyTorch's exporter did not write them"
    if folded := sum(origin.kind is Kind.COMPUTED for _, origin in Origin.of_values(final)):
        yield f"folded     {counted(folded, 'weight')} computed from others, in whose place they train"
    yield "to keep it graphopt.export(module, example), or torch.onnx.export(..., optimize=False) and parameters.freeze"


def _way(value: ir.Value, origin: Origin) -> str:
    """Say what became of an initializer whose kind is unsure, and which option changes it."""
    name = name_of(value)
    if role_of(value) is not Role.PARAMETER:
        way, option = "does not train", f"parameters.unfreeze={name}"
    elif origin.copies:
        way, option = "trains", f"parameters.untie={origin.copies[0].name}"
    else:
        way, option = "trains", f"parameters.freeze={name}"
    return f"{way} ({origin.reason}); {option} changes it"


def _adapters(model: ir.Model, total: int) -> Iterator[str]:
    """Say how many weights adapters change, and the share of their numbers in those of the model."""
    values = {name_of(x): x for x in [*model.graph.inputs, *model.graph.initializers.values()]}
    notes: dict[str, list[Adapted]] = {}
    for note in adapted(model):
        notes.setdefault(note.adapter, []).append(note)
    for name, own in notes.items():
        count = elements(values[x] for note in own for x in note.values if x in values)
        weights = counted(len({note.weight for note in own}), "weight")
        yield f"adapters   {name} of {weights}: {count:,} numbers, {count / max(total, 1):.2%} of the model's"


def _integers(result: Report) -> Iterator[str]:
    """Say which products the trained model computes on integers, what stops the others, and which integers stay."""
    from passes.quantization.placement import kernels
    from passes.weights.masters import staying

    if left := [(f"  {name}", why) for name, why in staying(result.model.graph)]:
        yield f"integers   {counted(len(left), 'tensor')} of the file stay as they are"
        yield from _table(left)
    rounded = [
        model for step, _, model, _ in result.stages if step == "quantize" and any(map(FAKE.is_set, model.graph))
    ]
    if not rounded:
        return
    rows = [*kernels(rounded[-1].graph)]
    count = sum(not kernel.startswith("float") for _, _, kernel in rows)
    yield f"integers   {count} of {counted(len(rows), 'product')} by ONNX Runtime's integer kernels"
    yield from _table([(f"  {name}", op_type, kernel) for name, op_type, kernel in rows])


def _blocked(step: str, error: GraphoptError) -> Iterator[str]:
    if not isinstance(error, NoGradient):
        yield f"blocked    at {step}: {error}"
        return
    yield f"blocked    at {step}: operators without a gradient"
    rows = [("  operator", "nodes", "blocks", "what would help")]
    rows += [(f"  {x.operator}", some(x.nodes), some(x.blocks), "; ".join(_advice(x))) for x in error.operators]
    yield from _table(rows)


def _advice(operator: BlockingOperator) -> Iterator[str]:
    if operator.reason:
        yield operator.reason
    elif operator.domain.startswith(MICROSOFT):
        yield "export or optimize the model without ONNX Runtime's fusions"
    yield f"freeze: parameters.freeze='[{','.join(operator.blocks)}]'"
    if not operator.reason:
        yield f"register a rule: passes.gradient({operator.domain!r}, {operator.op_type!r})"


def _operators(model: ir.Model) -> str:
    """Count operators, including those in functions and subgraphs."""
    counts = Counter(map(operator_of, nodes_of(model))).most_common()
    return ", ".join(f"{name} {count}" for name, count in counts if name != "Constant") or "none"


def _counted(sizes: Sequence[int]) -> str:
    return f"{counted(len(sizes), 'tensor')} of {sum(sizes):,} numbers"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Align columns: text to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = [
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()
