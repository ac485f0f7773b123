"""Report where the nodes of a step run, and why some run on the CPU although the device is another one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.operators import SHAPE_READERS
from graphopt.graph.traversal import subgraphs
from graphopt.runtime.providers.provider import CPU
from graphopt.runtime.session import Session

if TYPE_CHECKING:
    import onnxruntime


def operators_by_provider(sessions: Iterable[Session]) -> dict[str, dict[str, int]]:
    """Return for each execution provider the operators that it runs, and how many nodes of each.

    Raises:
        GraphoptError: onnxruntime is older than 1.24 and does not report this.
    """
    counts: dict[str, Counter[str]] = {}
    for session in sessions:
        for provider, node in _assigned(session):
            counts.setdefault(provider, Counter())[node.op_type] += 1
    return {name: dict(operators.most_common()) for name, operators in counts.items()}


def fallbacks(session: Session, model: ir.Model) -> dict[str, str]:
    """Return the nodes that a session for another device runs on the CPU, by name, each with the reason.

    Raises:
        GraphoptError: onnxruntime is older than 1.24 and does not report this.
    """
    nodes = {node.name: node for node in model.graph.all_nodes()}
    bodies = nodes.keys() - {node.name for node in model.graph}
    found = [node for provider, node in _assigned(session) if provider == CPU]
    return {node.name: _reason(node.op_type, nodes.get(node.name), node.name in bodies) for node in found}


def _assigned(session: Session) -> Iterator[tuple[str, onnxruntime.OrtEpAssignedNode]]:
    """Yield the nodes of a session, each with its provider."""
    if not hasattr(session.ort, "get_provider_graph_assignment_info"):
        version = session.device.ort.__version__
        raise GraphoptError(f"placement: expected onnxruntime 1.24 or later, found {version}")
    for part in session.ort.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            yield part.ep_name, node


def _reason(op_type: str, node: ir.Node | None, is_in_body: bool) -> str:
    """Return why a node runs on the CPU."""
    if node is None:
        return f"{op_type}: the runtime has made this node"
    if is_in_body:
        return f"{op_type}: in the body of one of the loops and branches, which lie on the CPU"
    if op_type in SHAPE_READERS or _reads_shapes(node):
        return f"{op_type}: arithmetic on shapes, which lie in host memory"
    if subgraphs(node):
        return f"{op_type}: the provider has no loops and branches; most of their bodies runs on the device"
    types = dict.fromkeys(str(x.dtype).lower() for x in [*node.inputs, *node.outputs] if x is not None and x.dtype)
    return f"{op_type} of {', '.join(types)}: the provider has no kernel"


def _reads_shapes(node: ir.Node) -> bool:
    """Return whether a node computes with nothing but shapes and constants."""
    waiting, seen = [node], {node}
    while waiting:
        for x in waiting.pop().inputs:
            producer = None if x is None else x.producer()
            if x is None or x.is_initializer() or (producer is not None and producer.op_type in SHAPE_READERS):
                continue
            if producer is None:
                return False
            if producer not in seen:
                seen.add(producer)
                waiting.append(producer)
    return True
