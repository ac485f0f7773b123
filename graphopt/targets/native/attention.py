"""Lower attention: one kernel computes softmax(scores) V, another its gradient, and neither keeps many probabilities.

Scores are the product of queries and keys, which steps scale, add to, or mask. The gradient computes them again.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from graphopt.graph.checking import KERNELS
from graphopt.graph.sizes import Size, has_sizes, sizes_of
from graphopt.graph.values import dims_of, given, like, swap
from graphopt.targets.native.forms import NodeForms, NodeKind, number_of, rank_of
from graphopt.targets.native.library import MOST_AXES, Item, Kernel, Replacement
from graphopt.targets.native.operators import literal
from graphopt.targets.native.products import before_transposes, only_reader, permutation, transposed
from graphopt.targets.native.thirds import joined, whole_of

_MOST_STEPS, _MOST_NODES = 4, 8  # of scores: as calls.h says, and with views
_SCALE, _ADD, _KEEP, _DROP = range(4)  # as calls.h numbers them
_ASIDE = {
    "Cast",
    "ConstantOfShape",
    "Shape",
    "Concat",
    "Gather",
    "Slice",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
}  # of shapes, masks, and operands that are scaled


@dataclass(frozen=True)
class _Step:
    """What a node does to scores; `y` are those after it."""

    kind: int
    y: ir.Value
    number: float = 0.0
    tensor: ir.Value | None = None


@dataclass
class _Attention:
    """The nodes of attention and of its gradient, without those that only read shapes."""

    q: ir.Value
    k: ir.Value  # transposed
    factors: tuple[float, float]  # of q and k in the product of scores
    steps: list[_Step]
    forward: list[ir.Node]
    p: ir.Value
    is_safe: bool = False  # rows of NaN become 0
    product: ir.Node | None = None  # with the values
    backward: list[ir.Node] = field(default_factory=list)
    dy: ir.Value | None = None
    gradients: list[ir.Value | None] = field(default_factory=lambda: [None] * 3)  # of q, k transposed, and v
    muls: list[tuple[ir.Node, ir.Value]] = field(default_factory=list)  # with probabilities; their other operands
    others: set[ir.Node] = field(default_factory=set)  # that compute shapes and masks for these nodes alone


def attention_kernels(node: ir.Node, forms: NodeForms) -> list[Replacement]:
    """Return the kernels of the gradient of attention and of attention itself, by its Softmax; nothing for others."""
    form = forms.of(node) if node.op_type == "Softmax" else None
    if form is None or form.kind is not NodeKind.ROWS or node.outputs[0].dtype != ir.DataType.FLOAT:
        return []
    scores = _scores(given(node.inputs[0]), _MOST_NODES)
    if scores is None:
        return []
    product, steps, nodes = scores
    q, k = map(given, product.inputs)
    (plain_q, factor_q, nodes_q), (plain_k, factor_k, nodes_k) = _unscaled(q), _unscaled(k)
    scaled = _Attention(q, k, (factor_q, factor_k), steps, [*nodes_q, *nodes_k, *nodes, node], node.outputs[0])
    whole = _Attention(q, k, (1.0, 1.0), steps, [*nodes, node], node.outputs[0])
    for found, *before in ((scaled, plain_q, plain_k), (whole, q, k)):
        if _reads_probabilities(found) and _has_gradient(found, forms):
            found.q, found.k = before
            if (factor := math.prod(found.factors)) != 1:
                found.steps = [_Step(_SCALE, product.outputs[0], factor), *steps]
            if _fits(found):
                return _kernels(found)
    return []


@contextlib.contextmanager
def attending_to_many(library: Path) -> Iterator[None]:
    """Have this thread's calls of a library compute few tokens as many are, in a `with` block."""
    choose = ctypes.CDLL(str(library)).attend_to_many
    choose(1)
    try:
        yield
    finally:
        choose(0)


def attends(model: ir.Model) -> bool:
    """Return whether a graph with kernels has those of attention."""
    return any(node.domain == KERNELS and node.op_type.startswith("a") for node in model.graph)


# --- Scores ---


