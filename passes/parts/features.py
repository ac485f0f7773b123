"""Cut a training graph behind its frozen layers, which compute the same features of a row in each epoch."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.operators import LAYOUT
from graphopt.graph.roles import Role, set_role, with_role
from passes.augment import AUGMENTED
from passes.free_batch import values_of_rows
from passes.parts import extract_part, remove_unused_inputs


def cut_features(model: ir.Model) -> tuple[ir.Model, ir.Model]:
    """Return the frozen layers of a training graph, from data to features, and the graph that reads features instead.

    Features are results of frozen layers, each of which has a row for each row of the data and depends on that row
    only: nothing in them trains, is drawn, or is gathered from a batch.

    Args:
        model: the training graph, which is not changed.

    Raises:
        GraphoptError: nothing that trains reads such results, or the rows are augmented.
    """
    if any(map(AUGMENTED.is_set, model.graph)):
        raise GraphoptError(
            "cache_features: expected rows that are the same in each epoch, found that augment changes them: leave out "
            "augment or cache_features"
        )
    model = model.clone()
    data = with_role(model, Role.DATA)
    left: set[ir.Node | None] = set()  # nodes that stay in the rest
    while True:
        of_rows = values_of_rows(model, data, left)
        inner = {node for y in of_rows if (node := y.producer()) is not None}
        computed = [y for y in of_rows if y.producer() is not None]
        features = [y for y in computed if any(node not in inner for node in y.consumers())]
        wrong = {y.producer() for y in computed if y.is_graph_output() or (y in features and not of_rows[y])}
        if not wrong:
            break
        left |= wrong
    if all(node.op_type in LAYOUT for node in inner):
        raise GraphoptError(
            "cache_features: expected frozen layers before those that train, found none that treat each row by itself: "
            "freeze some, for example by adapter=passes.Head(), or leave it out"
        )
    rest = extract_part(model, [*features, *model.graph.inputs], list(model.graph.outputs))
    for x in rest.graph.inputs[: len(features)]:
        set_role(x, Role.DATA)
    remove_unused_inputs(rest)
    read = {x.name for x in rest.graph.inputs}
    frozen = extract_part(model, data, [y for y in features if y.name in read])
    remove_unused_inputs(frozen)
    return frozen, rest
