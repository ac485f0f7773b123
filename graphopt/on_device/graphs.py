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
from graphopt.graph.metadata import ROLE, RUNTIME, original_name
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.opsets import ORT_TRAINING_IR_VERSION, ORT_TRAINING_OPSET, check_training_version
from graphopt.graph.roles import (
    STATE,
    TRAINING_RUNTIME,
    Role,
    needs_training_runtime,
    role_of,
    set_role,
    with_role,
)
from graphopt.graph.state import demote, detached, take_initial
from graphopt.graph.unroll import Unroll
from graphopt.graph.values import COUNTERS, gradient_of, like, name_of, next_of, redirect
from graphopt.pipeline import Pipeline
from passes.accumulate import Accumulate
from passes.averages import Average
from passes.clipping import Clip, ClipGlobalNorm, ClipValue
from passes.optimizers import SGD, Adam, AdamW, Optimizer
from passes.schedules import Schedule

RESET = "lazy_reset_grad"
_RESERVED = ("_grad", "_grad.accumulation.buffer", "_grad.accumulation.out")
_REFUSED = {  # steps of a pipeline, and why
    Schedule: "whose program sets the rate: leave it out, and call Optimizer.set_learning_rate each step",
    Accumulate: "where Module adds gradients up until lazy_reset_grad(): leave it out, and call Optimizer.step less "
    "often",
    Average: "whose Optimizer keeps none: leave it out, or average the checkpoints' parameters in your program",
    Unroll: "whose program calls Module for each step: leave it out",
}
COUNTED = 2**24  # the largest count that float32 represents exactly


@dataclass(frozen=True)
class OnDevice:
    """Hold the three graphs from which a device trains, and their initial values."""

    training: ir.Model  # computes the loss and accumulates gradients in buffers; its state is plain inputs
    evaluation: ir.Model  # computes the loss and the model's outputs, in inference form, from the same state
    optimizer: onnx.ModelProto
    trained: dict[str, np.ndarray]  # the parameters
    untrained: dict[str, np.ndarray]  # running statistics and counters
    names: dict[str, str]  # in a training graph, of both, by their names here
    optimizer_pass: Optimizer


def optimizer_of(pipeline: Pipeline) -> Optimizer:
    """Return the only optimizer of a pipeline."""
    optimizers = [item for step in pipeline.values() for item in step if isinstance(item, Optimizer)]
    if len(optimizers) != 1:
        raise GraphoptError(f"pipeline: expected one optimizer, found {len(optimizers)}: name one")
    return optimizers[0]


def moments(optimizer: Optimizer) -> dict[str, float]:
    """Return the factors by which the slots of a parameter become the moments on a device, by the slots' names.

    Slots that are sums become means: see `passes.Adam`.
    """
    factors = (
        (1 - optimizer.beta1, 1 - optimizer.beta2)
        if isinstance(optimizer, Adam) and not optimizer.fused
        else (1.0, 1.0)
    )
    return dict(zip(optimizer.slots(), factors, strict=False))


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
    optimizer = optimizer_of(pipeline)
    for kind, reason in _REFUSED.items():
        for step in steps:
            if isinstance(step, kind):
                raise GraphoptError(f"{kind.__name__.lower()}={step}: expected none on a device, {reason}")
    update = update_model(optimizer, [item for item in steps if isinstance(item, Clip)])
    rest = {name: [item for item in step if not isinstance(item, Optimizer | Clip)] for name, step in pipeline.items()}
    model = Pipeline(**rest).with_rules(pipeline.rules)(model)
    advice = ", which onnxruntime-training cannot load: export the model with an older opset"
    check_training_version(model, "on-device artifacts", advice)
    with detached(model):
        for value in with_role(model, Role.HYPERPARAMETER):  # which a device's program does not feed
            demote(model, value)
    initial = take_initial(model)
    for value in with_role(model, Role.COUNTER):
        _count_in_float32(model, value)
        initial[name_of(value)] = initial[name_of(value)].astype(np.float32)
    _check(model)
    evaluation = _evaluation(model)
    _update_in_place(model)
    state = {x: initial[name_of(x)] for x in with_role(model, *STATE)}
    names = {_own_name(x): name_of(x) for x in state}
    for x in [*state, *with_role(evaluation, *STATE)]:
        x.name = _own_name(x)
    return OnDevice(
        training=model,
        evaluation=evaluation,
        optimizer=update,
        trained={name_of(x): array for x, array in state.items() if role_of(x) is Role.PARAMETER},
        untrained={name_of(x): array for x, array in state.items() if role_of(x) is not Role.PARAMETER},
        names=names,
        optimizer_pass=optimizer,
    )