def _scores(y: ir.Value, most: int) -> tuple[ir.Node, list[_Step], list[ir.Node]] | None:
    """Return the product that scores are computed from, by how many nodes at most, the steps, and all nodes."""
    node = y.producer()
    if node is None or node.domain or not has_sizes(y) or y.dtype != ir.DataType.FLOAT or not most:
        return None
    if node.op_type == "MatMul":
        return node, [], [node]
    for x, steps in _steps(node):
        if not has_sizes(x) or (steps and sizes_of(x) != sizes_of(y)):
            continue
        before = _scores(x, most - 1)
        if before is not None:
            return before[0], [*before[1], *steps], [*before[2], node]
    return None


def _steps(node: ir.Node) -> Iterator[tuple[ir.Value, list[_Step]]]:
    """Yield what a node may have as scores, and what it does to them."""
    y, inputs = node.outputs[0], [x for x in node.inputs if x is not None]
    if len(inputs) < len(node.inputs):
        return
    if _is_view(node):
        yield inputs[0], []
    elif node.op_type in ("Mul", "Div"):
        for x, other in list(zip(inputs, reversed(inputs), strict=True))[: 1 if node.op_type == "Div" else 2]:
            number = _number(other)
            if number is not None and (node.op_type == "Mul" or number):
                yield x, [_Step(_SCALE, y, number if node.op_type == "Mul" else 1 / number)]
    elif node.op_type == "Add":
        for x, other in zip(inputs, reversed(inputs), strict=True):
            yield x, [_Step(_ADD, y, tensor=other)]
    elif node.op_type == "Where":
        mask, a, b = inputs
        for kind, x, other in ((_KEEP, a, b), (_DROP, b, a)):
            if (number := number_of(other)) is not None:
                yield x, [_Step(kind, y, number, mask)]


def _unscaled(x: ir.Value) -> tuple[ir.Value, float, list[ir.Node]]:
    """Return what an operand was before a number scaled it, the number, and the node; else itself, 1 and none."""
    node = x.producer()
    if node is None or node.op_type not in ("Mul", "Div"):
        return x, 1.0, []
    for before, steps in _steps(node):
        if has_sizes(before) and sizes_of(before) == sizes_of(x):
            return before, steps[0].number, [node]
    return x, 1.0, []


def _number(x: ir.Value) -> float | None:
    """Return the number of a constant, of its square root or of its reciprocal; None for other values."""
    node = x.producer()
    if node is None or node.op_type not in ("Reciprocal", "Sqrt"):
        return number_of(x)
    number = _number(given(node.inputs[0]))
    if number is None or number <= 0:
        return None
    return 1 / number if node.op_type == "Reciprocal" else math.sqrt(number)


def _is_view(node: ir.Node) -> bool:
    """Return whether a node keeps the rows of scores as they are."""
    x, y = node.inputs[0] if node.inputs else None, node.outputs[0]
    if node.op_type != "Reshape" or node.domain or x is None or not has_sizes(x) or not has_sizes(y):
        return False
    return min(rank_of(x), rank_of(y)) > 0 and sizes_of(x)[-1] == sizes_of(y)[-1]


def _is_zero(x: ir.Value | None) -> bool:
    node = None if x is None else x.producer()
    if node is not None and node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        return value is None or not value.as_tensor().numpy().any()
    return number_of(x) == 0


# --- What reads probabilities ---


def _readers(y: ir.Value) -> list[ir.Node]:
    return [use.node for use in y.uses() if use.node.op_type not in ("Shape", "Cast")]


def _reads_probabilities(found: _Attention) -> bool:
    """Find what reads probabilities; return whether that is attention and its gradient."""
    p = found.p
    tests = [node for node in _readers(p) if node.op_type == "IsNaN"]
    safe = [
        node
        for test in tests
        for node in _readers(test.outputs[0])
        if node.op_type == "Where" and node.inputs[0] is test.outputs[0] and _is_zero(node.inputs[1])
    ]
    chosen = [node for node in safe if node.inputs[2] is p]
    found.is_safe, found.backward = bool(tests), [*tests, *safe]
    if found.is_safe and {*_readers(p)} != {*tests, *chosen}:
        return False
    values = [node.outputs[0] for node in chosen] if found.is_safe else [p]
    for x in values:  # grows
        for node in _readers(x):
            first = node.inputs[0] is x
            if _is_view(node):
                values.append(node.outputs[0])
                found.backward.append(node)
            elif node.op_type == "MatMul" and first and found.product is None:
                found.product = node
            elif node.op_type == "Transpose" and _turns(node):
                products = _readers(node.outputs[0])
                if [each.op_type for each in products] != ["MatMul"] or found.gradients[2] is not None:
                    return False
                found.backward += [node, *products]
                found.gradients[2], found.dy = products[0].outputs[0], products[0].inputs[1]
            elif node.op_type == "Mul":
                found.muls.append((node, given(node.inputs[1 if first else 0])))
            else:
                return False
    return found.product is not None and len(found.muls) == 2


