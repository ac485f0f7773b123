"""Switch operators from inference to training behaviour."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata, state
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import BATCH_CORRECTION, IN_TRAINING, OF_BATCH, STOP_GRADIENT
from graphopt.graph.origins import CumulativeAverage
from graphopt.graph.randomness import uniform
from graphopt.graph.rewriting import Pass, Pattern, matches, no_match
from graphopt.graph.roles import Role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import constant_number, constant_of, given, like, name_of, swap, wide_type
from graphopt.intervals import within
from passes.gradients.rules.reduction import channels
from passes.quantization.observers import Observer, observe
from passes.weights import initializers
from passes.weights.masters import promote_with_master

_LARGEST = 2**31 - 1
PYTORCH = "pytorch"  # the producer name that its exporters write
SWITCHES = {"BatchNormalization": "batch_normalization", "Dropout": "dropout"}


@dataclass(frozen=True)
class TrainingMode(Pass):
    """Use batch statistics in BatchNormalization and drop elements in Dropout, regardless of the model's mode.

    BatchNormalization's running statistics become state: running * momentum + batch * (1 - momentum). For the running
    variance, ONNX's specification, Keras and Flax divide the batch's squared deviations by their count n, and PyTorch
    by n - 1 (Bessel's correction). All of them normalize the batch with the variance by n. Nodes that share running
    statistics are calls of one module: each call, in the graph's order, goes on from the statistics of the call before.
    Dropout's mask comes from integer arithmetic (see `uniform`): it is the same on every runtime, differs in each step,
    and stays the same when training resumes. Evaluation, prediction and the trained model use the inference form with
    the updated statistics.

    Nodes that are not switched compute their inference form in training, too. A BatchNormalization without stored
    statistics, such as one for standardized weights, stays unchanged.

    The ranges of activations that `FakeQuantize` rounds follow training, as its `observer` says.

    Args:
        batch_normalization: switch BatchNormalization.
        dropout: switch Dropout.
        unbiased_variance: divide the running variance by n - 1. None does so for models exported by PyTorch. A single
            value per channel, on which PyTorch refuses to train, has the variance 0.
        seed: the seed of the masks.
        leave_out: shell-style patterns of nodes to leave in their inference form, such as a frozen BatchNormalization,
            one or several: names of nodes, or of the weights and statistics that they read.
        as_exported: switch only the nodes that the file has in training mode. A warning says so of a
            BatchNormalization, as the file itself predicts by the statistics of its batch.

    Raises:
        GraphoptError: a running statistic is not an initializer, a Dropout's ratio is not constant, `leave_out` matches
            nothing, or one of these operators is in a body of If, Loop or Scan, whose state would differ between turns.

    >>> steps = {"training": passes.TrainingMode(seed=1), "loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    >>> executor = graphopt.Executor(graphopt.compile(models.mlp((4,), 3), **steps))
    """

    batch_normalization: bool = True
    dropout: bool = True
    unbiased_variance: bool | None = None
    seed: int = within("[0, inf)", 0)
    leave_out: Pattern = None
    as_exported: bool = False
    changes_forward = True

    def rewrite(self, model: ir.Model) -> None:
        for node in list(model.graph):
            if (observer := Observer.read(node)) is not None:
                observe(model, node, observer)
        names = dict.fromkeys(x for node in model.graph.all_nodes() if _kind(node) for x in _names(node))
        for pattern in [self.leave_out] if isinstance(self.leave_out, str) else self.leave_out or []:
            if not any(matches(name, pattern) for name in names):
                where = f"TrainingMode: leave_out={pattern!r}"
                raise no_match(where, "BatchNormalization or Dropout", names, "has")
        if not names:
            return
        ensure_typed(model)
        for outer in model.graph:
            for node in (node for body in subgraphs(outer) for node in body.all_nodes()):
                if self._is_live(node):
                    kind = SWITCHES[node.op_type]
                    raise GraphoptError(
                        f"{node.op_type} node {node.name!r} is in a body of {outer.op_type} node {outer.name!r}, which "
                        f"cannot have state: leave it in its inference form by TrainingMode({kind}=False)"
                    )
        live = [node for node in model.graph if self._is_live(node)]
        by_batch = [node for node in live if node.attributes.get_int("training_mode", 0)]
        if by_batch and self.as_exported:
            warnings.warn(
                f"training: the file has {len(by_batch)} BatchNormalization in training mode, such as "
                f"{by_batch[0].name!r}, which normalize by the batch: evaluation, prediction and the trained model use "
                "running statistics, and predict something else than the file: training=None keeps it as it is, and "
                "training=passes.TrainingMode() says that this is meant",
                stacklevel=2,
            )
        for node in model.graph.all_nodes():
            if _kind(node) and node not in live and _is_in_training(node):
                if node.op_type == "Dropout":
                    node.resize_inputs(2)
                else:
                    _drop_statistics(node)
        asked = self.unbiased_variance
        unbiased = model.producer_name == PYTORCH if asked is None else asked
        for calls in _modules(model.graph):
            if any(node in live for node in calls):
                _normalize_batches(model, calls, live, unbiased)
        dropouts = (node for node in live if node.op_type == "Dropout")
        for number, node in enumerate(dropouts):
            _drop(model, node, self.seed, number)

    def _is_live(self, node: ir.Node) -> bool:
        """Return whether a node is to behave as in training."""
        kind = _kind(node)
        if kind is None or not getattr(self, kind) or any(matches(x, self.leave_out) for x in _names(node)):
            return False
        return not self.as_exported or _is_in_training(node)


def _kind(node: ir.Node) -> str | None:
    """Return the option that switches a node, or None for another node."""
    kind = SWITCHES.get(node.op_type) if node.domain == "" else None
    if kind == "batch_normalization" and not any(_stored(x) for x in node.inputs[3:5] if x is not None):
        return None  # it computes its mean and variance from other values, in inference too
    return kind


def _names(node: ir.Node) -> list[str]:
    """Return the names by which a node is known: its own, and those of the weights that it reads."""
    read = [_stored(x) for x in node.inputs[1:] if x is not None]
    return [name_of(node), *(metadata.original_name(x) for x in read if x is not None)]


def _is_in_training(node: ir.Node) -> bool:
    """Return whether the file has a node in training mode, or notes that its module is."""
    if IN_TRAINING.is_set(node):
        return True
    if node.op_type == "BatchNormalization":
        return bool(node.attributes.get_int("training_mode", 0))
    return bool(constant_of(node.inputs[2])) if len(node.inputs) > 2 else False


def _stored(value: ir.Value) -> ir.Value | None:
    """Return the initializer or state that a value is, possibly after a Cast, or None."""
    while (node := value.producer()) is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        value = node.inputs[0]
    return None if state.initial(value) is None else value


def _modules(graph: ir.Graph) -> list[list[ir.Node]]:
    """Group nodes of BatchNormalization that are calls of one module, in the order of the graph."""
    nodes = [node for node in graph if _kind(node) == "batch_normalization"]
    groups: dict[object, list[ir.Node]] = {}
    for node in nodes:
        key = tuple(node.inputs[3:5])
        others = [other for other in nodes if tuple(other.inputs[3:5]) == key]
        groups.setdefault(key if _are_calls(others) else node, []).append(node)
    return list(groups.values())


def _are_calls(nodes: Sequence[ir.Node]) -> bool:
    """Return whether nodes that read one pair of running statistics are calls of one module.

    Tools merge equal initializers of several modules, such as a mean of zeros. Modules with other weights, or whose
    statistics have been merged with something else, are not the same.
    """
    pair = nodes[0].inputs[3:5]
    if any(tensor is not None and np.ptp(tensor.numpy()) > 0 for tensor in map(state.initial, pair)):  # type: ignore[arg-type]
        return True
    separate = all(x is not None and {index for _, index in x.uses()} == {3 + i} for i, x in enumerate(pair))
    return separate and all(_are_equal(node.inputs[1:3], nodes[0].inputs[1:3]) for node in nodes)


def _are_equal(first: Sequence[ir.Value | None], second: Sequence[ir.Value | None]) -> bool:
    """Return whether values are the same, or are equal constants."""
    pairs = ((a, b, constant_of(a), constant_of(b)) for a, b in zip(first, second, strict=True))
    return all(a is b or (m is not None and n is not None and np.array_equal(m, n)) for a, b, m, n in pairs)


def _normalize_batches(model: ir.Model, calls: Sequence[ir.Node], live: Collection[ir.Node], unbiased: bool) -> None:
    """Switch the live calls of a BatchNormalization to batch statistics, and move its running statistics in turn."""
    running = [_statistic(model, calls, index) for index in (3, 4)]
    following = running
    batches = _batches(model, calls, running[0])
    for node in calls:
        if node in live:
            if batches is None:
                share: float | ir.Value = 1 - node.attributes.get_float("momentum", 0.9)
            else:
                with Emitter(model) as op:
                    batches = batches + 1
                    share = op.Cast(op.Reciprocal(batches), to=running[0].dtype)
            following = _normalize_batch(model, node, following, unbiased, share)
        elif following is not running:
            with Emitter(model) as op:
                for index, statistic in zip((3, 4), following, strict=True):
                    node.replace_input_with(index, STOP_GRADIENT.mark(op.Identity(statistic)))
        InferenceForm({3 + i: name_of(x) for i, x in enumerate(running)}).write(node.outputs[0])
    with Emitter(model) as op:
        for old, new in zip(running, following, strict=True):
            state.set_next(model, old, op.Identity(new))
        if batches is not None:
            counted = next(x for x in model.graph.inputs if x.name == _batches_of(running[0]))
            state.set_next(model, counted, op.Identity(batches))


def _batches_of(mean: ir.Value) -> str:
    return f"{name_of(mean)}.batches"


def _batches(model: ir.Model, calls: Sequence[ir.Node], mean: ir.Value) -> ir.Value | None:
    """Declare the number of batches of which running statistics are means; None if they are moving averages."""
    note = CumulativeAverage.read(calls[0])
    if note is None:
        return None
    return state.declare(model, _batches_of(mean), np.array(note.batches, np.float32), Role.STATISTIC)


def _normalize_batch(
    model: ir.Model, node: ir.Node, running: Sequence[ir.Value], unbiased: bool, share: float | ir.Value
) -> list[ir.Value]:
    """Switch a BatchNormalization to batch statistics, and return the running statistics after it.

    Args:
        share: that of the batch in the statistics after it.
    """
    x = node.inputs[0]
    if x is None or x.shape is None:
        raise GraphoptError(
            f"BatchNormalization node {node.name!r}: expected an input of known rank, found {x and x.name!r} of "
            f"unknown rank: declare its shape"
        )
    axes = [0, *range(2, len(x.shape))]
    following = []
    with Emitter(model) as op:
        mean = op.ReduceMean(x, axes, keepdims=0)
        centered = x - channels(op, mean, x)
        batch = mean, op.ReduceMean(centered * centered, axes, keepdims=0)
        for index, statistic, old in zip((3, 4), batch, running, strict=True):
            new = op.Cast(statistic, to=old.dtype)
            node.replace_input_with(index, new)
            if unbiased and index == 4:  # times n / (n - 1); a 16-bit number cannot represent large n
                n = op.Cast(op.ReduceProd(op.Gather(op.shape_of(x), axes), keepdims=0), to=wide_type(old))
                new = BATCH_CORRECTION.mark(new * op.Cast(n / op.Max(n - 1, 1), to=old.dtype))
            following.append((1 - share) * old + share * new)
    _drop_statistics(node)
    OF_BATCH.set(node)
    return following


def _drop_statistics(node: ir.Node) -> None:
    """Make a BatchNormalization read its statistics and compute none."""
    for output in node.outputs[1:]:
        if output.uses() or output.is_graph_output():
            raise GraphoptError(
                f"BatchNormalization node {node.name!r}: expected unused running statistics, "
                f"found that {output.name!r} is used: export the model without it"
            )
    node.resize_outputs(1)
    node.attributes.pop("training_mode", None)


def _statistic(model: ir.Model, calls: Sequence[ir.Node], index: int) -> ir.Value:
    """Return a separate running statistic of these nodes as state. Exporters merge equal initial values."""
    node = calls[0]
    value = node.inputs[index]
    start = None if value is None else state.initial(value)
    if value is None or start is None:
        raise GraphoptError(
            f"BatchNormalization node {node.name!r}: expected running statistics that are initializers, found "
            f"{value and value.name!r}: set batch_normalization=False"
        )
    if not value.is_initializer() or {user for user, _ in value.uses()} != {*calls}:
        value = initializers.register(model, f"{value.name}.{node.name}", start.numpy())
    return promote_with_master(model, value, Role.STATISTIC)


def _drop(model: ir.Model, node: ir.Node, seed: int, number: int) -> None:
    """Replace a Dropout by a product with a mask whose mean is 1."""
    x, y = given(node.inputs[0]), node.outputs[0]
    ratio = ratio_of(node)
    with Emitter(model) as op:
        if ratio == 0 and not any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:]):
            dropped = op.Identity(x)
        else:
            dropped, unmasked = drop(op, x, ratio, state.counter(model), seed, number)
            if len(node.outputs) > 1:
                ir.convenience.replace_all_uses_with(node.outputs[1], unmasked, replace_graph_outputs=True)
    swap(y, like(dropped, y))
    model.graph.remove(node, safe=True)
    InferenceForm(same_as=0).write(dropped)


def ratio_of(node: ir.Node) -> float:
    """Return the constant ratio of a Dropout."""
    value = node.inputs[1] if len(node.inputs) > 1 else None
    ratio = 0.5 if value is None else constant_number(value)
    if ratio is None:
        raise GraphoptError(f"Dropout node {node.name!r}: expected a constant ratio, found {value and value.name!r}")
    if not 0 <= ratio < 1:
        raise GraphoptError(f"Dropout node {node.name!r}: expected a ratio in [0, 1), found {ratio}")
    return ratio


def drop(op: Emitter, x: ir.Value, ratio: float, step: ir.Value, seed: int, number: int) -> tuple[ir.Value, ir.Value]:
    """Emit a value times a mask whose mean is 1, and whether each element stays; `uniform` draws."""
    drawn = uniform(op, op.shape_of(x), step, seed, number)
    drawn.shape = x.shape
    unmasked = op.Not(op.Less(drawn, round((2 * ratio - 1) * _LARGEST)))
    return x * (op.Cast(unmasked, to=x.dtype) * (1 / (1 - ratio))), unmasked
