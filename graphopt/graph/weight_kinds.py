"""List how operators read weights: which input is one, what it multiplies, and how its numbers form a matrix.

Adapters, merging, slots, files of adapters, quantization and losses in blocks read one table, `WEIGHT_KINDS`. As
matrices, weights multiply rows: y = x w for w of [..., inputs, outputs]. A convolution has a matrix for each group,
whose inputs are the elements of a filter's window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.errors import GraphoptError
from graphopt.graph.operators import MICROSOFT, RECURRENT

Moves = tuple[tuple[str, tuple[int, ...]], ...]  # permutations of axes, and shapes, in turn
PRODUCT, EMBEDDING, RECURRENCE = "product", "embedding", "recurrence"
CONVOLUTION, TRANSPOSED_CONVOLUTION = "convolution", "transposed convolution"
# The axes of the rank in A and in B, and of the outputs in B, by the name of a kind.
_AXES = {
    **dict.fromkeys((PRODUCT, EMBEDDING, RECURRENCE), (-1, -2, -1)),
    CONVOLUTION: (0, 1, 0),
    TRANSPOSED_CONVOLUTION: (1, 1, 0),
}
NAMES = frozenset(_AXES)


@dataclass(frozen=True)
class WeightKind:
    """Describe how an operator reads a weight w at one of its inputs.

    Args:
        name: the layout of w, and of A and B: one of `NAMES`.
        x: the input that w multiplies. None if an adapter must change w itself, as that of a recurrence.
        bias: the input that is added to the product.
        scale: the input whose type is that of the product if w is packed. Such a node has the attributes K and N.
        left: whether w multiplies from the left: the operator computes the transpose of x w.
        gemm: whether the attributes alpha, beta, transA and transB count, as in Gemm.
        inputs, outputs: the axes of w, from the last one, that a product sums over, and those of its outputs.
    """

    name: str = PRODUCT
    x: int | None = None
    bias: int | None = None
    scale: int | None = None
    left: bool = False
    gemm: bool = False
    inputs: tuple[int, ...] = (-2,)
    outputs: tuple[int, ...] = (-1,)

    @property
    def axes(self) -> tuple[int, int, int]:
        """Return the axes of the rank in A and in B, and the axis of the outputs in B."""
        return _AXES[self.name]

    @property
    def is_filters(self) -> bool:
        """Return whether w consists of filters."""
        return self.name in (CONVOLUTION, TRANSPOSED_CONVOLUTION)

    def is_transposed(self, node: ir.Node) -> bool:
        """Return whether a node reads w as [..., outputs, inputs]."""
        is_turned = self._is_set(node, "transA" if self.left else "transB")
        return ((self.inputs, self.outputs) == ((-1,), (-2,))) != (self.left != is_turned)

    @property
    def has_layout(self) -> bool:
        """Return whether w is neither [..., inputs, outputs] nor [..., outputs, inputs]."""
        return sorted((self.inputs, self.outputs)) != [(-2,), (-1,)]

    def turns_x(self, node: ir.Node) -> bool:
        """Return whether a node multiplies the transpose of x."""
        return self._is_set(node, "transB" if self.left else "transA")

    def _is_set(self, node: ir.Node, name: str) -> bool:
        return self.gemm and node.attributes.get_int(name, 0) != 0

    def moves(self, node: ir.Node, shape: Sequence[int]) -> Moves:
        """Return the moves that turn w as a node reads it into [..., inputs, outputs]; filters stay as they are."""
        rank = len(shape)
        if not self.has_layout:
            return (("transpose", swap_of(rank)),) if self.is_transposed(node) else ()
        parts = [tuple(axis + rank for axis in axes) for axes in (self.inputs, self.outputs)]
        lead = [axis for axis in range(rank) if axis not in parts[0] + parts[1]]
        dims = [shape[axis] for axis in lead] + [math.prod(shape[axis] for axis in part) for part in parts]
        return ("transpose", (*lead, *parts[0], *parts[1])), ("reshape", tuple(dims))

    def to_matrices(self, shape: Sequence[int], groups: int, *, up: bool = False) -> Moves:
        """Return the moves that turn filters, or A or B of their shape, into a matrix [inputs, outputs] of each group.

        Args:
            groups: the groups of the convolution.
            up: whether it is that of B.
        """
        if not self.is_filters:
            return ()
        if len(shape) < 2:  # one number for each output
            return (("reshape", (groups, 1, -1)),)
        first, second, *window = shape
        count = math.prod(window)
        if self.name == CONVOLUTION or up:
            return (("reshape", (groups, first // groups, second * count)), ("transpose", (0, 2, 1)))
        parts = (groups, first // groups, second, count)
        return (("reshape", parts), ("transpose", (0, 1, 3, 2)), ("reshape", (groups, -1, second)))

    def matrix(self, x: np.ndarray, groups: int, *, up: bool = False) -> np.ndarray:
        """Return a weight [..., inputs, outputs] or filters, or A or B of them, as matrices; see `to_matrices`."""
        return moved(x, self.to_matrices(x.shape, groups, up=up))

    def shapes(
        self, w: Sequence[int], groups: int, outputs: int, count: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B of a rank, for a weight [..., inputs, outputs] or filters."""
        axis, *_ = self.axes
        a, width = [*w], count // groups
        a[axis] = width if self.name == TRANSPOSED_CONVOLUTION else count
        b = (outputs, width, *[1] * len(w[2:])) if self.is_filters else (*w[:-2], count, outputs)
        return tuple(a), b


