"""Compile a pipeline into the graphs that onnxruntime-training's Module and Optimizer run on a device.

The training model accumulates gradients in buffers. The optimizer model updates all parameters from them in place. The
training model also updates other state in place: running statistics, and the counter that seeds the masks of Dropout.

orttraining/training_api/module.cc and optimizer.cc of onnxruntime 1.19 define the layout of these graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.errors import GraphoptError
from graphopt.graph import inference, metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source, load
from graphopt.graph.metadata import RUNTIME, original_name
from graphopt.graph.names import COUNTERS, gradient_of, next_of
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.opsets import ORT_TRAINING_IR_VERSION, ORT_TRAINING_OPSET
from graphopt.graph.roles import (
    STATE,
    TRAINING_RUNTIME,
    Role,
    clear_role,
    needs_training_runtime,
    role_of,
    set_role,
    with_role,
)
from graphopt.graph.state import take_initial
from graphopt.graph.unroll import Unroll
from graphopt.graph.values import name_of
from graphopt.on_device.update import update_model
from graphopt.pipeline import Pipeline, Step
from passes.accumulate import Accumulate
from passes.clipping import Clip
from passes.optimizers import Optimizer
from passes.schedules import Schedule

RESET = "lazy_reset_grad"
_RESERVED = ("_grad", "_grad.accumulation.buffer", "_grad.accumulation.out")
_REFUSED = {  # steps of a pipeline, and why
    Schedule: "whose program sets the rate: leave it out, and call Optimizer.set_learning_rate each step",
    Accumulate: "where Module adds gradients up until lazy_reset_grad(): leave it out, and call Optimizer.step less "
    "often",
    Unroll: "whose program calls Module for each step: leave it out",
}
COUNTED = 2**24  # the largest count that float32 represents exactly


@dataclass(frozen=True)
class OnDevice:
    """Hold the three graphs from which a device trains, and their initial values.

    Args:
        training: computes the loss and accumulates gradients in buffers; its state is plain inputs.
        evaluation: computes the loss and the model's outputs, in inference form, from the same state.
        optimizer: updates the parameters.
        trained: the parameters by name.
        untrained: other state by name: running statistics and counters.
        learning_rate: the initial rate.
    """

    training: ir.Model
    evaluation: ir.Model
    optimizer: onnx.ModelProto
    trained: dict[str, np.ndarray]
    untrained: dict[str, np.ndarray]
    learning_rate: float


def compile_on_device(source: Source, pipeline: Pipeline) -> OnDevice:
    """Compile an inference model by a pipeline, its optimizer and clipping to kernels of onnxruntime-training.

    Raises:
        GraphoptError: onnxruntime-training does not support the model or a step of the pipeline.
    """
    model = load(source)
    if with_role(model, Role.NEXT):
        raise GraphoptError(
            "on-device artifacts: expected an inference model, found a training graph: "
            "pass the model that it was compiled from, and the pipeline"
        )
    steps = [item for step in pipeline.values() for item in step]
    optimizers = [item for item in steps if isinstance(item, Optimizer)]
    if len(optimizers) != 1:
        raise GraphoptError(f"pipeline: expected one optimizer, found {len(optimizers)}: name one")
    _refuse(steps)
    (optimizer,) = optimizers
    update = update_model(optimizer, [item for item in steps if isinstance(item, Clip)])
    rest = {
        name: [item for item in step if not isinstance(item, Optimizer | Clip)]
        for name, step in pipeline.items()
    }
    model = Pipeline(**rest)(model)
    version = model.opset_imports[""]
    if version > ORT_TRAINING_OPSET or model.ir_version > ORT_TRAINING_IR_VERSION:
        raise GraphoptError(
            f"on-device artifacts: expected a model of opset {ORT_TRAINING_OPSET} and IR version "
            f"{ORT_TRAINING_IR_VERSION} or older, found {version} and {model.ir_version}, which onnxruntime-training "
            f"cannot load: export the model with an older opset"
        )
    initial = take_initial(model)
    _fix_hyperparameters(model, initial)
    for value in with_role(model, Role.COUNTER):
        _count_in_float32(model, value)
        initial[name_of(value)] = initial[name_of(value)].astype(np.float32)
    _check(model)
    evaluation = _evaluation(model)
    _update_in_place(model)
    state = {x: initial[name_of(x)] for x in with_role(model, *STATE)}
    for x in [*state, *with_role(evaluation, *STATE)]:
        x.name = _own_name(x)
    return OnDevice(
        training=model,
        evaluation=evaluation,
        optimizer=update,
        trained={name_of(x): array for x, array in state.items() if role_of(x) is Role.PARAMETER},
        untrained={name_of(x): array for x, array in state.items() if role_of(x) is not Role.PARAMETER},
        learning_rate=optimizer.learning_rate,
    )


def _own_name(value: ir.Value) -> str:
    """Return the name of a state in the model before compilation."""
    if role_of(value) is Role.COUNTER:
        return f"{COUNTERS}{value.name}"
    return original_name(value)


def _refuse(steps: Sequence[Step]) -> None:
    for step in steps:
        for kind, reason in _REFUSED.items():
            if isinstance(step, kind):
                raise GraphoptError(f"{kind.__name__.lower()}={step}: expected none on a device, {reason}")


def _count_in_float32(model: ir.Model, counter: ir.Value) -> None:
    """Store a counter as float32, the only type that is updated in place; it wraps around after 2^24 steps."""
    uses = list(counter.uses())
    following = next(y for y in model.graph.outputs if y.name == next_of(counter))
    place = list(model.graph.outputs).index(following)
    with Emitter(model) as op:
        counter.type = ir.TensorType(ir.DataType.FLOAT)
        count = op.Cast(counter, to=ir.DataType.INT64)
        for user, index in uses:
            user.replace_input_with(index, count)
        wrapped = op.Cast(op.Mod(following, COUNTED), to=ir.DataType.FLOAT)
    clear_role(following)
    wrapped.name, following.name = following.name, None
    model.graph.outputs[place] = set_role(wrapped, Role.NEXT)
    model.graph.sort()


def _fix_hyperparameters(model: ir.Model, initial: dict[str, np.ndarray]) -> None:
    """Turn hyperparameters into constants, because a device's program does not feed them."""
    for value in with_role(model, Role.HYPERPARAMETER):
        model.graph.inputs.remove(value)
        clear_role(value)
        value.const_value = ir.tensor(initial.pop(name_of(value)), name=value.name)
        model.graph.register_initializer(value)