def _turns(node: ir.Node) -> bool:
    """Return whether a node exchanges the last two axes, and no others."""
    rank = rank_of(node.outputs[0])
    return permutation(node, rank) == transposed(list(range(rank)))


# --- The gradient ---


def _has_gradient(found: _Attention, forms: NodeForms) -> bool:
    """Find the gradient of the scores, p (dp - sum(p dp)), of queries and keys; return whether all is there."""
    for (last, other), (first, dp) in (found.muls, reversed(found.muls)):
        sub = other.producer()
        if sub is None or sub.op_type != "Sub" or sub.inputs[0] is not dp:
            continue
        total = given(sub.inputs[1]).producer()
        form = None if total is None else forms.of(total)
        if total is None or form is None or total.op_type != "ReduceSum" or total.inputs[0] is not first.outputs[0]:
            continue
        rank = rank_of(dp)
        if form.reduced != (rank - 1,) or rank_of(total.outputs[0]) != rank:
            continue
        found.backward += [first, total, sub, last]
        return _gradient_of_probabilities(found, dp) and _gradient_of_scores(found, last.outputs[0])
    return False


def _gradient_of_probabilities(found: _Attention, dp: ir.Value) -> bool:
    """Find the product that the gradient of probabilities is computed by; return whether it is dy v'."""
    node = dp.producer()
    if found.is_safe:  # rows of NaN stop gradients
        masked = None if node is None or node.op_type != "Sub" else _masked(given(node.inputs[0]))
        if masked is None or masked[:2] != (dp, _DROP) or masked[2].producer() not in found.backward:
            return False
        found.backward += masked[3]
        node = given(masked[3][0].inputs[0]).producer()
    while node is not None and _is_view(node):
        found.backward.append(node)
        node = given(node.inputs[0]).producer()
    if node is None or node.op_type != "MatMul" or node.domain or found.product is None:
        return False
    dy, turned_v = map(given, node.inputs)
    if found.dy is not None and _stored(found.dy) != _stored(dy):
        return False
    found.dy = dy
    found.backward.append(node)
    return _stored(turned_v) == _stored(given(found.product.inputs[1]), turned=True)


def _gradient_of_scores(found: _Attention, ds: ir.Value) -> bool:
    """Find the gradients of queries and keys; return whether the derivatives of all steps lead there."""
    scale, masks = 1.0, set[tuple[int, ir.Value | None]]()
    while True:
        readers, masked = _readers(ds), _masked(ds)
        if masked is not None:
            ds, kind, mask, nodes = masked
            masks.add((kind, mask))
        elif len(readers) == 1 and (factor := _factor(readers[0], ds)) is not None:
            ds, scale, nodes = readers[0].outputs[0], scale * factor, readers
        else:
            break
        found.backward += nodes
    expected = math.prod(step.number for step in found.steps if step.kind == _SCALE)
    if not math.isclose(scale, expected, rel_tol=1e-6):
        return False
    if masks != {(step.kind, step.tensor) for step in found.steps if step.kind in (_KEEP, _DROP)}:
        return False
    for node in readers:
        if node.op_type != "MatMul":
            return False
        a, b = map(given, node.inputs)
        if a is ds and _stored(b) == _stored(found.k, turned=True):
            number = 0
        elif b is ds and _stored(a) == _stored(found.q, turned=True):
            number = 1
        else:
            return False
        if found.gradients[number] is not None:
            return False
        gradient, factor = node.outputs[0], found.factors[number]
        found.backward.append(node)
        if factor != 1:
            then = only_reader(gradient)
            if then is None or _factor(then, gradient) != factor:
                return False
            gradient = then.outputs[0]
            found.backward.append(then)
        found.gradients[number] = gradient
    return bool(readers)


def _factor(node: ir.Node, ds: ir.Value) -> float | None:
    """Return by how much a node scales a gradient, 1 in another shape; None for other nodes."""
    if _is_view(node):
        return 1.0
    found = _steps(node) if node.op_type in ("Mul", "Div") else ()
    return next((steps[0].number for x, steps in found if x is ds), None)


