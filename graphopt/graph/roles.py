"""Record the role of each input and output of a training graph, and read which labels a target accepts."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph import metadata
from graphopt.graph.metadata import Note, expect
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.values import next_of

TRAINING_RUNTIME = "onnxruntime-training"


class Role(enum.Enum):
    """List the roles in the contract between compiler and executor."""

    DATA = "data"  # input: fed each step
    TARGET = "target"  # input: the target that a loss compares a prediction with
    SAMPLE_WEIGHT = "sample_weight"  # input: a weight for each row
    PARAMETER = "parameter"  # state: trained
    SLOT = "slot"  # state: of an optimizer or another pass, such as momentum
    STATISTIC = "statistic"  # state: gathered from the data, such as a running mean
    COUNTER = "counter"  # state: the number of steps done
    HYPERPARAMETER = "hyperparameter"  # input with a default: feed it to change it
    SEED = "seed"  # input NAME.seed: the derivative of what follows the model with respect to output NAME
    LOSS = "loss"  # output: the objective
    PREDICTION = "prediction"  # output: the model's own
    SOURCE = "source"  # output: an input of detached outputs
    METRIC = "metric"  # output: another number of the forward pass, such as a penalty
    DIAGNOSTIC = "diagnostic"  # output: a number of the step itself, such as the gradient's norm
    SAVED = "saved"  # output of a forward part: a value for its backward part
    PASSED = "passed"  # output of a stage of `grad`, which later stages read as data
    SUMMED = "summed"  # output of a stage of `grad`, whose sum over all workers is an input of later stages
    GRADIENT = "gradient"  # output NAME.grad: the derivative of the objective by NAME; input of `apply`
    NEXT = "next"  # output NAME.next: replaces state NAME


_BY_NAME = {role.value: role for role in Role}
FED = (Role.DATA, Role.TARGET, Role.SAMPLE_WEIGHT)
STATE = frozenset({Role.PARAMETER, Role.SLOT, Role.STATISTIC, Role.COUNTER})
INPUTS = frozenset({*FED, *STATE, Role.HYPERPARAMETER, Role.SEED, Role.SAVED, Role.SUMMED, Role.GRADIENT})
OF_MODEL = (None, Role.DATA, Role.PARAMETER, Role.STATISTIC, Role.PREDICTION, Role.SOURCE)
OUTPUTS = frozenset(set(Role) - INPUTS | {Role.SAVED, Role.SUMMED, Role.GRADIENT})


def role_of(value: ir.Value) -> Role | None:
    """Return the role of a graph input or output, or None if it has none."""
    name = metadata.ROLE.read(value)
    if name is not None and name not in _BY_NAME:
        raise GraphoptError(f"{value.name!r}: {unknown('role', name, _BY_NAME)}")
    return None if name is None else _BY_NAME[name]


def set_role(value: ir.Value, role: Role) -> ir.Value:
    """Set the role of `value` and return the value."""
    metadata.ROLE.write(value, role.value)
    return value


def needs_training_runtime(model: ir.Model) -> None:
    """Record that a model contains operators of com.microsoft that only onnxruntime-training supports."""
    metadata.RUNTIME.write(model, TRAINING_RUNTIME)
    model.opset_imports.setdefault(MICROSOFT, 1)


def with_role(model: ir.Model, *roles: Role) -> list[ir.Value]:
    """Return the model's inputs and outputs that have one of `roles`, in graph order."""
    return [value for value in [*model.graph.inputs, *model.graph.outputs] if role_of(value) in roles]


def data_inputs(model: ir.Model) -> list[ir.Value]:
    """Return the inputs that a batch feeds, also those of a model without roles."""
    return [x for x in model.graph.inputs if role_of(x) in (None, Role.DATA) and not x.is_initializer()]


def outputs_of_model(model: ir.Model) -> list[ir.Value]:
    """Return the outputs of the file that a training graph has: its loss if the file computes it itself."""
    return with_role(model, Role.PREDICTION, Role.SOURCE) or with_role(model, Role.LOSS)


def updated(model: ir.Model) -> list[ir.Value]:
    """Return the parameters that a training graph updates."""
    following = {y.name for y in with_role(model, Role.NEXT)}
    return [w for w in with_role(model, Role.PARAMETER) if next_of(w) in following]


def check_trains(model: ir.Model, name: str) -> None:
    """Raise an error unless a model is a training graph that updates its state; `name` is who needs one."""
    if with_role(model, Role.NEXT):
        return
    if with_role(model, Role.LOSS):
        raise GraphoptError(
            f"{name}: expected a training graph, found one without an optimizer: compile it with "
            "optimizer=passes.AdamW() or another one"
        )
    raise GraphoptError(
        f"{name}: expected a training graph, found an inference model: compile it first, "
        "graphopt.compile(model, loss=passes.CrossEntropy(), optimizer=passes.AdamW())"
    )


