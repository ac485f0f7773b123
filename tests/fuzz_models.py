"""Models for the fuzzer: valid ones of many kinds, with mutations of the protobuf's fields or of the file's bytes."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from builders import attention, linear, mlp, model
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from gradient_cases import CASES, Case, spaced

import graphopt
import passes
from graphopt.graph.roles import FED, Role, role_of
from graphopt.graph.values import is_floating
from graphopt.inspection.report import report

NUMBERS = [0, 1, -1, 2, 3, 7, 16, 255, 2**20, 2**31 - 1, -(2**31), 2**33, 2**40, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -1.0, 1e-45, 3e38, float("inf"), float("-inf"), float("nan")]
WORDS = [
    "",
    "x",
    "y",
    "w",
    "w.next",
    "gradient_norm",
    "fc0.weight.momentum",
    "w.momentum",
    "loss",
    "step",
    "target",
    "learning_rate",
    "ai.onnx.ml",
    "com.microsoft",
    "a" * 5000,
    "../../etc/passwd",
    "\0",
    "\N{SNOWMAN}\n",
    "%s{0}",
    "1e999",
    "-5",
    "99999999999999999999",
    "null",
    '{"inputs": {"9": "?"}, "same_as": 7}',
    '{"operator": ["Add", {}], "read": ["q"], "output": 9}',
    '{"task": "classification", "classes": -1}',
]
OWN_KEYS = [
    f"graphopt.{key}"
    for key in (
        *(
            "role",
            "original_name",
            "metric",
            "frozen",
            "gradient_of",
            "of_batch",
            "stop_gradient",
            "inference",
        ),
        *("needs_runtime", "aside", "origin", "left_out", "file", "misdeclared"),
    )
]


def _control_flow() -> onnx.ModelProto:
    return model(
        """g (float[N,3] x, bool c, int64 n) => (float[N,3] y) {
            a = MatMul(x, w)
            b = If(c) <then_branch = yes () => (float[N,3] p) { p = Mul(a, v) },
                       else_branch = no () => (float[N,3] q) { e = Tanh(a) q = Mul(e, v) }>
            z = Loop <body = body (int64 i, bool on, float[N,3] h) => (bool go, float[N,3] k) {
                go = Identity(on) m = MatMul(h, w) k = Sin(m) }> (n, , b)
            y = Softmax(z) }""",
        w=np.eye(3),
        v=np.ones(3),
    )


def _sparse() -> onnx.ModelProto:
    proto = model("g (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) y = Add(h, b) }", b=np.zeros(3))
    values = onnx.numpy_helper.from_array(np.array([1, 2], np.float32), "w")
    indices = onnx.numpy_helper.from_array(np.array([1, 5]), "at")
    proto.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, [4, 3]))
    return proto


def _scan() -> onnx.ModelProto:
    return model(
        """g (float[3] s, float[T,3] x) => (float[3] last, float[T,3] y) {
            last, y = Scan <num_scan_inputs = 1, body = b (float[3] h, float[3] i) => (float[3] k, float[3] o) {
                a = Mul(h, w) k = Add(a, i) o = Tanh(k) }> (s, x) }""",
        w=np.ones(3),
    )


def _convolutional() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    return model(
        """g (float[N,1,8,8] x) => (float[N,3] y) {
            c = Conv<pads=[1,1,1,1], strides=[1,1]>(x, k, kb)
            b = BatchNormalization(c, s, t, m, v)
            r = Relu(b)
            p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
            u = ConvTranspose<strides=[2,2], group=2>(p, kt)
            z = Resize<mode="linear">(u, , half)
            g = GlobalAveragePool(z)
            f = Flatten(g)
            d = Dropout(f)
            y = Gemm<transB=1>(d, w, wb) }""",
        k=rng.standard_normal((4, 1, 3, 3)),
        kb=np.zeros(4),
        s=np.ones(4),
        t=np.zeros(4),
        m=np.zeros(4),
        v=np.ones(4),
        kt=rng.standard_normal((4, 1, 2, 2)),
        half=np.array([1, 1, 0.5, 0.5]),
        w=rng.standard_normal((3, 2)),
        wb=np.zeros(3),
    )


def _recurrent() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    return model(
        """g (float[T,N,3] x) => (float[T,1,N,4] y, float[1,N,4] h) {
            a, b, c = LSTM<hidden_size=4>(x, w, r)
            s = Squeeze(a, one)
            y, h = GRU<hidden_size=4>(s, u, q) }""",
        w=rng.standard_normal((1, 16, 3)),
        r=rng.standard_normal((1, 16, 4)),
        u=rng.standard_normal((1, 12, 4)),
        q=rng.standard_normal((1, 12, 4)),
        one=np.array([1]),
    )


def _shapes() -> onnx.ModelProto:
    """Return what exporters write around a reshape of dynamic dimensions."""
    return model(
        """g (float[N,T,4] x, int64[N,T] ids) => (float[N,M] y) {
            s = Shape(x)
            n = Gather(s, zero)
            n1 = Unsqueeze(n, zero1)
            to = Concat<axis=0>(n1, rest)
            e = Gather(table, ids)
            h = Add(x, e)
            m = ConstantOfShape<value = float[1] {0.5}>(size)
            q = MatMul(h, m)
            start = Constant<value_int=0>()
            stop = Constant<value_int=4>()
            delta = Constant<value_int=1>()
            range = Range(start, stop, delta)
            floats = CastLike(range, q)
            p = Mul(q, floats)
            t = Tile(p, repeats)
            f = Reshape(t, to)
            y = Expand(f, ones) }""",
        zero=np.array(0),
        zero1=np.array([0]),
        rest=np.array([-1]),
        table=np.ones((5, 4)),
        size=np.array([4, 4]),
        repeats=np.array([1, 1, 2]),
        ones=np.array([1, 1]),
    )


def _quantized() -> onnx.ModelProto:
    proto = model(
        """g (float[N,4] x) => (float[N,2] y) {
            q = QuantizeLinear(x, scale, zero)
            d = DequantizeLinear(q, scale, zero)
            w = DequantizeLinear(wq, scale, zero)
            m = MatMul(d, w)
            c = Clip(m, low, high)
            y = Add(c, b) }""",
        scale=np.array(0.1),
        low=np.array(-1.0),
        high=np.array(1.0),
        b=np.zeros(2),
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(3, np.uint8), "zero"))
    weight = np.arange(8, dtype=np.uint8).reshape(4, 2)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "wq"))
    return proto


def _functions() -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
        g (float[N,4] x) => (float[N,4] y) <float[4] w = {1, 2, 3, 4}> {
            h = own.outer<gain = 2.0>(x, w)
            y = own.inner<by = 0.5>(h)
        }
        <domain: "own", opset_import: ["" : 18, "own" : 1]>
        outer <gain> (a, b) => (c) { k = Constant<value_float: float = @gain>() m = Mul(a, b) n = Mul(m, k)
            c = own.inner<by = 0.25>(n) }
        <domain: "own", opset_import: ["" : 18]>
        inner <by: float = 0.1> (a) => (c) { c = LeakyRelu<alpha: float = @by>(a) }"""
    )
    onnx.checker.check_model(proto)
    return proto