def _masked(dy: ir.Value) -> tuple[ir.Value, int, ir.Value, list[ir.Node]] | None:
    """Return dy m, and how the truth values m choose; or dy - dy m. The first node has dy as its first input."""
    readers = sorted(_readers(dy), key=lambda node: node.op_type)
    mul = readers[0] if readers and readers[0].op_type == "Mul" else None
    if mul is None or mul.inputs[0] is not dy:
        return None
    cast = given(mul.inputs[1]).producer()
    mask = None if cast is None or cast.op_type != "Cast" else cast.inputs[0]
    if mask is None or mask.dtype != ir.DataType.BOOL:
        return None
    if len(readers) == 1:
        return mul.outputs[0], _KEEP, mask, readers
    sub = readers[1]
    is_rest = sub.op_type == "Sub" and [*sub.inputs] == [dy, mul.outputs[0]] and _readers(mul.outputs[0]) == [sub]
    return (sub.outputs[0], _DROP, mask, readers) if is_rest and len(readers) == 2 else None


def _stored(x: ir.Value, *, turned: bool = False) -> tuple[ir.Value, list[int]]:
    """Return what a stack of matrices is before transposes, and its axes there; of the transposed matrices if asked."""
    axes = list(range(rank_of(x)))
    return before_transposes(x, transposed(axes) if turned else axes)


# --- Kernels ---


def _fits(found: _Attention) -> bool:
    """Return whether C computes this: its ranks and types, and whether nothing else reads what is between."""
    assert found.product is not None
    product = found.product.outputs[0]
    operands = [found.q, found.k, given(found.product.inputs[1]), given(found.dy)]
    rank, steps = rank_of(product), found.steps
    if not 2 <= rank <= MOST_AXES or len(steps) > _MOST_STEPS:
        return False
    if any(x.dtype != ir.DataType.FLOAT or not has_sizes(x) or rank_of(x) != rank for x in operands):
        return False
    if any(sizes_of(x)[:-2] != sizes_of(found.q)[:-2] for x in operands):
        return False
    for step in steps:
        x, dtype = step.tensor, ir.DataType.FLOAT if step.kind == _ADD else ir.DataType.BOOL
        if x is not None and (x.dtype != dtype or not has_sizes(x) or not rank_of(x) <= rank_of(step.y) <= MOST_AXES):
            return False
    nodes = {*found.forward, *found.backward, found.product}
    results = {product, *found.gradients}
    inner = [y for node in nodes for y in node.outputs if y not in results]
    if any(node.graph is not found.forward[0].graph for node in nodes):
        return False
    if not all(_is_read_within(y, nodes, found.others) for y in inner):
        return False
    read = [*operands, *(step.tensor for step in steps if step.tensor is not None)]
    return not any(x.producer() in nodes | found.others for x in read)


def _is_read_within(y: ir.Value, nodes: set[ir.Node], others: set[ir.Node]) -> bool:
    """Return whether only some nodes read a value, and others that compute shapes and masks for these; add those."""
    if y.is_graph_output():
        return False
    for node in {*y.consumers()} - nodes - others:
        if node.op_type not in _ASIDE or not all(_is_read_within(z, nodes, others) for z in node.outputs):
            return False
        others.add(node)
    return True


