"""Replace the last product of a model, to predict other classes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.adapters.targets import AdapterTarget, targets_in
from graphopt.errors import GraphoptError, unknown
from graphopt.graph.metadata import LABELS
from graphopt.graph.origins import Kind, Origin
from graphopt.graph.postprocessing import Detached
from graphopt.graph.rewriting import Pass, Read
from graphopt.graph.shapes import ensure_typed, infer
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import constant_of, dims_of, dtype_of, is_floating, name_of, redirect
from graphopt.graph.weight_kinds import EMBEDDING, Moves, inverse, moved
from graphopt.intervals import within
from graphopt.moments import Moments
from passes.parameters import ADAPTER
from passes.quantization.calibration import watching
from passes.standardize import put_before
from passes.weights.initializers import register

_ROWS = 256  # whose features are computed to standardize them
SPREAD = 100.0  # the sum of the standard deviations of standardized features


@dataclass(frozen=True)
class Head(Pass):
    """Replace the weight and the bias of the last product before an output, and train them alone.

    The product is a MatMul, a Gemm or a Conv. The initial values are those of a Linear layer in PyTorch, uniform in
    +-1 / sqrt(inputs), or, for models that tf2onnx wrote, those of a Dense layer in Keras: uniform in
    +-sqrt(6 / (inputs + outputs)), and a bias of zeros. Every other weight is frozen, unless another adapter adds it or
    `parameters.unfreeze` names it.

    Args:
        output: the name of the output; by default, the only floating-point output. Outputs and
            notes that name the classes of the file are left out, unless the head grows and has as many.
        classes: the number of outputs of the new product, at most a million; None for as many as the
            data has classes, or columns of numbers, which `graphopt.adapt` and recipes count.
        grow: begin with the weight and the bias of the file, which are the first outputs; only further outputs have new
            initial values. It needs as many classes as the file has, or more.
        seed: the seed of the initial values.
        standardize: put nodes before the product that center its features, and divide them by one number, so that their
            standard deviations have the sum 100, or the mean square 1 if they are fewer: a step of Adam then moves an
            output by as much for features of any size, about 100 times its rate (Kingma and Ba, Adam, 2015, section
            2.1). A head that grows keeps the center. `graphopt.adapt` and recipes learn the numbers from some rows.
        center: the means of the features, in place of those that are learnt.
        scale: the number that divides them.

    Raises:
        GraphoptError: the model has no such output, no single product leads to it, what follows the product does not
            fit the number of classes, or the head is to grow and has fewer classes than the file.

    >>> steps = {"adapter": passes.Head(classes=5), "loss": passes.CrossEntropy(), "optimizer": passes.AdamW(1e-3)}
    >>> executor = graphopt.Executor(graphopt.compile(models.mlp((4,), 3, hidden=[8]), **steps))
    >>> {name: array.shape for name, array in executor.parameters.items()}
    {'layers.2.bias': (5,), 'layers.2.weight': (8, 5)}
    """

    alters: ClassVar[str] = "replaces the last layer"

    output: str | None = None
    classes: int | None = within("[1, 1000000]", None, whole=True)
    grow: bool = False
    seed: int = within("[0, inf)", 0)
    standardize: bool = False
    center: tuple[float, ...] | None = field(default=None, repr=False)
    scale: float = within("(0, inf)", 1.0)

    follows: ClassVar[bool] = True
    changes_forward = True

    @property
    def learns(self) -> bool:
        return self.classes is None or (self.standardize and self.center is None)

    def adapted(self, model: ir.Model, read: Read) -> Head:
        found = self if self.classes is not None else replace(self, classes=read.outputs())
        if not self.standardize or self.center is not None:
            return found
        ensure_typed(model)
        target = self._target(model, self._output(model))
        if target.reading.turns_x(target.node):
            return replace(found, standardize=False)
        moments = Moments(target.axis)
        parts = list(read.run(watching(model, [name_of(_features(target))]), _ROWS))
        if not parts:
            raise GraphoptError(
                "Head: expected at least a batch of rows to learn from, found fewer: leave out standardize"
            )
        for outputs in parts:
            moments.add(*outputs.values())
        deviation = moments.deviation
        scale = max(float(deviation.sum()) / SPREAD, float(np.sqrt(np.square(deviation).mean())))
        center = (0.0,) if self.grow else tuple(moments.mean.tolist())
        return replace(found, center=center, scale=(scale or 1.0) if self.scale == 1.0 else self.scale)

    def rewrite(self, model: ir.Model) -> None:
        if self.classes is None:
            raise GraphoptError(
                "Head: expected the number of classes, found none: set classes=10, for example, or let "
                "graphopt.adapt count those of the data"
            )
        if self.standardize and self.center is None:
            raise GraphoptError(
                "Head(standardize=True) learns from training rows: run graphopt.adapt(pipeline, model, data), or set "
                "center and scale"
            )
        ensure_typed(model)
        output = self._output(model)
        if not (self.grow and dims_of(output)[-1] == self.classes):
            LABELS.remove(model)
            _leave_out_names(model, output)
        target = self._target(model, output)
        if self.center is not None and len(self.center) not in (1, target.sizes[0]):
            raise GraphoptError(
                f"Head: center: expected 1 number or {target.sizes[0]}, one of each feature, found {len(self.center)}"
            )
        inputs, generator = target.sizes[0], np.random.default_rng(self.seed)
        is_keras = (model.producer_name or "").startswith("tf2onnx")
        bound = math.sqrt(6 / (inputs + self.classes)) if is_keras else 1 / math.sqrt(inputs)
        shape = list(target.w.shape.numpy())  # type: ignore[union-attr]
        shape[target.own_axis] = self.classes
        numbers, read = generator.uniform(-bound, bound, shape), target.w
        moves = target.source.moves
        if self.grow:
            self._keep(numbers, _stored(target.source.weight, moves) * self.scale, target.own_axis)
        if all(how == "transpose" for how, _ in moves):  # the new weight has the layout of the one in the file
            read = target.source.weight
            numbers = moved(numbers, inverse(moves, read.shape.numpy()))  # type: ignore[union-attr]
        following, before = _following(target.node), ancestors([target.w])
        _renew(model, read, before | {target.node}, numbers)
        if target.bias is not None:
            bias = np.zeros(self.classes) if is_keras else generator.uniform(-bound, bound, self.classes)
            if self.grow:
                self._keep(bias, _stored(target.bias), 0)
            _renew(model, target.bias, {target.node, *following}, bias)
        for node in {*following, *before}:
            for y in node.outputs:
                y.shape = None
        try:
            infer(model)
        except GraphoptError as error:
            raise GraphoptError(
                f"Head(classes={self.classes}): expected nodes after {target.node.op_type} node {target.node.name!r} "
                f"that take any number of classes, found others: {error}"
            ) from error
        if self.center is not None:
            x = _features(target)
            uses = [use for use in x.uses() if use[0] is target.node]
            put_before(model, x, uses, np.array(self.center), np.array([self.scale]), target.axis)

    def _keep(self, numbers: np.ndarray, old: np.ndarray, axis: int) -> None:
        """Write the numbers of the file's outputs over the first ones along an axis."""
        if old.shape[axis] > numbers.shape[axis]:
            raise GraphoptError(
                f"Head(grow=True): expected at least the {old.shape[axis]} classes of the file, found {self.classes}"
            )
        np.moveaxis(numbers, axis, 0)[: old.shape[axis]] = np.moveaxis(old, axis, 0)

    def _output(self, model: ir.Model) -> ir.Value:
        outputs = {name_of(y): y for y in model.graph.outputs if is_floating(y)}
        if self.output is None and len(outputs) == 1:
            return next(iter(outputs.values()))
        if self.output not in outputs:
            if self.output is None:
                raise GraphoptError(
                    f"Head: expected a model with one floating-point output, found {', '.join(outputs) or 'none'}: "
                    "name one by output"
                )
            raise GraphoptError(f"Head: {unknown('output', self.output, outputs)}")
        return outputs[self.output]

    def _target(self, model: ir.Model, output: ir.Value) -> AdapterTarget:
        """Return the last product before an output."""
        by_node = {target.node: target for target in targets_in(model)}
        node = output.producer()
        while node is not None and node not in by_node:
            computed = [x for x in node.inputs if x is not None and (x.producer() or x.is_graph_input())]
            node = computed[0].producer() if len(computed) == 1 else None
        target = None if node is None else by_node[node]
        if (
            target is None
            or target.is_weight_itself
            or target.kind == EMBEDDING
            or target.reading.has_layout
            or target.source.quantized
            or target.groups > 1
        ):
            raise GraphoptError(
                f"Head: expected a MatMul, Gemm or Conv of a weight that alone leads to output {output.name!r}, found "
                f"{'none' if node is None else f'{node.op_type} node {node.name!r}'}{_advice(target)}"
            )
        return target