def _classical() -> onnx.ModelProto:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    X = rng.standard_normal((30, 4)).astype(np.float32)
    return to_onnx(make_pipeline(StandardScaler(), LogisticRegression()).fit(X, np.arange(30) % 3), X[:1])


def _network_of_scikit_learn() -> onnx.ModelProto:
    from skl2onnx import to_onnx
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor

    rng = np.random.default_rng(0)
    X = rng.standard_normal((30, 4)).astype(np.float32)
    warnings.simplefilter("ignore", ConvergenceWarning)
    return to_onnx(MLPRegressor(hidden_layer_sizes=(5,), max_iter=1).fit(X, X[:, 0]), X[:1])


def _sequences() -> onnx.ModelProto:
    return model(
        """g (float[N,6] x) => (float[N,3] y, seq(float[N,3]) held) {
            s = SplitToSequence<axis=1>(x, three)
            a = SequenceAt(s, zero)
            t = SequenceInsert(s, a, one)
            e = SequenceErase(t, one)
            c = ConcatFromSequence<axis=1>(e)
            y = MatMul(c, w)
            held = SequenceConstruct(y, y) }""",
        three=np.array(3),
        zero=np.array(0),
        one=np.array(1),
        w=np.ones((6, 3)),
    )


def _of_the_runtime() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[N,4] x) => (float[N,4] y) <float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}, float[4] b = {1,2,3,4}> {
            m = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(x, w)
            g = com.microsoft.BiasGelu(m, b)
            y = com.microsoft.QuickGelu(g)
        }"""
    )


def _half_compiled(steps: str) -> onnx.ModelProto:
    """Return a model as it is between passes, with what they note in its metadata."""
    pipeline = graphopt.standard(
        loss=passes.CrossEntropy(), training=passes.TrainingMode(), optimizer=passes.SGD(momentum=0.9)
    )
    return ir.to_proto(pipeline.until(steps)(_convolutional()))


def _of_case(case: Case) -> onnx.ModelProto | None:
    """Return a model of one operator; floating inputs are weights, the first of them times an input of the model."""
    graph = onnx.GraphProto(name="g")
    names: list[str] = []
    for i, given in enumerate(case.inputs):
        name = "" if given is None else f"w{i}"
        if isinstance(given, tuple):
            given = spaced(*given)
        if given is not None:
            array = given.astype(np.float32) if given.dtype == np.float64 else given
            graph.initializer.append(onnx.numpy_helper.from_array(array, name))
            if array.dtype.kind == "f" and not graph.input:
                shape = ["N", *array.shape[1:]] if array.ndim else []
                graph.input.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape))
                graph.node.append(onnx.helper.make_node("Mul", ["x", name], ["first"]))
                name = "first"
        names.append(name)
    outputs = [f"y{i}" if i else "y" for i in range(case.outputs)]
    graph.node.append(onnx.helper.make_node(case.op_type, names, outputs, **case.attributes))
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", case.opset)], ir_version=10)
    inferred = onnx.shape_inference.infer_shapes(proto).graph.value_info
    found = [value for value in inferred if value.name == "y" and value.type.tensor_type.HasField("shape")]
    graph.output.extend(found)
    proto.graph.output.extend(found)
    return proto if found and graph.input else None


@functools.cache
def operators() -> list[onnx.ModelProto]:
    """Return a valid model of each case of a gradient rule."""
    return [proto for case in CASES if (proto := _of_case(case)) is not None]


@functools.cache
def corpus() -> list[onnx.ModelProto]:
    """Return the valid models."""
    return [
        linear(),
        mlp((4, 5, 3)),
        attention(),
        _control_flow(),
        _scan(),
        _convolutional(),
        _recurrent(),
        _shapes(),
        _quantized(),
        _functions(),
        _classical(),
        _network_of_scikit_learn(),
        _sequences(),
        _of_the_runtime(),
        _sparse(),
        _half_compiled("loss"),
        _half_compiled("simplify"),
    ]


@functools.cache
def _parts() -> dict[str, list[Message]]:
    """Return all messages in the corpus, by type: what mutations put elsewhere."""
    found: dict[str, list[Message]] = {}
    for proto in corpus():
        for message in _messages(proto):
            found.setdefault(message.DESCRIPTOR.name, []).append(message)
    return found


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if _repeated(field) else [value]:
                yield from _messages(part)


def _repeated(field: FieldDescriptor) -> bool:
    return field.is_repeated


def _names(proto: onnx.ModelProto) -> list[str]:
    return [name for node in proto.graph.node for name in [*node.input, *node.output]] or ["x"]


def mutate(draw: random.Random, proto: onnx.ModelProto) -> None:
    """Change one field of one message, drawn at random, or a reference between nodes."""
    choices = [_change_field] * 6 + [_rewire] * 3 + [_claim, _retype]
    draw.choice(choices)(draw, proto)


def _change_field(draw: random.Random, proto: onnx.ModelProto) -> None:
    message = draw.choice(list(_messages(proto)))
    present = [field for field, _ in message.ListFields()]
    fields = list(message.DESCRIPTOR.fields)
    field = draw.choice(present if present and draw.random() < 0.7 else fields)
    if _repeated(field):
        _change_list(draw, proto, getattr(message, field.name), field)
    elif draw.random() < 0.2:
        message.ClearField(field.name)
    elif field.message_type is not None:
        replacements = _parts().get(field.message_type.name, [])
        if replacements:
            getattr(message, field.name).CopyFrom(draw.choice(replacements))
    else:
        _assign(message, field.name, _scalar(draw, proto, field))


def _assign(message: Message, name: str, value: Any) -> None:
    try:
        setattr(message, name, value)
    except ValueError:  # out of the field's range
        message.ClearField(name)


def _change_list(draw: random.Random, proto: onnx.ModelProto, values: Any, field: FieldDescriptor) -> None:
    action = draw.choice(["remove", "double", "swap", "add", "set", "set", "clear"])
    i = draw.randrange(len(values)) if len(values) else 0
    if field.message_type is not None:
        parts = _parts().get(field.message_type.name, [])
        if action == "add" and parts:
            values.add().CopyFrom(draw.choice(parts))
        elif action == "set" and parts and len(values):
            values[i].CopyFrom(draw.choice(parts))
        elif action == "double" and len(values):
            values.add().CopyFrom(values[i])
        elif action == "remove" and len(values):
            del values[i]
        elif action == "swap" and len(values):
            j, copy = draw.randrange(len(values)), type(values[i])()
            copy.CopyFrom(values[i])
            values[i].CopyFrom(values[j])
            values[j].CopyFrom(copy)
        elif action == "clear" and draw.random() < 0.2:
            del values[:]
        return
    try:
        if action in ("add", "set") or not len(values):
            new = _scalar(draw, proto, field)
            if action == "set" and len(values):
                values[i] = new
            else:
                values.append(new)
        elif action == "remove":
            del values[i]
        elif action == "double":
            values.append(values[i])
        elif action == "swap":
            j = draw.randrange(len(values))
            values[i], values[j] = values[j], values[i]
        elif draw.random() < 0.3:
            del values[:]
    except ValueError:
        pass


def _scalar(draw: random.Random, proto: onnx.ModelProto, field: FieldDescriptor) -> Any:
    if field.type == FieldDescriptor.TYPE_STRING:
        return draw.choice([*_names(proto), *draw.choices(WORDS, k=4)])
    if field.type == FieldDescriptor.TYPE_BYTES:
        return draw.randbytes(draw.choice([0, 1, 4, 16, 100]))
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return draw.choice([*FLOATS, draw.gauss(0, 1)])
    if field.enum_type is not None:
        return draw.choice(list(field.enum_type.values_by_number))
    return draw.choice([*NUMBERS, draw.randrange(-3, 30)])


def _rewire(draw: random.Random, proto: onnx.ModelProto) -> None:
    """Let a node read or write another value, or call another operator."""
    nodes = [message for message in _messages(proto) if isinstance(message, onnx.NodeProto)]
    if not nodes:
        return
    node = draw.choice(nodes)
    part = draw.choice(["input", "output", "op_type", "attribute"])
    if part == "op_type":
        other = draw.choice(_parts()["NodeProto"])
        node.op_type, node.domain = other.op_type, other.domain  # type: ignore[attr-defined]
        if draw.random() < 0.5:
            del node.attribute[:]
    elif part == "attribute":
        other = draw.choice(_parts()["AttributeProto"])
        if node.attribute:
            name = draw.choice(node.attribute).name
            node.attribute.add().CopyFrom(other)
            node.attribute[-1].name = name
    else:
        names = getattr(node, part)
        if names:
            names[draw.randrange(len(names))] = draw.choice(_names(proto))


def _claim(draw: random.Random, proto: onnx.ModelProto) -> None:
    """Add metadata of graphopt's own."""
    holders = [message for message in _messages(proto) if hasattr(message, "metadata_props")]
    entry = draw.choice(holders).metadata_props.add()
    entry.key = draw.choice(OWN_KEYS)
    entry.value = draw.choice([*WORDS, *(role.value for role in Role), *_names(proto)])


