"""Mistakes in gradients, files and updates, planted where the product would make them, for the check of the first step.

`python tests/planted_mistakes.py` runs each and prints what notices it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
from builders import attention, model

import graphopt
import passes
from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import GRADIENT_OF
from graphopt.graph.roles import Role, with_role
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import next_of, swap
from passes.gradients.registry import RULES

Arrays = dict[str, np.ndarray]
Edit = Callable[[ir.Model], None]
SGD = passes.SGD(0.1)


def layers(activation: str = "Relu") -> Any:
    """Return three layers, the middle one of which is square."""
    rng = np.random.default_rng(0)
    weights = {f"w{i}": rng.standard_normal(shape) / 2 for i, shape in enumerate([(4, 8), (8, 8), (8, 3)])}
    biases = {f"b{i}": rng.standard_normal(n) / 4 for i, n in enumerate([8, 8, 3])}
    return model(
        f"""g (float[N,4] x) => (float[N,3] y) {{
            p0 = MatMul(x, w0) h0 = Add(p0, b0) a0 = {activation}(h0)
            p1 = MatMul(a0, w1) h1 = Add(p1, b1) a1 = {activation}(h1)
            p2 = MatMul(a1, w2) y = Add(p2, b2)
        }}""",
        **weights,
        **biases,
    )


def images(pool: str = "MaxPool<kernel_shape=[2,2], strides=[2,2]>", opset: int = 21) -> Any:
    """Return a small convolutional network with a normalization."""
    rng = np.random.default_rng(1)
    return model(
        f"""g (float[N,2,8,8] x) => (float[N,3] y) {{
            c = Conv<pads=[1,1,1,1]>(x, k0, c0) n = BatchNormalization(c, scale, shift, mean, variance) r = Relu(n)
            d = Conv<pads=[1,1,1,1]>(r, k1, c1) l = LeakyRelu<alpha=0.02>(d) q = {pool}(l)
            f = Flatten(q) y = Gemm<alpha=0.5>(f, m, b)
        }}""",
        opset=opset,
        k0=rng.standard_normal((4, 2, 3, 3)) / 4,
        c0=rng.standard_normal(4) / 4,
        scale=1 + rng.random(4),
        shift=rng.standard_normal(4) / 4,
        mean=rng.standard_normal(4) / 4,
        variance=1 + rng.random(4),
        k1=rng.standard_normal((4, 4, 3, 3)) / 4,
        c1=rng.standard_normal(4) / 4,
        m=rng.standard_normal((64, 3)) / 8,
        b=rng.standard_normal(3) / 4,
    )


def tokens(pool: str = "ReduceMean<keepdims=0>(e, axes)") -> Any:
    """Return an embedding, whose mean over the tokens is classified."""
    rng = np.random.default_rng(2)
    return model(
        f"""g (int64[N,S] x) => (float[N,3] y) {{
            e = Gather(table, x) p = {pool} h = Gelu(p) y = Gemm(h, m, b)
        }}""",
        table=rng.standard_normal((12, 6)),
        axes=np.array([1]),
        m=rng.standard_normal((6, 3)),
        b=rng.standard_normal(3),
    )


def sequence() -> Any:
    """Return an LSTM."""
    rng = np.random.default_rng(3)
    return model(
        """g (float[5,N,4] x) => (float[5,1,N,6] y) { y, h, c = LSTM<hidden_size=6>(x, w, r, b) }""",
        w=rng.standard_normal((1, 24, 4)) / 2,
        r=rng.standard_normal((1, 24, 6)) / 2,
        b=rng.standard_normal((1, 48)) / 4,
    )


def deep(blocks: int = 12) -> Any:
    """Return a residual network of convolutions, which ONNX Runtime computes in float32, with many parameters."""
    rng = np.random.default_rng(7)
    weights = {
        "k": rng.standard_normal((8, 2, 3, 3)) / 4,
        "m": rng.standard_normal((8, 3)),
        "b": rng.random(3),
    }
    lines = ["h0 = Conv<pads=[1,1,1,1]>(x, k)"]
    for i in range(blocks):
        lines += [
            f"n{i} = BatchNormalization(h{i}, s{i}, t{i}, e{i}, v{i})",
            f"r{i} = Relu(n{i}) c{i} = Conv<pads=[1,1,1,1]>(r{i}, k{i}, b{i}) h{i + 1} = Add(h{i}, c{i})",
        ]
        weights |= {f"{name}{i}": 1 + rng.random(8) for name in "sv"}
        weights |= {f"{name}{i}": rng.standard_normal(8) / 4 for name in "teb"}
        weights[f"k{i}"] = rng.standard_normal((8, 8, 3, 3)) / 8
    body = "\n".join([*lines, f"q = GlobalAveragePool(h{blocks}) f = Flatten(q) y = Gemm(f, m, b)"])
    return model(f"g (float[N,2,8,8] x) => (float[N,3] y) {{ {body} }}", **weights)


def joined(text: str, width: int = 8) -> Any:
    """Return two layers with other operators between them, which read h and scale, and write a."""
    rng = np.random.default_rng(5)
    return model(
        f"g (float[N,4] x) => (float[N,3] y) {{ h = MatMul(x, w0) {text} y = MatMul(a, w1) }}",
        w0=rng.standard_normal((4, width)) / 2,
        w1=rng.standard_normal((width, 3)) / 2,
        scale=np.array(0.7),
    )


def batch_for(name: str) -> Arrays:
    rng = np.random.default_rng(4)
    shapes = {
        "layers": ((16, 4), (16, 3)),
        "images": ((6, 2, 8, 8), (6, 3)),
        "deep": ((6, 2, 8, 8), (6, 3)),
        "attention": ((6, 6, 4), (6, 6, 4)),
        "sequence": ((5, 8, 4), (5, 1, 8, 6)),
    }
    if name == "tokens":
        x = rng.integers(0, 12, (6, 7))
        return {"x": x, "target": rng.standard_normal((6, 3)).astype(np.float32)}
    x, target = shapes[name]
    return {"x": rng.standard_normal(x, np.float32), "target": rng.standard_normal(target, np.float32)}


NETWORKS: dict[str, Callable[[], Any]] = {
    "layers": layers,
    "images": images,
    "attention": attention,
    "tokens": tokens,
    "sequence": sequence,
    "deep": deep,
}


@dataclass(frozen=True)
class Planted:
    """Plant a mistake in the training of a network.

    Args:
        name: what is wrong.
        part: the part of the check that is to see it.
        network: the name of the network, or a function that returns one for its batch.
        plant: what makes the mistake while the network is compiled.
        edit: a change of the compiled graph.
        steps: further steps of `compile`.
    """

    name: str
    part: str
    network: str
    plant: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    edit: Edit | None = None
    steps: dict[str, Any] = field(default_factory=dict)
    made: Callable[[], Any] | None = None

    def executor(self, verify: Any = "first") -> graphopt.Executor:
        """Return an executor of the graph with the mistake."""
        with self.plant():
            steps = {"loss": passes.MeanSquaredError(), "optimizer": SGD, **self.steps}
            step = graphopt.compile((self.made or NETWORKS[self.network])(), **steps)
        if self.edit is not None:
            self.edit(step)
        return graphopt.Executor(step, threads=1, native=False, verify=verify)

    def noticed(self, verify: Any = "first") -> str:
        """Return the error of the first step, or an empty text."""
        try:
            self.executor(verify).step(batch_for(self.network))
        except GraphoptError as error:
            return str(error)
        return ""


def wrong_rule(
    op_type: str, change: Callable[..., Any], domain: str = ""
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what changes the gradients that a rule returns."""

    def planted() -> contextlib.AbstractContextManager[Any]:
        right = RULES[domain, op_type]

        @functools.wraps(right)
        def wrong(op: Any, dy: Any, *inputs: Any, **named: Any) -> Any:
            return change(op, list(right(op, dy, *inputs, **named)), dy, *inputs)

        return mock.patch.dict(RULES, {(domain, op_type): wrong})

    return planted