def _check(model: ir.Model) -> None:
    """Raise an error for types that the kernels do not support, and for names that Module reserves."""
    if not with_role(model, Role.GRADIENT):
        raise GraphoptError("pipeline: expected a pass that differentiates, found none: add passes.Gradient")
    for value in with_role(model, *STATE):
        if value.dtype != ir.DataType.FLOAT:
            raise GraphoptError(
                f"on-device artifacts: expected parameters of float32, which {TRAINING_RUNTIME} updates, found "
                f"{value.name!r} of {value.dtype}: convert the model"
            )
    for value in with_role(model, Role.DATA, Role.TARGET, Role.SAMPLE_WEIGHT):
        if name_of(value).endswith(_RESERVED) or value.name == RESET:
            raise GraphoptError(
                f"on-device artifacts: expected names that {TRAINING_RUNTIME} does not reserve, found input "
                f"{value.name!r}: rename it in the model"
            )


def _evaluation(model: ir.Model) -> ir.Model:
    """Return the model that computes losses and outputs in inference form; Module passes it all state."""
    outputs = with_role(model, Role.LOSS, Role.METRIC, Role.PREDICTION, Role.SOURCE)
    part = inference.extract(model, outputs)
    metadata.copy(model, part)
    RUNTIME.remove(part)
    read = {x.name: x for x in part.graph.inputs}
    data = [x for x in part.graph.inputs if role_of(x) not in STATE]
    part.graph.inputs[:] = data + [read.get(x.name) or _twin(x) for x in with_role(model, *STATE)]
    return part


def _twin(value: ir.Value) -> ir.Value:
    twin = ir.Value(name=value.name, type=value.type, shape=value.shape)
    metadata.copy(value, twin)
    return twin


def _update_in_place(model: ir.Model) -> None:
    """Order the inputs as Module's documentation requires, and accumulate each gradient in its buffer.

    A gradient overwrites its buffer if `lazy_reset_grad` is true. The next value of other state always overwrites it.
    """
    graph = model.graph
    results = {name_of(y): y for y in with_role(model, Role.GRADIENT, Role.NEXT)}
    graph.outputs[:] = with_role(model, Role.LOSS)
    state = with_role(model, *STATE)
    graph.inputs[:] = [x for x in graph.inputs if role_of(x) not in STATE] + state
    reset = ir.Value(name=RESET, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    with Emitter(model) as op:
        always = op.constant([True])
    for x in state:
        if role_of(x) is Role.PARAMETER:
            buffer = ir.Value(name=f"{_own_name(x)}_grad.accumulation.buffer", type=x.type, shape=x.shape)
            graph.inputs.append(buffer)
            inputs = [buffer, results[gradient_of(x)], reset]
        else:
            inputs = [x, results[next_of(x)], always]
        clear_role(inputs[1])
        node = ir.node("InPlaceAccumulatorV2", inputs, domain=MICROSOFT)
        (done,) = node.outputs
        done.name = f"{_own_name(x)}_grad.accumulation.out"
        done.type, done.shape = reset.type, reset.shape
        graph.append(node)
        graph.outputs.append(done)
    graph.inputs.append(reset)
    needs_training_runtime(model)
    RemoveUnusedNodesPass()(model)
    graph.sort()