def _retype(draw: random.Random, proto: onnx.ModelProto) -> None:
    """Change an element type everywhere, or a declared dimension."""
    values = [*proto.graph.input, *proto.graph.output, *proto.graph.value_info]
    if not values:
        return
    value = draw.choice(values)
    if draw.random() < 0.5:
        value.type.tensor_type.elem_type = draw.choice(list(onnx.TensorProto.DataType.values()))
    else:
        dims = value.type.tensor_type.shape.dim
        if dims:
            draw.choice(dims).dim_value = draw.choice(NUMBERS)


def _flip(draw: random.Random, content: bytes) -> bytes:
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 8, 40])):
        place = draw.randrange(len(data) + 1)
        action = draw.choice(["bit", "byte", "insert", "remove", "cut"])
        if action == "bit" and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif action == "byte" and place < len(data):
            data[place] = draw.randrange(256)
        elif action == "insert":
            data[place:place] = draw.randbytes(draw.choice([1, 2, 8]))
        elif action == "remove":
            del data[place : place + draw.choice([1, 2, 8])]
        elif draw.random() < 0.1:
            del data[place:]
    return bytes(data)


def write(draw: random.Random, folder: Path) -> Path:
    """Write a model, mutated, perhaps with its weights in a file beside it."""
    proto = onnx.ModelProto()
    proto.CopyFrom(draw.choice(corpus() if draw.random() < 0.7 else operators()))
    path = folder / "model.onnx"
    if draw.random() < 0.15:
        onnx.save(proto, path, save_as_external_data=True, location="weights", size_threshold=draw.choice([0, 20]))
        proto = onnx.load(path, load_external_data=False)
        weights = folder / "weights"
        if weights.exists() and draw.random() < 0.3:
            weights.write_bytes(_flip(draw, weights.read_bytes()))
    if draw.random() < 0.8:
        for _ in range(draw.choice([1, 1, 1, 1, 2, 3])):
            mutate(draw, proto)
        path.write_bytes(proto.SerializeToString())
    else:
        path.write_bytes(_flip(draw, proto.SerializeToString()))
    return path


