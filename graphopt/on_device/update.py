"""Write the update as a separate model, which updates sequences of parameters and moments in place."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from graphopt.errors import GraphoptError
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.opsets import ORT_TRAINING_IR_VERSION, ORT_TRAINING_OPSET
from passes.clipping import Clip, ClipGlobalNorm, ClipValue
from passes.optimizers import SGD, Adam, AdamW, Optimizer

# the names of a, rate and b in an update a - rate * b of sequences a and b
_Step = tuple[str, str, str]


def update_model(optimizer: Optimizer, clips: Sequence[Clip]) -> onnx.ModelProto:
    """Return the model with which onnxruntime-training's Optimizer updates parameters.

    A model may contain only one node with an optimizer's kernel at its top level. Earlier arithmetic, such as momentum,
    is in a branch of an If, where SGDOptimizerV2 computes a - rate * b in place on sequences. Optimizer stores the
    moments, also in its checkpoints.

    Raises:
        GraphoptError: the optimizer or a clipping has no kernel, or parameters are in groups.
    """
    if optimizer.groups:
        raise GraphoptError(
            f"{type(optimizer).__name__}: groups: expected none on a device, whose Optimizer has one rate and one "
            f"weight decay for all parameters, found {len(optimizer.groups)}: leave them out"
        )
    lines, gradients = [], "gradients"
    for i, clip in enumerate(clips):
        lines.append(f"clipped_{i} = {_clipping(clip, gradients)}")
        gradients = f"clipped_{i}"
    before: list[_Step] = []
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
    spec = AdamW(beta1=float(adam.beta1), beta2=float(adam.beta2), epsilon=float(adam.epsilon)).kernel(decay)
    assert spec is not None
    op_type, attributes = spec
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


def _one_by_one(updates: Sequence[_Step]) -> str:
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