def _features(target: AdapterTarget) -> ir.Value:
    """Return what the node of a target multiplies by its weight."""
    x = target.node.inputs[target.reading.x or 0]
    assert x is not None  # a product has both
    return x


def _stored(value: ir.Value, moves: Moves = ()) -> np.ndarray:
    """Return the numbers of a weight or a bias in the file, as the product reads them."""
    numbers = constant_of(value)
    if numbers is None:
        raise GraphoptError(f"Head(grow=True): expected numbers in the file, found that {value.name!r} is computed")
    return moved(numbers, moves)


def _advice(target: AdapterTarget | None) -> str:
    """Return what to do about a target that a head cannot replace."""
    if target is None:
        return ": name an output of classes by output, or train the layers of the file without a head"
    if not target.source.quantized and target.source.unrounded is None:
        return ""
    return f" of packed weights: leave them out of quantize, by leave_out={target.name!r}"


def _leave_out_names(model: ir.Model, output: ir.Value) -> None:
    """Leave out outputs that name classes of the file, such as the labels and the dictionaries of scikit-learn."""
    detached = Detached.read(model)
    if detached is None:
        return
    parts, others = list(zip(detached.parts, detached.models(), strict=True)), list[onnx.ModelProto]()
    for _, part in parts:
        tables = {x.name for x in part.graph.initializer if len(x.dims) == 1}
        nodes = part.graph.node
        if any(node.op_type == "ZipMap" or (node.op_type == "Gather" and node.input[0] in tables) for node in nodes):
            others.append(part)
    kept = [(data, part) for data, part in parts if part not in others]
    left_out = {y.name for part in others for y in part.graph.output}
    outputs = tuple(dict.fromkeys([*(x for x in detached.outputs if x not in left_out), name_of(output)]))
    read = {*outputs, *(x.name for _, part in kept for x in part.graph.input)}
    for y in [y for y in model.graph.outputs if name_of(y) not in read]:  # which the parts alone read
        model.graph.outputs.remove(y)
    Detached(outputs, tuple(data for data, _ in kept)).write(model)


def _following(node: ir.Node) -> dict[ir.Node, None]:
    found = {node: None}
    front = [node]
    while front:
        new = [user for y in front.pop().outputs for user in y.consumers() if user not in found]
        found.update(dict.fromkeys(new))
        front += new
    return found


def _renew(model: ir.Model, value: ir.Value, nodes: Collection[ir.Node], numbers: np.ndarray) -> None:
    """Make nodes read new numbers in place of a value, under its name if nothing else reads it."""
    array, name = numbers.astype(dtype_of(value).numpy()), name_of(value)
    uses = list(value.uses())
    if value.is_initializer() and all(node in nodes for node, _ in uses):
        del model.graph.initializers[name]
        value.const_value = None
        value.name = f"{name}/replaced"
    new = register(model, name, np.ascontiguousarray(array))
    ADAPTER.set(new)
    Origin(Kind.PARAMETER, "of a new head", named=True).write(new)
    redirect([use for use in uses if use[0] in nodes], new)