def check_inference(model: ir.Model, name: str) -> None:
    """Raise an error, which names a pass, if a model has state."""
    own = next((x for x in model.graph.inputs if role_of(x) in STATE), None)
    if own is not None:
        raise GraphoptError(
            f"{name}: expected an inference model, found a training graph with the state {own.name!r}: compile the "
            "original model"
        )


def only(model: ir.Model, role: Role, needed_by: str) -> ir.Value:
    """Return the only value with `role`; errors name the pass that needs it."""
    values = with_role(model, role)
    if role is Role.LOSS and not values:
        raise GraphoptError(
            f"{needed_by} needs a loss, found none: set loss=passes.MeanSquaredError() or another loss, or "
            f"loss=passes.OwnLoss(OUTPUT) if the model computes its own"
        )
    if len(values) != 1:
        raise GraphoptError(
            f"{needed_by} needs one value with role {role.value!r}, found {len(values)}: "
            f"run the pass that makes it first"
        )
    return values[0]


@dataclass(frozen=True)
class Labels:
    """Describe the labels that a loss accepts."""

    low: float
    high: float
    ignored: int | None = None  # a further label, which the loss ignores
    between: bool = True  # accept all numbers between `low` and `high`, too
    several: bool = True  # labels are class numbers; otherwise the two labels of a binary loss

    def __str__(self) -> str:
        if not self.several:
            return f"labels {self.low} and {self.high}"
        return f"labels from {self.low} {'on' if self.high == math.inf else f'to {self.high}'}"

    def all(self) -> np.ndarray:
        """Return all possible labels in order."""
        return np.arange(self.low, self.high + 1) if self.several else np.array([self.low, self.high])

    def fit(self, array: np.ndarray) -> bool:
        """Return whether all labels are valid; for class numbers, by one pass over the array."""
        if self.several and array.dtype.kind == "i" and array.size:
            # As unsigned numbers, negative ones are larger than all others.
            unsigned = array.view(np.dtype(f"u{array.itemsize}"))
            if np.maximum.reduce(unsigned, axis=None) <= self.high:
                return True
        return not self.wrong(array).any()

    def wrong(self, array: np.ndarray) -> np.ndarray:
        """Return a mask of the invalid labels."""
        wrong: np.ndarray = (array < self.low) | (array > self.high)
        if not self.between:
            wrong |= (array != self.low) & (array != self.high)
        if self.ignored is not None:
            wrong &= array != self.ignored
        return wrong


def labels_of(target: ir.Value) -> Labels | None:
    """Return the labels that a target accepts, or None if it does not contain labels."""
    spec = TargetSpec.read(target)
    if spec is None:
        return None
    if spec.task == "classification" and not spec.target_probabilities:
        return Labels(0, math.inf if spec.classes is None else spec.classes - 1, spec.ignore_index)
    if spec.labels is not None:
        low, high = spec.labels
        # Numbers between 0 and 1 are probabilities. Between -1 and 1, they are invalid.
        return Labels(low, high, between=low >= 0, several=False)
    return None


@dataclass(frozen=True)
class TargetSpec(
    Note,
    key="graphopt.metric",
    expected=(
        "the name of an output and the task: regression, classification with an axis and whole numbers, or binary "
        "with a threshold and two labels"
    ),
):
    """Describe how a loss compares a prediction with its target, to compute metrics and check labels.

    Args:
        output: the name of the prediction.
        task: `regression`, `binary` or `classification`.
        axis, classes, ignore_index, target_probabilities: options of a classification; see `CrossEntropy`.
        from_logits: whether a classification predicts logits; otherwise, it predicts probabilities.
        shift: by how many places the target is ahead of the prediction along axis 1, as in a causal language model.
        label_smoothing: the share of such a target that the loss spreads over all classes.
        threshold, labels: options of a binary loss: predictions above `threshold` mean the second label.
    """

    output: str
    task: str
    axis: int | None = None
    classes: int | None = None
    ignore_index: int | None = None
    target_probabilities: bool = False
    from_logits: bool = True
    shift: int = 0
    label_smoothing: float = 0.0
    threshold: float | None = None
    labels: tuple[float, float] | None = None

    def check(self) -> None:
        needed = {"regression": (), "binary": (self.threshold, self.labels), "classification": (self.axis,)}
        expect(None not in needed[self.task], self.shift in (0, 1))
