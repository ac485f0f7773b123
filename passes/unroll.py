"""Several steps in one call: the step becomes the body of a Scan over stacked batches."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graphopt import state
from graphopt.emitter import Emitter, like
from graphopt.errors import GraphoptError
from graphopt.rewriting import Pass
from graphopt.roles import Role, role_of, with_role

__all__ = ["Unroll"]


@dataclass(frozen=True)
class Unroll(Pass):
    """Take the batches of several steps, stacked along a new first axis, and carry the state from one to the next.

    What a step reports comes back stacked; the state is that after the last step, bit for bit.

    Args:
        steps: how many steps a call does; None: as many as batches are fed.

    Raises:
        GraphoptError: `steps` is less than 1, or nothing is trained.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise GraphoptError(f"unroll.steps: expected 1 or more, or null, found {self.steps}")

    def rewrite(self, model: ir.Model) -> None:
        graph = model.graph
        following = {str(y.name).removesuffix(".next"): y for y in with_role(model, Role.NEXT)}
        if not following:
            raise GraphoptError(
                "Unroll needs a training graph, found one without state to update: add an optimizer"
            )
        carried = [x for x in graph.inputs if x.name in following]
        fed = [x for x in graph.inputs if role_of(x) in (Role.DATA, Role.TARGET, Role.SAMPLE_WEIGHT)]
        reported = [y for y in graph.outputs if role_of(y) is not Role.NEXT]
        results = [following[str(x.name)] for x in carried] + reported
        outer = {x: _twin(x) for x in carried} | {x: _twin(x, self._first()) for x in fed}
        stacked = [_twin(y, self._first()) for y in reported]

        nodes = list(graph)
        graph.outputs.clear()
        graph.inputs[:] = [outer.get(x, x) for x in graph.inputs]
        graph.remove(nodes)
        for value in {*outer, *results}:
            value.name = f"{value.name}.of_step"
            value.metadata_props.clear()
        body = ir.Graph([*carried, *fed], [], nodes=nodes, name="step")
        with Emitter(model) as op:
            inner = op.within(body)
            for y in results:
                taken = y.producer() not in nodes or y in body.outputs
                body.outputs.append(like(inner.Identity(y), y) if taken else y)
            outputs = [_twin(x) for x in carried] + stacked
            op.Scan(*outer.values(), body=body, num_scan_inputs=len(fed), _outputs=outputs)
        graph.outputs.extend(stacked)
        for x, y in zip(carried, outputs, strict=False):
            state.set_next(model, outer[x], y)

    def _first(self) -> int | ir.SymbolicDim:
        return ir.SymbolicDim("steps") if self.steps is None else self.steps


def _twin(x: ir.Value, first: int | ir.SymbolicDim | None = None) -> ir.Value:
    """Return another value of the name, type and role of `x`, with a first axis more where one is given."""
    shape = x.shape if first is None or x.shape is None else ir.Shape([first, *x.shape])
    twin = ir.Value(name=x.name, type=x.type, shape=shape, metadata_props=dict(x.metadata_props))
    twin.meta.update(x.meta)
    return twin