LOSSES = [passes.MeanSquaredError, passes.CrossEntropy]


def attempt(path: Path, folder: Path) -> None:
    """Compile a model, take a step, and write what is trained."""
    loss = LOSSES[path.stat().st_size % len(LOSSES)]()
    model = graphopt.load(path)
    trained = any(role_of(value) is not None for value in model.graph.inputs)
    if trained:  # a model between passes, or a training graph
        steps = {"optimizer": None, "loss": None, "training": None}
    else:
        steps = {"optimizer": passes.SGD(0.01, momentum=0.9), "loss": loss, "training": passes.TrainingMode()}
    report(path, graphopt.standard(**steps), batch=2).summary()
    with contextlib.suppress(graphopt.GraphoptError):
        graphopt.grad(path, [str(x.name) for x in model.graph.inputs if is_floating(x)])
    step = graphopt.compile(path, **steps)
    if path.stat().st_size % 3 == 0:  # a training graph that another program changed
        proto = ir.to_proto(step)
        mutate(random.Random(path.stat().st_size), proto)
        step = graphopt.load(proto)
    executor = graphopt.Executor(step, device="cpu", threads=1, on_nonfinite="warn")
    executor.trained()
    executor.step(_feeds(step))
    graphopt.save(executor.trained(), folder / "trained.onnx")
    graphopt.load(folder / "trained.onnx")


def _feeds(step: ir.Model) -> dict[str, np.ndarray]:
    """Return numbers that fit a training graph's inputs."""
    feeds = {}
    sizes: dict[Any, int] = {}
    for value in step.graph.inputs:
        if role_of(value) in FED:
            dims = [dim if isinstance(dim, int) else sizes.setdefault(dim.value, 2) for dim in value.shape or ()]
            if np.prod(dims, dtype=float) > 1e6:
                raise graphopt.GraphoptError("the fuzzer: an input of a million numbers")
            feeds[str(value.name)] = np.ones(dims).astype(value.dtype.numpy())  # type: ignore[union-attr]
    return feeds