def scaled(factor: float, index: int = 0) -> Callable[..., Any]:
    """Return a change that multiplies one gradient."""

    def change(op: Any, gradients: list[Any], dy: Any, *inputs: Any) -> list[Any]:
        if index < len(gradients) and gradients[index] is not None:
            gradients[index] = gradients[index] * factor
        return gradients

    return change


def partly_zero(index: int, axis: int = -1) -> Callable[..., Any]:
    """Return a change that makes a third of the entries of a gradient 0."""

    def change(op: Any, gradients: list[Any], dy: Any, *inputs: Any) -> list[Any]:
        g = gradients[index] if index < len(gradients) else None
        if g is not None:
            kept = np.arange(inputs[index].shape[axis]) % 3 != 0
            gradients[index] = g * op.constant(kept.astype(np.float32))
        return gradients

    return change


def averaged(index: int) -> Callable[..., Any]:
    """Return a change that takes the mean over the batch where the sum belongs."""

    def change(op: Any, gradients: list[Any], dy: Any, *inputs: Any) -> list[Any]:
        g = gradients[index]
        if g is not None and g.shape is not None and len(g.shape) > len(inputs[index].shape):
            gradients[index] = op.ReduceMean(g, [0], keepdims=0)
        return gradients

    return change


def transposed_product(op: Any, gradients: list[Any], dy: Any, a: Any, b: Any) -> list[Any]:
    if gradients[0] is not None and b.shape[0] == b.shape[1]:
        gradients[0] = op.MatMul(dy, b)
    return gradients


