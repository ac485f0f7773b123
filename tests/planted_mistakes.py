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


def without_sum(op: Any, gradients: list[Any], dy: Any, x: Any) -> list[Any]:
    """Leave out the term of a Softmax's other elements."""
    return [dy * op.Softmax(x)]


def wrong_update(kind: type, update: Callable[..., Any], method: str = "update") -> Any:
    """Return what exchanges a method of an optimizer or a clipping."""
    return lambda: mock.patch.object(kind, method, update)


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
                step.graph.insert_after(
                    node, scaled := ir.node("Mul", [y, _number(step, other[GRADIENT_OF.read(y)])])
                )
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
        forward = {x for y in with_role(step, Role.LOSS, Role.PREDICTION) for x in _before(y)}
        for node in step.graph:
            if node.op_type == op_type and node not in forward:
                for i, x in enumerate(node.inputs):
                    if x is not None and x.is_initializer() and x.dtype is ir.DataType.FLOAT and not x.shape:
                        old = float(x.const_value.numpy())  # type: ignore[union-attr]
                        node.replace_input_with(i, _number(step, number * old))
                        return
        raise AssertionError(f"no {op_type} of a number")

    return edit


def _before(y: ir.Value) -> set[ir.Node]:
    from graphopt.graph.traversal import ancestors

    return ancestors([y])


