"""Run the forward and backward passes of `graphopt.ForwardBackward` with different engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.traversal import captured
from graphopt.graph.values import name_of
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.tensors import OrtValues
from graphopt.targets.target import ONNXRUNTIME

if TYPE_CHECKING:
    import onnxruntime


# Returns the gradients for the gradients with respect to the results
Backward = Callable[[OrtValues], OrtValues]


class Graphs:
    """Run two graphs on any ONNX Runtime. The saved values stay on the device between them."""

    def __init__(self, device: Device, forward: ir.Model, backward: ir.Model) -> None:
        self._forward, self._backward = (Session(device, ONNXRUNTIME.lower(part)) for part in (forward, backward))

    def forward(self, feeds: OrtValues) -> tuple[OrtValues, Backward]:
        """Return the results of the forward pass, and its backward pass."""
        outputs = self._forward.compute(feeds)
        values = {**feeds, **outputs}
        saved = {name: values[name] for name in self._backward.inputs if name in values}
        return outputs, lambda seeds: self._backward.compute({**saved, **seeds})


class Agent:
    """Run one graph with a YieldOp between forward and backward, on onnxruntime-training's TrainingAgent.

    Args:
        device: the device to run on.
        model: the graph; its inputs are those of the forward part, its outputs those of the backward part.
        results: the names of the YieldOp's inputs, in order.
        seeds: the names of the YieldOp's outputs.

    Raises:
        GraphoptError: this ONNX Runtime has no TrainingAgent, or rejects the graph.
    """

    def __init__(self, device: Device, model: ir.Model, results: Sequence[str], seeds: Sequence[str]) -> None:
        if refused := refuses_agent(device, model):
            raise GraphoptError(f"engine 'agent': expected a TrainingAgent, {refused}; or take engine='graphs'")
        self._inputs, self._gradients = value_names(model.graph.inputs), value_names(model.graph.outputs)
        self._results, self._seeds = results, seeds
        self._ort, self._c = device.ort, (c := device.ort.capi._pybind_state)
        options = device.new_session_options()
        # Values must survive between the two runs, and nodes that only backward needs run there.
        options.enable_mem_pattern = options.enable_mem_reuse = False
        options.execution_order = self._ort.ExecutionOrder.PRIORITY_BASED
        self._session = Session(device, ONNXRUNTIME.lower(model), options)
        place = device.machine.agent_memory()
        self._agent = c.TrainingAgent(
            self._session.ort._sess,
            self._inputs,
            [place] * len(results),
            self._gradients,
            [place] * len(self._gradients),
            device.index,
        )

    def forward(self, feeds: OrtValues) -> tuple[OrtValues, Backward]:
        """Return the results of the forward pass, and its backward pass."""
        state = self._c.PartialGraphExecutionState()
        inputs = [feeds[name] for name in self._inputs]
        values = self._run(self._agent.run_forward, inputs, state, self._c.OrtValueCache())

        def backward(seeds: OrtValues) -> OrtValues:
            gradients = self._run(self._agent.run_backward, [seeds[name] for name in self._seeds], state)
            return dict(zip(self._gradients, gradients, strict=True))

        return dict(zip(self._results, values, strict=True)), backward

    def _run(
        self, run: Callable[..., None], values: Iterable[onnxruntime.OrtValue], *further: object
    ) -> list[onnxruntime.OrtValue]:
        feeds, fetches = self._c.OrtValueVector(), self._c.OrtValueVector()
        for value in values:
            feeds.push_back(value._ortvalue)
        try:
            run(feeds, fetches, *further)
        except RuntimeError as error:
            raise GraphoptError(f"onnxruntime stopped: {line(error)}") from error
        return [self._ort.OrtValue(value) for value in fetches]


def refuses_agent(device: Device, model: ir.Model) -> str | None:
    """Return the reason why no TrainingAgent can run a graph, or None.

    onnxruntime-training 1.19.2 aborts the process if, in a graph with a YieldOp, a body of If, Loop or Scan uses what a
    node computes (tests/faults.py: TrainingAgent).
    """
    if not hasattr(device.ort.capi._pybind_state, "TrainingAgent"):
        return (
            f"onnxruntime {device.ort.__version__} has none: pip install onnxruntime-training==1.19.2, "
            f"which runs on Linux"
        )
    for node in model.graph:
        for value in captured(node):
            if value.producer() is not None:
                return f"none takes {node.op_type} node {node.name!r}, whose body uses {value.name!r} from around it"
    return None


def value_names(values: Iterable[ir.Value]) -> list[str]:
    return [name_of(value) for value in values]