def swap_of(rank: int) -> tuple[int, ...]:
    """Return the permutation that exchanges the last two axes."""
    return (*range(rank - 2), rank - 1, rank - 2)


def shape_after(moves: Moves, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape that moves give to an array."""
    return moved(np.broadcast_to(np.False_, tuple(shape)), moves).shape


def moved(x: np.ndarray, moves: Moves) -> np.ndarray:
    """Return an array after moves."""
    for how, numbers in moves:
        x = x.transpose(numbers) if how == "transpose" else x.reshape(numbers)
    return x


def inverse(moves: Moves, shape: Sequence[int]) -> Moves:
    """Return the moves that give an array of a shape back after moves."""
    back: list[tuple[str, tuple[int, ...]]] = []
    for i, (how, numbers) in enumerate(moves):
        before = shape_after(moves[:i], shape)
        back.append((how, tuple(map(int, np.argsort(numbers))) if how == "transpose" else before))
    return tuple(back[::-1])


TURNED = WeightKind(inputs=(-1,), outputs=(-2,))

# The kinds of weights, by the domain and the type of the operator that reads one, and the number of the input.
WEIGHT_KINDS: dict[tuple[str, str, int], WeightKind] = {
    ("", "MatMul", 1): WeightKind(x=0),
    ("", "MatMul", 0): WeightKind(x=1, left=True),
    ("", "Gemm", 1): WeightKind(x=0, bias=2, gemm=True),
    ("", "Gemm", 0): WeightKind(x=1, bias=2, gemm=True, left=True),
    (MICROSOFT, "MatMulNBits", 1): WeightKind(x=0, bias=5, scale=2),
    (MICROSOFT, "MatMulBnb4", 1): WeightKind(x=0, scale=2),
    ("", "MatMulInteger", 1): WeightKind(x=0),
    (MICROSOFT, "MatMulIntegerToFloat", 1): WeightKind(x=0, bias=6),
    (MICROSOFT, "DynamicQuantizeMatMul", 1): WeightKind(x=0, bias=4),
    ("", "Conv", 1): WeightKind(CONVOLUTION, x=0, bias=2),
    ("", "ConvTranspose", 1): WeightKind(TRANSPOSED_CONVOLUTION, x=0, bias=2),
    ("", "Gather", 0): WeightKind(EMBEDDING, x=1),
    (MICROSOFT, "GatherBlockQuantized", 0): WeightKind(EMBEDDING, x=1, scale=2),
    **{(MICROSOFT, "MoE", i): TURNED for i in (2, 4, 6)},
    **{("", op_type, i): replace(TURNED, name=RECURRENCE) for op_type in RECURRENT for i in (1, 2)},
}
REGISTERED: set[tuple[str, str, int]] = set()  # the rows that `weight_kind` has added


@checked()
def weight_kind(
    domain: str,
    op_type: str,
    index: int,
    *,
    inputs: Sequence[int] = (-2,),
    outputs: Sequence[int] = (-1,),
    x: int | None = None,
    bias: int | None = None,
) -> None:
    """Register how an operator, of any domain, reads a weight at one of its inputs.

    Every adapter then changes such weights, and they are merged, and saved in slots, adapter files and folders of peft.
    An operator has one kind of weight at an input: another one is an error.

    Args:
        domain: the domain of the operator, "" for ONNX.
        op_type: the name of the operator, or of a function in models. A function without a gradient rule is inlined:
            its operators read the weight then, and the kind is for slots in files with the function.
        index: the number of the input that is the weight.
        inputs: the axes of the weight that the operator sums over, counted from the last one, -1.
        outputs: the axes of its outputs. All other axes are those of independent matrices.
        x: the number of the input that is multiplied by the weight as MatMul multiplies, so that the adapter's product
            is beside the operator's. By default, the adapter changes the weight itself, which suits every operator.
        bias: with `x`, the number of the input that is added to the product.

    Raises:
        GraphoptError: the operator has another kind of weight at this input, or the axes are not those of a matrix.

    >>> passes.weight_kind("my.domain", "Linear", 1, inputs=[-1], outputs=[-2], x=0, bias=2)
    """
    key, where = (domain, op_type, index), f"{'::'.join(filter(None, (domain, op_type)))}, input {index}"
    axes = {axis for axis in (*inputs, *outputs) if isinstance(axis, int) and axis < 0}
    if not inputs or not outputs or len(axes) < len((*inputs, *outputs)):
        raise GraphoptError(
            f"{where}: expected axes of inputs and of outputs, counted from -1, found inputs={[*inputs]} and "
            f"outputs={[*outputs]}"
        )
    kind = WeightKind(x=x, bias=bias, inputs=tuple(inputs), outputs=tuple(outputs))
    if key not in WEIGHT_KINDS:
        REGISTERED.add(key)
    if WEIGHT_KINDS.setdefault(key, kind) != kind:
        raise GraphoptError(f"{where}: expected one kind of weight, found a second: remove one")


def weight_kinds_of(node: ir.Node) -> Mapping[int, WeightKind]:
    """Return the kinds of the weights that a node may read, by the number of the input."""
    keys = ((i, (node.domain, node.op_type, i)) for i in range(len(node.inputs)))
    found = {i: WEIGHT_KINDS[key] for i, key in keys if key in WEIGHT_KINDS}
    return found or (_of_gathered(node) if (node.domain, node.op_type) == ("", "GatherND") else {})


def _of_gathered(node: ir.Node) -> Mapping[int, WeightKind]:
    """Return the kind of experts' stacked weights, of which a node gathers those of tokens, by what multiplies them."""
    stack, y = node.inputs[0], node.outputs[0]
    shapes = [] if stack is None else [stack.shape, y.shape]
    if not shapes or any(shape is None or len(shape) != 3 for shape in shapes):
        return {}
    if node.attributes.get_int("batch_dims", 0):
        return {}
    ((_, *own), (_, *gathered)), readers = shapes, {(user.op_type, i) for user, i in y.uses()}  # type: ignore[misc]
    if len(readers) != 1 or own != gathered:
        return {}
    (how,) = readers
    kind = {("MatMul", 0): TURNED, ("MatMul", 1): WeightKind()}.get(how)
    return {} if kind is None else {0: kind}