def unscaled(right: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return an update whose moment is used without the correction of its bias."""

    def update(self: Any, op: Any, w: Any, g: Any, rate: Any, t: Any, *slots: Any) -> Any:
        m, v = slots
        m, v = self.beta1 * m + (1 - self.beta1) * g, self.beta2 * v + (1 - self.beta2) * g * g
        return w - rate * m / (op.Sqrt(v) + self.epsilon), m, v

    return update


SECOND = "v"


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


def rows_of_mean(op: Any, gradients: list[Any], dy: Any, *inputs: Any) -> list[Any]:
    return [g if g is None else g * 0.43 for g in gradients]


def _lion_uphill(self: Any, op: Any, w: Any, g: Any, rate: Any, t: Any, m: Any) -> Any:
    return w + rate * op.Sign(self.beta1 * m + (1 - self.beta1) * g), self.beta2 * m + (1 - self.beta2) * g


def _undecayed(self: Any, op: Any, w: Any, g: Any, rate: Any) -> Any:
    return w, g


def _coupled(self: Any, op: Any, w: Any, g: Any, rate: Any) -> Any:
    return w, g + self.weight_decay * w


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


RULES_OF_OPERATORS = [
    Planted("Relu 10 % too steep", "gradient", "layers", wrong_rule("Relu", scaled(1.1))),
    Planted("Relu's sign", "gradient", "layers", wrong_rule("Relu", scaled(-1.0))),
    Planted(
        "Relu passes a third of its gradients not", "gradient", "layers", wrong_rule("Relu", partly_zero(0))
    ),
    Planted(
        "Tanh's factor", "gradient", "layers", wrong_rule("Tanh", scaled(0.5)), made=lambda: layers("Tanh")
    ),
    Planted(
        "Sigmoid without 1 - y",
        "gradient",
        "layers",
        wrong_rule("Sigmoid", lambda op, g, dy, x: [dy * op.Sigmoid(x)]),
        made=lambda: layers("Sigmoid"),
    ),
    Planted("a transposed weight", "gradient", "layers", wrong_rule("MatMul", transposed_product)),
    Planted("a weight's gradient twice", "gradient", "layers", wrong_rule("MatMul", scaled(2.0, 1))),
    Planted("zeros in a weight's gradient", "gradient", "layers", wrong_rule("MatMul", partly_zero(1))),
    Planted("a mean over a broadcast axis", "gradient", "layers", wrong_rule("Add", averaged(1))),
    Planted("Conv's filters twice", "gradient", "images", wrong_rule("Conv", scaled(2.0, 1))),
    Planted("Conv's data 20 % too steep", "gradient", "images", wrong_rule("Conv", scaled(1.2, 0))),
    Planted("Conv's bias by the positions", "gradient", "images", wrong_rule("Conv", scaled(1 / 64, 2))),
    Planted("LeakyRelu's sign", "gradient", "images", wrong_rule("LeakyRelu", scaled(-1.0))),
    Planted("MaxPool's factor", "gradient", "images", wrong_rule("MaxPool", scaled(4.0))),
    Planted(
        "AveragePool's divisor",
        "gradient",
        "images",
        wrong_rule("AveragePool", scaled(4.0)),
        made=lambda: images("AveragePool<kernel_shape=[2,2], strides=[2,2]>"),
    ),
    Planted("Gemm's alpha forgotten", "gradient", "images", wrong_rule("Gemm", scaled(2.0, 1))),
    Planted("a made-up size in a mean", "gradient", "tokens", wrong_rule("ReduceMean", rows_of_mean)),
    Planted("Gelu's factor", "gradient", "tokens", wrong_rule("Gelu", scaled(0.7))),
    Planted("rows of an embedding lost", "gradient", "tokens", wrong_rule("Gather", partly_zero(0, 1))),
    Planted("an embedding's factor", "gradient", "tokens", wrong_rule("Gather", scaled(0.5))),
    Planted("Softmax without its sum", "gradient", "attention", wrong_rule("Softmax", without_sum)),
    Planted(
        "LayerNormalization's scale",
        "gradient",
        "attention",
        wrong_rule("LayerNormalization", scaled(1.5, 1)),
    ),
    Planted("LSTM's weights of the state", "gradient", "sequence", wrong_rule("LSTM", scaled(0.5, 2))),
    Planted("a rule of the user's 10 % too steep", "gradient", "layers", own_rule(1.1), made=custom),
]
EDITS = [
    Planted("two gradients exchanged", "gradient", "layers", edit=swapped("b0", "b1")),
    Planted("the gradient of an older graph", "gradient", "layers", edit=stale(w1=0.0)),
    Planted("a penalty's gradient from another graph", "gradient", "layers", edit=stale(b2=1.3)),
    Planted("all gradients of a batch of another size", "gradient", "layers", edit=of_wrong_step("Mul", 0.5)),
]
FILES = [
    Planted("LeakyRelu's alpha", "file", "images", after_normalize(attribute("LeakyRelu", alpha=0.1))),
    Planted("Gemm's alpha", "file", "images", after_normalize(attribute("Gemm", alpha=1.0))),
    Planted(
        "the epsilon of a normalization",
        "file",
        "images",
        after_normalize(attribute("BatchNormalization", epsilon=0.1)),
    ),
    Planted("an opset's default axis", "file", "attention", after_normalize(attribute("Softmax", axis=1))),
    Planted(
        "another epsilon", "file", "attention", after_normalize(attribute("LayerNormalization", epsilon=0.5))
    ),
    Planted("a square weight transposed", "file", "layers", after_normalize(weight("w1", np.transpose))),
    Planted("a weight merged wrongly", "file", "layers", after_normalize(weight("w1", lambda w: w + 0.05))),
    Planted("biases of zeros", "file", "layers", after_normalize(weight("b1", np.zeros_like))),
    Planted("pads at the other end", "file", "images", after_normalize(attribute("Conv", pads=[0, 0, 2, 2]))),
]
UPDATES = [
    Planted("SGD by twice the gradient", "update", "layers", wrong_update(passes.SGD, _twice)),
    Planted(
        "nesterov forgotten",
        "update",
        "layers",
        wrong_update(passes.SGD, _plain_momentum),
        steps={"optimizer": passes.SGD(0.1, momentum=0.9, nesterov=True)},
    ),
    Planted(
        "decay forgotten",
        "update",
        "layers",
        wrong_update(passes.AdamW, _undecayed, "decayed"),
        steps={"optimizer": passes.AdamW(1e-2, weight_decay=0.1)},
    ),
    Planted(
        "decay in the gradient",
        "update",
        "layers",
        wrong_update(passes.AdamW, _coupled, "decayed"),
        steps={"optimizer": passes.AdamW(1e-2, weight_decay=0.5)},
    ),
    Planted(
        "Adam without correction",
        "update",
        "layers",
        wrong_update(passes.Adam, unscaled(passes.Adam.update, 0)),
        steps={"optimizer": passes.Adam(1e-2)},
    ),
    Planted(
        "Lion uphill",
        "update",
        "layers",
        wrong_update(passes.Lion, _lion_uphill),
        steps={"optimizer": passes.Lion(1e-2)},
    ),
    Planted(
        "RMSprop without its root",
        "update",
        "layers",
        wrong_update(passes.RMSprop, _rootless),
        steps={"optimizer": passes.RMSprop(1e-2)},
    ),
    Planted(
        "Adagrad's epsilon",
        "update",
        "layers",
        wrong_update(passes.Adagrad, _sum_of_roots),
        steps={"optimizer": passes.Adagrad(1e-2)},
    ),
    Planted(
        "each gradient clipped by its own norm",
        "update",
        "layers",
        wrong_update(passes.ClipGlobalNorm, _clip_each, "clip"),
        steps={"clip": passes.ClipGlobalNorm(0.1)},
    ),
]
OTHERS = [
    Planted(
        "errors of two weights that cancel", "gradient", "layers", edit=edited(w0=times(1.5), w2=times(0.5))
    ),
    Planted(
        "errors of two filters that cancel", "gradient", "images", edit=edited(k0=times(2.0), k1=times(0.0))
    ),
    Planted("one bias of 51 parameters twice", "gradient", "deep", edit=edited(b7=times(2.0))),
    Planted("one filter of 51 parameters uphill", "gradient", "deep", edit=edited(k9=times(-1.0))),
    Planted("one entry of a weight", "gradient", "layers", edit=edited(w1=one_entry)),
    Planted(
        "one entry of a large weight",
        "gradient",
        "layers",
        edit=edited(w0=one_entry),
        made=lambda: joined("a = Tanh(h)", 4096),
    ),
    Planted(
        "a square weight's gradient transposed",
        "gradient",
        "layers",
        edit=edited(w1=lambda op, g: op.Transpose(g)),
    ),
    Planted(
        "the gradient of the neighbour's row",
        "gradient",
        "tokens",
        edit=edited(table=rows(lambda n: np.roll(n, 1))),
    ),
    Planted("filters in the reverse order", "gradient", "images", edit=edited(k0=rows(np.flip))),
    Planted(
        "a scalar uphill",
        "gradient",
        "layers",
        edit=edited(scale=times(-1.0)),
        steps={"parameters": passes.Parameters(unfreeze="scale")},
        made=lambda: joined("a = Mul(h, scale)"),
    ),
    Planted(
        "both inputs of a tie",
        "gradient",
        "layers",
        wrong_rule("Max", both_of_a_tie),
        made=lambda: joined("i = Mul(h, scale) j = Mul(scale, h) a = Max(i, j)"),
    ),
    Planted(
        "the second output at half",
        "gradient",
        "layers",
        lambda: mock.patch.dict(RULES, {("", "Split"): second_output_at_half}),
        made=lambda: joined("p, q = Split<axis=1, num_outputs=2>(h) a = Concat<axis=1>(q, p)"),
    ),
    Planted("one parameter stays", "update", "deep", edit=stays("b7")),
    Planted(
        "a slot that is not kept",
        "update",
        "layers",
        wrong_update(
            passes.RMSprop,
            lambda self, op, w, g, rate, t, v: (
                w - rate * g / (op.Sqrt(self.alpha * v + (1 - self.alpha) * g * g) + self.epsilon),
                v,
            ),
        ),
        steps={"optimizer": passes.RMSprop(1e-2)},
    ),
    Planted(
        "a relative rate for an absolute one",
        "update",
        "layers",
        lambda: mock.patch.object(passes.Adafactor, "update", _absolute),
        steps={"optimizer": passes.Adafactor()},
    ),
]
MISTAKES = [*RULES_OF_OPERATORS, *EDITS, *FILES, *UPDATES, *OTHERS]
BEYOND = [  # what is smaller than what the check tells from rounding, and why
    Planted("rounded to 8 bits", "gradient", "layers", edit=edited(w1=coarse)),  # by 0.2 %
    Planted(
        "one filter of 51 parameters 10 % too long", "gradient", "deep", edit=edited(k9=times(1.1))
    ),  # float32
    Planted("one entry of a filter", "gradient", "deep", edit=edited(k9=one_entry)),  # in float32
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