def _own_name(value: ir.Value) -> str:
    """Return the name of a state in the model before compilation."""
    if role_of(value) is Role.COUNTER:
        return f"{COUNTERS}{value.name}"
    return original_name(value)


def _count_in_float32(model: ir.Model, counter: ir.Value) -> None:
    """Store a counter as float32, the only type that is updated in place; it wraps around after 2^24 steps."""
    uses = list(counter.uses())
    following = next(y for y in model.graph.outputs if y.name == next_of(counter))
    place = list(model.graph.outputs).index(following)
    with Emitter(model) as op:
        counter.type = ir.TensorType(ir.DataType.FLOAT)
        count = op.Cast(counter, to=ir.DataType.INT64)
        redirect(uses, count)
        wrapped = op.Cast(op.Mod(following, COUNTED), to=ir.DataType.FLOAT)
    ROLE.remove(following)
    wrapped.name, following.name = following.name, None
    model.graph.outputs[place] = set_role(wrapped, Role.NEXT)
    model.graph.sort()


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
    part.graph.inputs[:] = [x for x in part.graph.inputs if role_of(x) not in STATE]
    for x in with_role(model, *STATE):
        twin = read.get(x.name) or like(ir.Value(name=x.name), x)
        metadata.copy(x, twin)
        part.graph.inputs.append(twin)
    return part


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
        ROLE.remove(inputs[1])
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


def _check_options(optimizer: Optimizer) -> None:
    """Raise an error if Optimizer lacks an option."""
    if optimizer.groups:
        raise GraphoptError(
            f"{type(optimizer).__name__}: groups: expected none on a device, whose Optimizer has one rate and one "
            f"weight decay for all parameters, found {len(optimizer.groups)}: leave them out"
        )
    if optimizer.slot_bits != 32:
        raise GraphoptError(
            f"{type(optimizer).__name__}: slot_bits: expected 32 on a device, whose Optimizer keeps float32, "
            f"found {optimizer.slot_bits}: leave it out"
        )


def update_model(optimizer: Optimizer, clips: Sequence[Clip]) -> onnx.ModelProto:
    """Return the model with which onnxruntime-training's Optimizer updates parameters.

    A model may contain only one node with an optimizer's kernel at its top level. Earlier arithmetic, such as momentum,
    is in a branch of an If, where SGDOptimizerV2 computes a - rate * b in place on sequences. Optimizer stores the
    moments, also in its checkpoints.

    Raises:
        GraphoptError: the optimizer or a clipping has no kernel, or parameters are in groups.
    """
    _check_options(optimizer)
    lines, gradients = [], "gradients"
    for i, clip in enumerate(clips):
        lines.append(f"clipped_{i} = {_clipping(clip, gradients)}")
        gradients = f"clipped_{i}"
    before: list[tuple[str, str, str]] = []  # the names of a, rate and b of updates a - rate * b
    if optimizer.weight_decay and not optimizer.decoupled:
        lines.append(_constant("decay", -optimizer.weight_decay))
        before.append((gradients, "decay", "params"))
    moments = ["first_order_moments"]
    if isinstance(optimizer, SGD) and type(optimizer) is SGD:
        kernel, inputs = "SGDOptimizerV2", ["rate", "params", gradients]
        if optimizer.momentum:
            if optimizer.rate_in_velocity:
                raise GraphoptError(
                    f"optimizer={optimizer}: expected rate_in_velocity=False on a device, whose program sets the rate"
                )
            (b,) = moments
            lines += _momentum(optimizer)
            before += [(b, "forget", b), (b, "remember", gradients)]
            if optimizer.nesterov:
                before.append(("params", "look_ahead", b))
            else:
                inputs[-1] = b
    elif isinstance(optimizer, Adam) and type(optimizer) in (Adam, AdamW):
        moments.append("second_order_moments")
        kernel = _adamw(optimizer)
        inputs = ["rate", "t", "params", gradients, *moments]
    else:
        raise GraphoptError(
            f"optimizer={optimizer}: onnxruntime-training has no kernel for it: use SGD, Adam or AdamW on a device"
        )
    if before:
        lines.append(_one_by_one(before))
        inputs.append("ready")
    sequences = [f"seq(float[]) {name}" for name in ("params", "gradients", *moments)]
    return onnx.parser.parse_model(
        f"""<ir_version: {ORT_TRAINING_IR_VERSION}, opset_import: ["": {ORT_TRAINING_OPSET}, "{MICROSOFT}": 1],
         producer_name: "graphopt">
        update (float[1] learning_rate, int64[1] step, {", ".join(sequences)}) => (bool updated) {{
            rate = Squeeze(learning_rate)
            t = Squeeze(step)
            {" ".join(lines)}
            updated = {MICROSOFT}.{kernel}({", ".join(inputs)})
        }}"""
    )