def sigmoid_alone(op: Any, gradients: list[Any], dy: Any, x: Any) -> list[Any]:
    return [dy * op.Sigmoid(x)]


def without_sum(op: Any, gradients: list[Any], dy: Any, x: Any) -> list[Any]:
    """Leave out the term of a Softmax's other elements."""
    return [dy * op.Softmax(x)]


def after_normalize(edit: Edit) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return what lets the conversion of the file change it."""

    def planted() -> contextlib.AbstractContextManager[Any]:
        right = passes.Normalize.rewrite

        def wrong(self: Any, model: ir.Model) -> None:
            right(self, model)
            edit(model)

        return mock.patch.object(passes.Normalize, "rewrite", wrong)

    return planted


def attribute(op_type: str, **attributes: Any) -> Edit:
    def edit(model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type == op_type:
                for name, value in attributes.items():
                    node.attributes[name] = ir.convenience.convert_attribute(name, value)

    return edit


def weight(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    def edit(model: ir.Model) -> None:
        x = model.graph.initializers[name]
        assert x.const_value is not None
        x.const_value = ir.tensor(np.ascontiguousarray(change(x.const_value.numpy())), name=name)

    return edit


def gradients_of(step: ir.Model) -> dict[str, ir.Value]:
    return {GRADIENT_OF.read(y) or "": y for node in step.graph for y in node.outputs if GRADIENT_OF.read(y)}


def swapped(first: str, second: str) -> Edit:
    """Let two parameters of one shape have each other's gradient."""

    def edit(step: ir.Model) -> None:
        found = gradients_of(step)
        GRADIENT_OF.write(found[first], second)
        GRADIENT_OF.write(found[second], first)

    return edit


