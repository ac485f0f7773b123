"""Switch operators from inference to training behaviour."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata, state
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference import in_inference
from graphopt.graph.metadata import BATCH_CORRECTION, OF_BATCH, POSITIONS
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import like
from graphopt.intervals import within
from passes.gradients.rules.normalization import channels

LARGEST = 2**31 - 1
GOLDEN = 0x9E3779B1 - 2**32  # 2^32 divided by the golden ratio, as a signed number
SUMMAND = 0x846CA68B - 2**32  # Wellons, https://github.com/skeeto/hash-prospector
PYTORCH = "pytorch"  # the producer name that its exporters write
SWITCHES = {"BatchNormalization": "batch_normalization", "Dropout": "dropout"}


@dataclass(frozen=True)
class TrainingMode(Pass):
    """Use batch statistics in BatchNormalization and drop elements in Dropout, regardless of the model's mode.

    BatchNormalization's running statistics become state: running * momentum + batch * (1 - momentum). For the running
    variance, ONNX's specification, Keras and Flax divide the batch's squared deviations by their count n, and PyTorch
    by n - 1 (Bessel's correction). All of them normalize the batch with the variance by n. Dropout's mask comes from
    integer arithmetic (see `uniform`): it is the same on every runtime, differs in each step, and stays the same when
    training resumes. Evaluation, prediction and the trained model use the inference form with the updated statistics.

    A BatchNormalization without stored statistics, such as one for standardized weights, stays unchanged.

    Args:
        batch_normalization: switch BatchNormalization.
        dropout: switch Dropout.
        unbiased_variance: divide the running variance by n - 1. None does so for models exported by PyTorch. A single
            value per channel, on which PyTorch refuses to train, has the variance 0.
        seed: the seed of the masks.

    Raises:
        GraphoptError: a running statistic is not an initializer, a Dropout's ratio is not constant, or one of these
            operators is in a body of If, Loop or Scan, whose state would differ between turns.

    >>> from graphopt import models
    >>> steps = {"training": passes.TrainingMode(seed=1), "loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    >>> executor = graphopt.Executor(graphopt.compile(models.mlp((4,), 3), **steps))
    """

    batch_normalization: bool = True
    dropout: bool = True
    unbiased_variance: bool | None = None
    seed: int = within("[0, inf)", 0)

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        self._check_bodies(model)
        nodes = [node for node in model.graph if node.domain == ""]
        if self.batch_normalization:
            unbiased = self.unbiased_variance
            if unbiased is None:
                unbiased = model.producer_name == PYTORCH
            for node in nodes:
                if node.op_type == "BatchNormalization" and not _has_no_statistics(node):
                    _normalize_batch(model, node, unbiased)
        if self.dropout:
            dropouts = (node for node in nodes if node.op_type == "Dropout")
            for number, node in zip(itertools.count(), dropouts, strict=False):
                _drop(model, node, self.seed, number)

    def _check_bodies(self, model: ir.Model) -> None:
        for outer in model.graph:
            for node in (node for body in subgraphs(outer) for node in body.all_nodes()):
                if node.domain == "" and getattr(self, SWITCHES.get(node.op_type, ""), False):
                    raise GraphoptError(
                        f"{node.op_type} node {node.name!r} is in a body of {outer.op_type} node {outer.name!r}, which "
                        f"cannot have state: leave it in its inference form by TrainingMode({SWITCHES[node.op_type]}"
                        f"=False)"
                    )


def _has_no_statistics(node: ir.Node) -> bool:
    """Return whether a node computes its mean and variance from other values, in inference too."""
    return not any(_is_stored(value) for value in node.inputs[3:5] if value is not None)


def _is_stored(value: ir.Value) -> bool:
    """Return whether a value is an initializer or state, possibly after a Cast."""
    while (node := value.producer()) is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        value = node.inputs[0]
    return state.initial(value) is not None


def _normalize_batch(model: ir.Model, node: ir.Node, unbiased: bool) -> None:
    """Switch a BatchNormalization from the inference form to batch statistics."""
    x = node.inputs[0]
    assert x is not None
    if x.shape is None:
        raise GraphoptError(
            f"BatchNormalization node {node.name!r}: expected an input of known rank, found {x.name!r} of unknown "
            f"rank: declare its shape"
        )
    axes = [0, *range(2, len(x.shape))]
    momentum = node.attributes.get_float("momentum", 0.9)
    with Emitter(model) as op:
        mean = op.ReduceMean(x, axes, keepdims=0)
        centered = x - channels(op, mean, x)
        batch = mean, op.ReduceMean(centered * centered, axes, keepdims=0)
        running = []
        for index, statistic in zip((3, 4), batch, strict=True):
            old = _statistic(model, node, index)
            new = op.Cast(statistic, to=old.dtype)
            node.replace_input_with(index, new)
            if unbiased and index == 4:
                new = BATCH_CORRECTION.mark(new * _bessel(op, x, axes, old))
            state.set_next(model, old, op.Identity(momentum * old + (1 - momentum) * new))
            running.append(str(old.name))
    for output in node.outputs[1:]:
        if output.uses() or output.is_graph_output():
            raise GraphoptError(
                f"BatchNormalization node {node.name!r}: expected unused running statistics, "
                f"found that {output.name!r} is used: export the model without it"
            )
    node.resize_outputs(1)
    node.attributes.pop("training_mode", None)
    OF_BATCH.set(node)
    in_inference(node, inputs={3: running[0], 4: running[1]})


def _bessel(op: Emitter, x: ir.Value, axes: list[int], like: ir.Value) -> ir.Value:
    """Emit n / (n - 1) for n elements along the axes, or 1 if n is 1. A 16-bit number cannot represent large n."""
    wide = ir.DataType.DOUBLE if like.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
    n = op.Cast(op.ReduceProd(op.Gather(op.shape_of(x), axes), keepdims=0), to=wide)
    return op.Cast(n / op.Max(n - 1, 1), to=like.dtype)


def _statistic(model: ir.Model, node: ir.Node, index: int) -> ir.Value:
    """Return a separate running statistic of this node as state. Exporters merge equal initial values."""
    value = node.inputs[index]
    assert value is not None
    start = state.initial(value)
    if start is None:
        raise GraphoptError(
            f"BatchNormalization node {node.name!r}: expected running statistics that are initializers, found "
            f"{value.name!r}: set batch_normalization=False"
        )
    if value.is_initializer() and len(value.uses()) == 1:
        return state.promote(model, value, Role.STATISTIC)
    return state.declare(model, f"{value.name}.{node.name}", start.numpy(), Role.STATISTIC)


def _drop(model: ir.Model, node: ir.Node, seed: int, number: int) -> None:
    """Replace a Dropout by a product with a mask whose mean is 1."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None and x.dtype is not None
    given = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if given is None else ir.convenience.get_const_tensor(given)
    if given is not None and tensor is None:
        raise GraphoptError(f"Dropout node {node.name!r}: expected a constant ratio, found {given.name!r}")
    ratio = 0.5 if tensor is None else float(tensor.numpy().item())
    if not 0 <= ratio < 1:
        raise GraphoptError(f"Dropout node {node.name!r}: expected a ratio in [0, 1), found {ratio}")
    with Emitter(model) as op:
        if ratio == 0 and not any(mask.uses() or mask.is_graph_output() for mask in node.outputs[1:]):
            dropped = op.Identity(x)
        else:
            drawn = uniform(op, op.shape_of(x), state.counter(model), seed, number)
            drawn.shape = x.shape
            kept = op.Not(op.Less(drawn, _int32(op, round((2 * ratio - 1) * LARGEST))))
            dropped = x * (op.Cast(kept, to=x.dtype) * (1 / (1 - ratio)))
            if len(node.outputs) > 1:
                ir.convenience.replace_all_uses_with(node.outputs[1], kept, replace_graph_outputs=True)
        like(dropped, y)
    name = y.name
    y.name = f"{name}/replaced"
    ir.convenience.replace_all_uses_with(y, dropped, replace_graph_outputs=True)
    dropped.name = name
    metadata.copy(y, dropped)
    model.graph.remove(node, safe=True)
    producer = dropped.producer()
    assert producer is not None
    in_inference(producer, same_as=0)


def uniform(op: Emitter, shape: ir.Value, step: ir.Value, seed: int, number: int) -> ir.Value:
    """Emit uniform int32 numbers from -2^31 to 2^31 - 1, from a counter (seed, number, step, position).

    The multiples of the golden ratio spread positions, and two rounds of x -> x (128 x / 2^16 + k) modulo 2^32 mix
    them. This hash is not a published one. It needs int32 alone, which wraps on every runtime, and no bitwise
    operators, for which the CUDA provider has no kernels. 128 x has 25 bits, one of them the sign, so that a runtime
    that divides integers as float32, as OpenVINO does, divides exactly. The first k is c t + d of the step t.
    Positions start from (c t + d) t + o, a permutation of the integers modulo 2^32, as c is even and d is odd
    (Rivest, Permutation polynomials modulo 2^w, 2001). For 2^22 numbers, chi-squared tests of 1024 bins, of pairs at
    ten distances and of pairs of steps, seeds and numbers, and the spectrum, distinguish it from random numbers no
    better than they distinguish NumPy's. Masks of steps that are 2^25 apart, and parts of a mask as far apart,
    resemble each other.
    """
    even, odd, offset = np.random.default_rng([seed, number]).integers(-(2**31), 2**31, (3, 1), np.int32)
    t = op.Cast(step, to=ir.DataType.INT32)
    key = t * op.constant(even & ~1) + op.constant(odd | 1)
    count = op.Cast(op.ReduceProd(shape, keepdims=0), to=ir.DataType.INT32)
    positions = op.Range(_int32(op, 0), count, _int32(op, 1))
    POSITIONS.set(positions.producer())
    spread = positions * _int32(op, GOLDEN)
    mixed = spread + (key * t + op.constant(offset))
    for k in (key, _int32(op, SUMMAND)):
        mixed = mixed * (mixed * _int32(op, 1 << 7) / _int32(op, 1 << 16) + k)
    return op.Reshape(mixed, shape)


def _int32(op: Emitter, number: int) -> ir.Value:
    return op.constant(np.array(number, np.int32))
