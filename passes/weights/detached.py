"""Stop gradients where PyTorch's exporter (`dynamo=True`) recorded a `detach`.

A call of the exported program names the values that it reads. The exporter may drop the Identity of a `detach`;
a reader then names a `detach` that no node computes.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import EXPORTED_CALL, STOP_GRADIENT, Text
from graphopt.graph.origins import EXPORT_ANEW, PaddingIndex
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import like, name_of, redirect
from passes.differentiate import stop_gradient
from passes.weights.exported_program import FOLDED_FROM, Call, ExportedProgram, call_of
from passes.weights.initializers import is_weight

_STACK_TRACE = Text("pkg.torch.onnx.stack_trace")
_DETACH = re.compile(r"detach_?(_\d+)?")
_MENTIONED = r"(?:%|')detach_?(?:_(\d+))?\b"
_INNER = re.compile(r"val_\d+")  # a value inside of a call
_PADDING = re.compile(r"target=torch\.ops\.aten\.embedding\.\w+\]\(args = \(%\w+, %\w+, (\d{1,9})[,)]")
_TRACED = 'File "<eval_with_key>'  # begins the stack trace of code that the exporter traced separately

_Edge = tuple[ir.Node, int, ir.Value]


def stop(program: ExportedProgram) -> None:
    """Stop gradients at the edges that the program detaches."""
    model, names = program.model, _Names(program)
    stopped: list[ir.Value] = []
    for node in model.graph.all_nodes():
        call = Call.of(node)
        if node.op_type == "Identity" and call is not None and call.detaches and node.inputs[0] is not None:
            stopped.append(STOP_GRADIENT.mark(node.outputs[0]))
    merged: dict[str, ir.Value] = {}
    stops: dict[ir.Value, ir.Value] = {}
    for call, nodes in program.calls():
        for node, index, x in names.detached(call, nodes, merged):
            if x not in stops:
                stops[x] = _stopped(x)
            node.replace_input_with(index, stops[x])
    for index, (output, recorded) in enumerate(zip(list(model.graph.outputs), program.outputs, strict=False)):
        maker, call = output.producer(), Call.of(output.producer())
        is_stop = maker is not None and STOP_GRADIENT.is_set(maker)
        if _DETACH.fullmatch(recorded) and not is_stop and (call is None or call.name != recorded):
            name, output.name = name_of(output), f"{output.name}/attached"
            stops[output] = _stopped(output)
            stops[output].name = name
            model.graph.outputs[index] = stops[output]
    _check_lost(names, merged, [*stopped, *stops.values()])


def stop_at_padding(model: ir.Model) -> None:
    """Stop gradients at the elements of an embedding whose index is its `padding_idx`, in training only.

    The exported program has it as the third argument of `aten.embedding`; -1, the default, is none.
    """
    found: list[tuple[ir.Value, ir.Value, PaddingIndex]] = []
    for node in model.graph:
        if node.op_type == "Gather" and node.domain == "":
            call = _PADDING.search(EXPORTED_CALL.read(node) or "")
            padding = PaddingIndex.read(node) or (call and PaddingIndex(int(call[1])))
            indices, y = node.inputs[1], node.outputs[0]
            if padding is not None and indices is not None and not y.is_graph_output():
                found.append((indices, y, padding))
    if any(x.type is None for indices, y, _ in found for x in (indices, y)):
        ensure_typed(model)
    for indices, y, padding in found:
        uses = list(y.uses())
        with Emitter(model) as op:
            padded = op.Unsqueeze(op.Equal(indices, op.constant(padding.index, like=indices)), [-1])
            chosen = InferenceForm(same_as=2).write(op.Where(padded, stop_gradient(op, y), y))
        redirect(uses, chosen)


def _stopped(x: ir.Value) -> ir.Value:
    """Return a value without a gradient."""
    assert x.graph is not None
    node = ir.node("Identity", [x])
    x.graph.append(node)
    node.outputs[0].name = f"{x.name}/detached"
    return STOP_GRADIENT.mark(like(node.outputs[0], x))


class _Names:
    """Map values of a file to their names in the exported program."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program, self.graph = program, program.model.graph
        self.inputs = dict(zip(map(name_of, self.graph.inputs), program.inputs, strict=False))
        computed = (self.of(y) for node in self.graph.all_nodes() for y in node.outputs)
        self.present = {*program.paths, *program.inputs, *computed}

    def of(self, x: ir.Value) -> str:
        """Return the name of a value in the exported program, or its own."""
        name, node = name_of(x), x.producer()
        if node is None:
            return self.inputs.get(name) or self.program.placeholders.get(name, name)
        call = Call.of(node)
        return call.name if call is not None and x.is_graph_output() and len(node.outputs) == 1 else name

    def traced_separately(self) -> list[str]:
        """Return the values that code in `torch.no_grad()` or `torch.autocast` may have computed from weights."""
        traces = {node: _STACK_TRACE.read(node) or "" for node in self.graph}
        inside = {node for node, trace in traces.items() if trace.startswith(_TRACED)}
        if not any(trace and node not in inside for node, trace in traces.items()):
            return []
        outside = {node for node in self.graph.all_nodes() if node not in inside and Call.of(node)}
        made = [y for node in traces if node in inside for y in node.outputs]
        ends = [y for y in made if y.is_graph_output() or not outside.isdisjoint(y.consumers())]
        return [name_of(y) for y in ends if _may_carry(y) and self.depends_on_weights(y)]

    def depends_on_weights(self, x: ir.Value) -> bool:
        """Return whether a parameter may affect a value."""
        weights = {y for node in ancestors([x]) for y in node.inputs if y is not None and is_weight(y)}
        names = {name for y in weights for name in (*self.program.folded_from(y), name_of(y))}
        return any(map(self.program.is_parameter, names))

    def detached(self, call: Call, nodes: Sequence[ir.Node], merged: dict[str, ir.Value]) -> list[_Edge]:
        """Return the edges by which nodes of a call read a detached value, and collect values merged with others."""
        if call.detaches:
            return []
        own = {y for node in nodes for y in node.outputs}
        read = [(node, i, x) for node in nodes for i, x in enumerate(node.inputs) if x is not None]
        edges = [edge for edge in read if edge[2] not in own and not self._is_literal(edge[2])]
        pairs = self._in_order(call, edges) or self._by_name(call, edges)
        for name, (_, _, x) in pairs:
            producer = Call.of(x.producer())
            if producer and name not in self.present and call_of(name) == call_of(producer.name):
                merged[name] = x
        lost = [edge for name, edge in pairs if self._is_gone(name)]
        gone = [name for name in call.arguments if self._is_gone(name)]
        if gone and not lost and len({x for _, _, x in edges}) < len(edges):
            raise _lost(f"{gone[0]!r}, which {call.name!r} reads")
        return [edge for edge in lost if _may_carry(edge[2])]

    def _in_order(self, call: Call, edges: Sequence[_Edge]) -> list[tuple[str, _Edge]]:
        """Pair the arguments of a call with its edges in order, if all names agree that are known."""
        pairs = list(zip(call.arguments, edges, strict=False))
        agree = all(name == self.of(edge[2]) or name not in self.present for name, edge in pairs)
        return pairs if agree and len(call.arguments) == len(edges) else []

    def _by_name(self, call: Call, edges: Sequence[_Edge]) -> list[tuple[str, _Edge]]:
        """Pair edges with unknown arguments: those that no known argument explains."""
        unknown = list(dict.fromkeys(name for name in call.arguments if name not in self.present))
        left = [edge for edge in edges if self.of(edge[2]) not in call.arguments]
        values = list(dict.fromkeys(edge[2] for edge in left))
        if unknown and all(map(self._is_gone, unknown)):
            return [(unknown[0], edge) for edge in left]
        if len(unknown) != len(values):
            return []
        names = dict(zip(values, unknown, strict=True))
        return [(names[edge[2]], edge) for edge in left]

    def _is_gone(self, name: str) -> bool:
        return bool(_DETACH.fullmatch(name)) and name not in self.present

    def _is_literal(self, x: ir.Value) -> bool:
        """Return whether a value is a constant inside of a call, which the call's arguments do not name."""
        node = x.producer()
        if node is not None:
            return node.op_type == "Constant"
        return x.is_initializer() and bool(_INNER.fullmatch(name_of(x))) and not x.is_graph_input()