def _adamw(adam: Adam) -> str:
    """Return the kernel with its attributes; the gradients already include a decay that is not decoupled."""
    decay = float(adam.weight_decay) if adam.decoupled else 0.0
    beta1, beta2, epsilon = map(float, (adam.beta1, adam.beta2, adam.epsilon))
    op_type, attributes = AdamW(beta1=beta1, beta2=beta2, epsilon=epsilon, weight_decay=decay).kernel()
    typed = [f"{name}: {type(value).__name__} = {value!r}" for name, value in attributes.items()]
    return f"{op_type}<{', '.join(typed)}>"


def _momentum(sgd: SGD) -> list[str]:
    """Return lines that compute the factors of b = momentum b + (1 - dampening) g; the first step is not dampened."""
    return [
        _constant("forget", 1 - sgd.momentum),
        *([_constant("momentum", sgd.momentum), "look_ahead = Mul(rate, momentum)"] if sgd.nesterov else []),
        _constant("dampening", sgd.dampening),
        _constant("one", 1.0),
        "time = Cast<to = 1>(t)",
        "is_later = Greater(time, one)",
        "later = Cast<to = 1>(is_later)",
        "dampened = Mul(dampening, later)",
        "remember = Sub(dampened, one)",
    ]


def _clipping(clip: Clip, gradients: str) -> str:
    if isinstance(clip, ClipGlobalNorm):
        return f"{MICROSOFT}.InplaceClipGradNorm<max_norm: float = {float(clip.max_norm)!r}>({gradients})"
    if isinstance(clip, ClipValue):
        return f"""SequenceMap<body = element (float[] g) => (float[] bounded) {{
            {_constant("low", -clip.limit)}
            {_constant("high", clip.limit)}
            bounded = Clip(g, low, high)
        }}>({gradients})"""
    raise GraphoptError(f"clip={clip}: expected ClipGlobalNorm or ClipValue on a device: use one of them")


def _one_by_one(updates: Sequence[tuple[str, str, str]]) -> str:
    """Return an If that runs updates in order and outputs a flag; its condition is true but not a constant."""
    body, last = "", ""
    for i, (a, rate, b) in enumerate(updates):
        body += f"done_{i} = {MICROSOFT}.SGDOptimizerV2({rate}, {a}, {b}{last}) "
        last = f", done_{i}"
    return f"""none = Constant<value = int64 {{0}}>()
    always = Greater(t, none)
    ready = If (always) <
        then_branch = updates () => (bool {last[2:]}) {{ {body} }},
        else_branch = nothing () => (bool same) {{ same = Identity(always) }}
    >"""


def _constant(name: str, value: float) -> str:
    return f"{name} = Constant<value = float {{{float(value)!r}}}>()"