def _kernels(found: _Attention) -> list[Replacement]:
    product, q, k, dy = found.product, found.q, found.k, found.dy
    assert product is not None and dy is not None
    graph = product.graph
    assert graph is not None
    v, rank = given(product.inputs[1]), rank_of(q)
    (q, axes_q), (k, axes_k), (v, axes_v), (dy, axes_dy) = (
        _stored(q),
        _stored(k, turned=True),
        _stored(v),
        _stored(dy),
    )
    cut, whole = -1, whole_of([q, k, v], f"{product.outputs[0].name}/heads")
    if whole is not None:
        q = k = v = whole
        cut = rank - 2
    tensors = [step.tensor for step in found.steps if step.tensor is not None]
    notes = ir.Value(
        name=f"{product.outputs[0].name}/rows",
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape([*dims_of(given(product.inputs[0]))[:-1], f"{product.outputs[0].name}/notes"]),
    )
    operands: list[Item] = [rank, axes_q, axes_k, axes_v]
    y, axes_y, after = _result(product.outputs[0])
    forward_inputs, backward_inputs = [q, k, v, *tensors], [q, k, v, dy, notes, *tensors]
    steps = _step_items(found.steps, forward_inputs), _step_items(found.steps, backward_inputs)
    if steps[0] is None or steps[1] is None:
        return []
    gradients, axes_of, turned_back = list[ir.Value](), list[list[int]](), list[ir.Node]()
    for number, gradient in enumerate(found.gradients):
        if gradient is None:
            axes_of.append(list(range(rank)))
            continue
        result, axes, nodes = _turned_back(gradient) if number == 1 else _result(gradient)
        gradients.append(result)
        axes_of.append(axes)
        turned_back += nodes
    joint = joined(gradients) if len(gradients) == 3 else None
    if joint is not None:
        gradients = [joint[0]]
        turned_back += joint[1]
    cuts = [cut, -1 if joint is None else rank - 2]
    wanted = [int(x is not None) for x in found.gradients]
    safe, count = int(found.is_safe), len(found.steps)
    form: list[Item] = [*operands, axes_dy, axes_of, 1, wanted, safe, *cuts, count, steps[1]]
    backward = Kernel.calling("attention", form, backward_inputs, gradients)
    form = [*operands, [0] * rank, [axes_y], 0, [0, 0, 0], safe, cut, -1, count, steps[0]]
    forward = Kernel.calling("attention", form, forward_inputs, [y, notes])
    before = {product, *after}
    for node in [product, *after]:
        before |= _nodes_before(node, {*found.forward, *found.backward, *found.others})
    nodes = [node for node in graph if node in {*found.backward, *found.others, *turned_back} - before]
    return [(backward, nodes), (forward, [node for node in graph if node in before])]


def _nodes_before(node: ir.Node, nodes: set[ir.Node]) -> set[ir.Node]:
    """Return those of some nodes that a node reads, directly or by others of them."""
    read = {x.producer() for x in node.inputs if x is not None} & nodes
    return read.union(*(_nodes_before(each, nodes) for each in read))  # type: ignore[arg-type,return-value]


def _result(y: ir.Value) -> tuple[ir.Value, list[int], list[ir.Node]]:
    """Return a result after a Transpose that keeps columns together, the stored axis of each axis, and that node."""
    rank, then = rank_of(y), only_reader(y)
    perm = None if then is None else permutation(then, rank)
    if then is None or perm is None or perm[-1] != rank - 1:
        return y, list(range(rank)), []
    return then.outputs[0], [perm.index(i) for i in range(rank)], [then]


def _turned_back(y: ir.Value) -> tuple[ir.Value, list[int], list[ir.Node]]:
    """Return the transpose of a result as `_result` does; a new Transpose reads it if it is not the graph's own."""
    then, rank = only_reader(y), rank_of(y)
    axes, turned = list(range(rank)), transposed(list(range(rank)))
    perm = None if then is None else permutation(then, rank)
    if then is not None and perm is not None:
        perm = [turned[i] for i in perm]
        if perm == axes:
            result, axes, nodes = _result(then.outputs[0])
            return result, axes, [then, *nodes]
        if perm[-1] == rank - 1:
            return then.outputs[0], [perm.index(i) for i in axes], [then]
    product = y.producer()
    assert product is not None and product.graph is not None
    shape = ir.Shape([dims_of(y)[i] for i in turned])
    new = ir.Value(name=f"{y.name}/turned", type=y.type, shape=shape)
    back = ir.Node("", "Transpose", [new], [ir.AttrInt64s("perm", turned)], num_outputs=1)
    product.graph.insert_after(product, back)
    swap(y, like(back.outputs[0], y))
    return new, axes, []


def _step_items(steps: list[_Step], inputs: list[ir.Value]) -> list[Item] | None:
    """Return steps as calls.h has them; None if no input tells a size of scores."""
    places = {
        size: -1 - (i * MOST_AXES + axis)
        for i, x in reversed([*enumerate(inputs)])
        for axis, size in enumerate(sizes_of(x))
    }
    items: list[Item] = []
    for step in steps:
        sizes: list[Size] = [] if step.tensor is None else sizes_of(step.y)
        found = [size if isinstance(size, int) else places.get(size, 0) for size in sizes]
        if any(isinstance(size, str) and size not in places for size in sizes):
            return None
        items.append([step.kind, rank_of(step.tensor), len(sizes), literal(step.number, "float"), found])
    return items