def edited(**changes: Callable[[Any, ir.Value], ir.Value]) -> Edit:
    """Change the gradients of some parameters by traced functions."""

    def edit(step: ir.Model) -> None:
        found = gradients_of(step)
        with Emitter(step) as op:
            for name, change in changes.items():
                y = found[name]
                uses = list(y.uses())
                new = change(op, y)
                new.type, new.shape = y.type, y.shape
                for user, index in uses:
                    user.replace_input_with(index, new)
                GRADIENT_OF.write(new, name)
                GRADIENT_OF.remove(y)
        step.graph.sort()

    return edit


def times(factor: float) -> Callable[[Any, ir.Value], ir.Value]:
    return lambda op, g: g * factor


def rows(order: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any, ir.Value], ir.Value]:
    """Return a change of the order of rows."""
    return lambda op, g: op.Gather(g, op.constant(order(np.arange(g.shape[0])).astype(np.int64)), axis=0)


def one_entry(op: Any, g: ir.Value) -> ir.Value:
    """Change the sign of one entry."""
    assert g.shape is not None
    signs = np.ones(g.shape.numpy(), np.float32)
    signs.ravel()[signs.size // 2] = -1
    return g * op.constant(signs)


def coarse(op: Any, g: ir.Value) -> ir.Value:
    """Round to the 8 bits of bfloat16."""
    return op.Cast(op.Cast(g, to=ir.DataType.BFLOAT16), to=ir.DataType.FLOAT)


def both_of_a_tie(op: Any, gradients: list[Any], dy: Any, *inputs: Any) -> list[Any]:
    """Give the whole gradient to each of equal inputs."""
    return [op.Where(op.Equal(x, op.Max(*inputs)), dy, op.constant(0.0, like=dy)) for x in inputs]


def second_output_at_half(op: Any, dy: Any, x: Any, sizes: Any = None, *, dys: Any, axis: int) -> list[Any]:
    return [op.Concat(dys[0], dys[1] * 0.5, axis=axis)]


def stays(name: str) -> Edit:
    """Let a step not change a parameter."""

    def edit(step: ir.Model) -> None:
        (old,) = [x for x in step.graph.inputs if x.name == name]
        (new,) = [y for y in step.graph.outputs if y.name == next_of(name)]
        with Emitter(step) as op:
            swap(new, op.Identity(old))

    return edit


def stale(**other: Any) -> Edit:
    """Take the gradients of a graph that was compiled from other weights, which are constants there."""

    def edit(step: ir.Model) -> None:
        for node in list(step.graph):
            y = node.outputs[0]
            if GRADIENT_OF.read(y) in other:
                step.graph.insert_after(node, scaled := ir.node("Mul", [y, _number(step, other[GRADIENT_OF.read(y)])]))
                new = scaled.outputs[0]
                new.type, new.shape, new.name = y.type, y.shape, f"{y.name}.stale"
                for user, index in list(y.uses()):
                    if user is not scaled:
                        user.replace_input_with(index, new)
                GRADIENT_OF.write(new, GRADIENT_OF.read(y) or "")
                GRADIENT_OF.remove(y)

    return edit


def _number(step: ir.Model, number: float) -> ir.Value:
    name = f"number.{len(step.graph.initializers)}"
    x = ir.val(name, ir.DataType.FLOAT, [], const_value=ir.tensor(np.array(number, np.float32), name=name))
    step.graph.register_initializer(x)
    return x


def of_wrong_step(op_type: str, number: float) -> Edit:
    """Change the number by which the backward pass multiplies, as of another batch or of sizes that are made up."""

    def edit(step: ir.Model) -> None:
        forward = {x for y in with_role(step, Role.LOSS, Role.PREDICTION) for x in ancestors([y])}
        for node in step.graph:
            if node.op_type == op_type and node not in forward:
                for i, x in enumerate(node.inputs):
                    if x is not None and x.is_initializer() and x.dtype is ir.DataType.FLOAT and not x.shape:
                        old = float(x.const_value.numpy())  # type: ignore[union-attr]
                        node.replace_input_with(i, _number(step, number * old))
                        return
        raise AssertionError(f"no {op_type} of a number")

    return edit


def custom() -> Any:
    """Return a network with a function that has a rule of the user's."""
    import onnx

    text = """<ir_version: 9, opset_import: ["" : 21, "v" : 1]> g (float[N,4] x) => (float[N,3] y) {
        h = MatMul(x, w0) s = v.Softened(h) y = MatMul(s, w1) }
        <domain: "v", opset_import: ["" : 21]> Softened (x) => (s) { s = Softplus(x) }"""
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in {"w0": (4, 8), "w1": (8, 3)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def own_rule(factor: float) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    def rule(op: Any, dy: Any, x: Any) -> list[Any]:
        return [factor * dy * op.Sigmoid(x)]

    return lambda: mock.patch.dict(RULES, {("v", "Softened"): rule})


def _lion_uphill(self: Any, op: Any, w: Any, g: Any, rate: Any, t: Any, m: Any) -> Any:
    return w + rate * op.Sign(self.beta1 * m + (1 - self.beta1) * g), self.beta2 * m + (1 - self.beta2) * g


def _undecayed(self: Any, op: Any, w: Any, g: Any, rate: Any) -> Any:
    return w, g


def _coupled(self: Any, op: Any, w: Any, g: Any, rate: Any) -> Any:
    return w, g + self.weight_decay * w


def _uncorrected(self: Any, op: Any, w: Any, g: Any, rate: Any, t: Any, m: Any, v: Any) -> Any:
    m, v = self.beta1 * m + (1 - self.beta1) * g, self.beta2 * v + (1 - self.beta2) * g * g
    return w - rate * m / (op.Sqrt(v) + self.epsilon), m, v


def _unkept(self: Any, op: Any, w: Any, g: Any, rate: Any, t: Any, v: Any) -> Any:
    return w - rate * g / (op.Sqrt(self.alpha * v + (1 - self.alpha) * g * g) + self.epsilon), v


def _twice(self: Any, op: Any, w: Any, g: Any, rate: Any, t: Any, *slots: Any) -> Any:
    return (w - 2 * rate * g,)


def _rootless(self: Any, op: Any, w: Any, g: Any, rate: Any, t: Any, v: Any) -> Any:
    v = self.alpha * v + (1 - self.alpha) * g * g
    return w - rate * g / (v + self.epsilon), v


def _sum_of_roots(self: Any, op: Any, w: Any, g: Any, rate: Any, t: Any, s: Any) -> Any:
    return w - rate * g / (op.Sqrt(s + g * g) + 1e-2), s + g * g


def _plain_momentum(self: Any, op: Any, w: Any, g: Any, rate: Any, t: Any, b: Any) -> Any:
    b = self.momentum * b + g
    return w - rate * b, b


def _absolute(self: Any, *given: Any, right: Any = passes.Adafactor.update) -> Any:
    return right(replace(self, scale_parameter=False), *given)


def _clip_each(self: Any, op: Any, model: ir.Model, gradients: Any) -> Any:
    """Clip each gradient by its own norm, not all by that of all."""
    norms = [op.Sqrt(op.ReduceSumSquare(g, keepdims=0)) for g in gradients]
    return [g * op.Min(self.max_norm / (n + 1e-6), 1.0) for g, n in zip(gradients, norms, strict=True)]


def rule(name: str, network: str, op_type: str, change: Callable[..., Any], made: Any = None) -> Planted:
    return Planted(name, "gradient", network, wrong_rule(op_type, change), made=made)


def gradient(name: str, network: str, edit: Edit, **more: Any) -> Planted:
    return Planted(name, "gradient", network, edit=edit, **more)


def file(name: str, network: str, edit: Edit) -> Planted:
    return Planted(name, "file", network, after_normalize(edit))


def update(name: str, method: Callable[..., Any], which: str = "update", **steps: Any) -> Planted:
    """Exchange a method of the last of the steps, or of plain descent."""
    kind = type([SGD, *steps.values()][-1])
    return Planted(name, "update", "layers", lambda: mock.patch.object(kind, which, method), steps=steps)


POOL = "AveragePool<kernel_shape=[2,2], strides=[2,2]>"
RULES_OF_OPERATORS = [
    rule("Relu 10 % too steep", "layers", "Relu", scaled(1.1)),
    rule("Relu's sign", "layers", "Relu", scaled(-1.0)),
    rule("Relu passes a third of its gradients not", "layers", "Relu", partly_zero(0)),
    rule("Tanh's factor", "layers", "Tanh", scaled(0.5), lambda: layers("Tanh")),
    rule("Sigmoid without 1 - y", "layers", "Sigmoid", sigmoid_alone, lambda: layers("Sigmoid")),
    rule("a transposed weight", "layers", "MatMul", transposed_product),
    rule("a weight's gradient twice", "layers", "MatMul", scaled(2.0, 1)),
    rule("zeros in a weight's gradient", "layers", "MatMul", partly_zero(1)),
    rule("a mean over a broadcast axis", "layers", "Add", averaged(1)),
    rule("Conv's filters twice", "images", "Conv", scaled(2.0, 1)),
    rule("Conv's data 20 % too steep", "images", "Conv", scaled(1.2, 0)),
    rule("Conv's bias by the positions", "images", "Conv", scaled(1 / 64, 2)),
    rule("LeakyRelu's sign", "images", "LeakyRelu", scaled(-1.0)),
    rule("MaxPool's factor", "images", "MaxPool", scaled(4.0)),
    rule("AveragePool's divisor", "images", "AveragePool", scaled(4.0), lambda: images(POOL)),
    rule("Gemm's alpha forgotten", "images", "Gemm", scaled(2.0, 1)),
    rule("a made-up size in a mean", "tokens", "ReduceMean", scaled(0.43)),
    rule("Gelu's factor", "tokens", "Gelu", scaled(0.7)),
    rule("rows of an embedding lost", "tokens", "Gather", partly_zero(0, 1)),
    rule("an embedding's factor", "tokens", "Gather", scaled(0.5)),
    rule("Softmax without its sum", "attention", "Softmax", without_sum),
    rule("LayerNormalization's scale", "attention", "LayerNormalization", scaled(1.5, 1)),
    rule("LSTM's weights of the state", "sequence", "LSTM", scaled(0.5, 2)),
    Planted("a rule of the user's 10 % too steep", "gradient", "layers", own_rule(1.1), made=custom),
]
EDITS = [
    gradient("two gradients exchanged", "layers", swapped("b0", "b1")),
    gradient("the gradient of an older graph", "layers", stale(w1=0.0)),
    gradient("a penalty's gradient from another graph", "layers", stale(b2=1.3)),
    gradient("all gradients of a batch of another size", "layers", of_wrong_step("Mul", 0.5)),
]
FILES = [
    file("LeakyRelu's alpha", "images", attribute("LeakyRelu", alpha=0.1)),
    file("Gemm's alpha", "images", attribute("Gemm", alpha=1.0)),
    file("the epsilon of a normalization", "images", attribute("BatchNormalization", epsilon=0.1)),
    file("an opset's default axis", "attention", attribute("Softmax", axis=1)),
    file("another epsilon", "attention", attribute("LayerNormalization", epsilon=0.5)),
    file("a square weight transposed", "layers", weight("w1", np.transpose)),
    file("a weight merged wrongly", "layers", weight("w1", lambda w: w + 0.05)),
    file("biases of zeros", "layers", weight("b1", np.zeros_like)),
    file("pads at the other end", "images", attribute("Conv", pads=[0, 0, 2, 2])),
]
UPDATES = [
    update("SGD by twice the gradient", _twice),
    update("nesterov forgotten", _plain_momentum, optimizer=passes.SGD(0.1, momentum=0.9, nesterov=True)),
    update("decay forgotten", _undecayed, "decayed", optimizer=passes.AdamW(1e-2, weight_decay=0.1)),
    update("decay in the gradient", _coupled, "decayed", optimizer=passes.AdamW(1e-2, weight_decay=0.5)),
    update("Adam without correction", _uncorrected, optimizer=passes.Adam(1e-2)),
    update("Lion uphill", _lion_uphill, optimizer=passes.Lion(1e-2)),
    update("RMSprop without its root", _rootless, optimizer=passes.RMSprop(1e-2)),
    update("Adagrad's epsilon", _sum_of_roots, optimizer=passes.Adagrad(1e-2)),
    update("each gradient clipped by its own norm", _clip_each, "clip", clip=passes.ClipGlobalNorm(0.1)),
]
UNFROZEN = {"parameters": passes.Parameters(unfreeze="scale")}
OTHERS = [
    gradient("errors of two weights that cancel", "layers", edited(w0=times(1.5), w2=times(0.5))),
    gradient("errors of two filters that cancel", "images", edited(k0=times(2.0), k1=times(0.0))),
    gradient("one bias of 51 parameters twice", "deep", edited(b7=times(2.0))),
    gradient("one filter of 51 parameters uphill", "deep", edited(k9=times(-1.0))),
    gradient("one entry of a weight", "layers", edited(w1=one_entry)),
    gradient(
        *("one entry of a large weight", "layers", edited(w0=one_entry)),
        made=lambda: joined("a = Tanh(h)", 4096),
    ),
    gradient("a square weight's gradient transposed", "layers", edited(w1=lambda op, g: op.Transpose(g))),
    gradient("the gradient of the neighbour's row", "tokens", edited(table=rows(lambda n: np.roll(n, 1)))),
    gradient("filters in the reverse order", "images", edited(k0=rows(np.flip))),
    gradient(
        *("a scalar uphill", "layers", edited(scale=times(-1.0))),
        steps=UNFROZEN,
        made=lambda: joined("a = Mul(h, scale)"),
    ),
    rule(
        *("both inputs of a tie", "layers", "Max", both_of_a_tie),
        lambda: joined("i = Mul(h, scale) j = Mul(scale, h) a = Max(i, j)"),
    ),
    Planted(
        *("the second output at half", "gradient", "layers"),
        lambda: mock.patch.dict(RULES, {("", "Split"): second_output_at_half}),
        made=lambda: joined("p, q = Split<axis=1, num_outputs=2>(h) a = Concat<axis=1>(q, p)"),
    ),
    Planted("one parameter stays", "update", "deep", edit=stays("b7")),
    update("a slot that is not kept", _unkept, optimizer=passes.RMSprop(1e-2)),
    update("a relative rate for an absolute one", _absolute, optimizer=passes.Adafactor()),
]
MISTAKES = [*RULES_OF_OPERATORS, *EDITS, *FILES, *UPDATES, *OTHERS]
BEYOND = [  # what is smaller than what the check tells from rounding, and why
    gradient("rounded to 8 bits", "layers", edited(w1=coarse)),  # by 0.2 %
    gradient("one filter of 51 parameters 10 % too long", "deep", edited(k9=times(1.1))),  # float32
    gradient("one entry of a filter", "deep", edited(k9=one_entry)),  # in float32
]


def main() -> Iterator[str]:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    seen = 0
    for mistake in MISTAKES:
        told = mistake.noticed()
        seen += bool(told)
        yield f"{mistake.part:8} {mistake.name:45} {told[:150] or 'NOT NOTICED'}"
    yield f"{seen} of {len(MISTAKES)} noticed"
    for mistake in BEYOND:
        yield f"{mistake.part:8} {mistake.name:45} {mistake.noticed()[:150] or 'not noticed, as expected'}"


if __name__ == "__main__":
    for text in main():
        print(text, flush=True)