def _lines(node: ir.Node) -> list[str]:
    """Return the lines of the program, in a node's stack trace, that detach a value."""
    trace = _STACK_TRACE.read(node) or ""
    return [line.strip() for line in trace.splitlines() if re.search(r"\.detach_?\(\)", line)]


def _may_carry(x: ir.Value) -> bool:
    return x.dtype is None or x.dtype.is_floating_point()


def _lost(what: str) -> GraphoptError:
    return GraphoptError(
        f"expected a file that says where gradients stop, found that PyTorch's exporter merged or dropped {what}: "
        f"{EXPORT_ANEW}"
    )


def _check_lost(names: _Names, merged: dict[str, ir.Value], stopped: Sequence[ir.Value]) -> None:
    """Refuse or report values whose `detach` the exporter may have dropped or merged with others."""
    graphs = names.program.model.graphs()
    stops = {node for x in stopped if (node := x.producer()) is not None and names.depends_on_weights(x)}
    notes = [EXPORTED_CALL.read(node) for node in names.graph.all_nodes()]
    notes += [FOLDED_FROM.read(x) for graph in graphs for x in graph.initializers.values()]
    mentioned = {int(match[1] or 0) for note in notes for match in re.finditer(_MENTIONED, note or "")}
    missing = sorted(set(range(max(mentioned, default=0))) - mentioned)
    dropped = [f"detach_{number}" if number else "detach" for number in missing]
    nodes = [node for x in stopped for node in (x.producer(), *x.consumers()) if node is not None]
    nodes += [maker for node in nodes for x in node.inputs if x and (maker := x.producer())]
    covered = {line for node in nodes for line in _lines(node)}
    lines = dict.fromkeys(line for node in names.graph.all_nodes() for line in _lines(node))
    lost = [line for line in lines if line not in covered]
    for name, x in merged.items():
        if stops & ancestors([x]) or ((dropped or lost) and names.depends_on_weights(x)):
            raise _lost(f"{name!r} with {x.name!r}, which may differ in what is detached")
    if dropped or lost:
        where = f" in {lost[0]!r}" if lost else ""
        warnings.warn(
            f"PyTorch's exporter kept no record of a detach(){where}, so a gradient flows there: {EXPORT_ANEW}, except "
            f"of detach_(), or name the value in StopGradient",
            stacklevel=2,
        )
    if unclear := names.traced_separately():
        warnings.warn(
            f"the file does not say whether gradients stop at {', '.join(map(repr, unclear[:4]))}: PyTorch's exporter "
            f"marks code in torch.no_grad() and in torch.autocast alike. A gradient flows there: for torch.no_grad(), "
            f"set gradient=[passes.StopGradient({unclear[:4]}), passes.Gradient()]",
            stacklevel=2,
        )
