"""Differentiate matrix products, Einsum, Det and Fourier transforms."""

from __future__ import annotations

import string
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.values import constant_number, dims_of, dtype_of, like, rank
from passes.gradients.registry import Gradients, rule
from passes.gradients.rules.shape import constant_size, gather, indices_along, pads_of_all_axes, reshape_like


@rule("MatMul")
def matmul(op: Emitter, dy: Value, a: Value, b: Value) -> Gradients:
    """Apply d(AB) = dA B + A dB, with vectors as rows or columns, and with one Gemm for weights that a batch shares."""
    if rank(a) == 1 and rank(b) == 1:
        return [dy * b, dy * a]
    if rank(a) == 1:
        row, column = op.Unsqueeze(dy, [-2]), op.Unsqueeze(dy, [-1])
        return [op.Squeeze(op.MatMul(b, column), [-1]), op.MatMul(op.Unsqueeze(a, [1]), row)]
    if rank(b) == 1:
        row, column = op.Unsqueeze(dy, [-2]), op.Unsqueeze(dy, [-1])
        return [op.MatMul(column, op.Unsqueeze(b, [0])), op.Squeeze(op.MatMul(row, a), [-2])]
    if rank(b) == 2:
        rows, dy = flatten(op, a), flatten(op, dy)
        return [reshape_like(op, op.Gemm(dy, b, transB=1), a), like(op.Gemm(rows, dy, transA=1), b)]
    return [batched(op, dy, transpose(op, b), dy), batched(op, transpose(op, a), dy, dy)]


@rule("Gemm")
def gemm(
    op: Emitter, dy: Value, a: Value, b: Value, *c: Value, alpha: float, beta: float, transA: int, transB: int
) -> Gradients:
    """Compute dA = alpha dY B' and dB = alpha A' dY in all four layouts without a Transpose."""
    da = (b, dy, transB, 1) if transA else (dy, b, 0, 1 - transB)
    db = (dy, a, 1, transA) if transB else (a, dy, 1 - transA, 0)
    products = [op.Gemm(m, n, alpha=alpha, transA=s, transB=t) for m, n, s, t in (da, db)]
    return [like(products[0], a), like(products[1], b), dy if beta == 1 else dy * beta]


@rule("Einsum")
def einsum(op: Emitter, dy: Value, *inputs: Value, equation: str) -> Gradients:
    """Exchange an operand's subscripts with those of the output, and repeat along axes that only that operand sums.

    If an operand has a subscript twice, its gradient is multiplied by an identity matrix, because Einsum reads a
    diagonal.
    """
    terms, result = subscripts(equation, [rank(x) for x in inputs])
    gradients = []
    for i, x in enumerate(inputs):
        term, diagonals = distinct(terms[i], "".join([result, *terms]))
        others = [*terms[:i], *terms[i + 1 :], *diagonals]
        factors = [
            *inputs[:i],
            *inputs[i + 1 :],
            *(identity(op, x, term.index(pair[1])) for pair in diagonals),
        ]
        seen = "".join(letter for letter in term if letter in "".join([result, *others]))
        gradient = op.Einsum(dy, *factors, equation=f"{','.join([result, *others])}->{seen}")
        alone = [axis for axis, letter in enumerate(term) if letter not in seen]
        if alone:
            gradient = like(op.Expand(op.Unsqueeze(gradient, alone), op.shape_of(x)), x)
        gradients.append(gradient)
    return gradients


def distinct(term: str, taken: str) -> tuple[str, list[str]]:
    """Return subscripts in which each repeated letter is replaced by a new one, and the pairs of equal letters."""
    free = (letter for letter in string.ascii_letters if letter not in taken)
    letters, pairs = list(term), []
    for axis, letter in enumerate(term):
        if letter in letters[:axis]:
            letters[axis] = next(free)
            pairs.append(letter + letters[axis])
    return "".join(letters), pairs


def identity(op: Emitter, x: Value, axis: int) -> Value:
    """Return the identity matrix of the size of an axis."""
    size = op.shape_of(x, axis, axis + 1) if axis + 1 else op.Shape(x, start=axis)
    square = op.ConstantOfShape(op.Concat(size, size, axis=0), value=ir.tensor([0], dtype=dtype_of(x)))
    return op.EyeLike(square)


def subscripts(equation: str, ranks: Iterable[int]) -> tuple[list[str], str]:
    """Return the subscripts of the operands and of the output, with letters for ellipses and for an implied output."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    free = [letter for letter in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if letter not in equation]
    missing = [rank - len(term.replace("...", "")) for term, rank in zip(left.split(","), ranks, strict=True)]
    dots = ["".join(free[:n][::-1]) for n in missing]
    terms = [term.replace("...", letters) for term, letters in zip(left.split(","), dots, strict=True)]
    longest = max(dots, key=len)
    if not arrow:
        once = sorted({x for x in left if x.isalpha() and left.count(x) == 1})
        right = ("..." if "..." in left else "") + "".join(once)
    return terms, right.replace("...", longest)


def batched(op: Emitter, a: Value, b: Value, dy: Value) -> Value:
    """Return the product AB with the batch dimensions of `dy`."""
    product: Value = op.MatMul(a, b)
    product.shape = ir.Shape([*dims_of(dy)[:-2], dims_of(a)[-2], dims_of(b)[-1]])
    return product


def transpose(op: Emitter, x: Value) -> Value:
    """Exchange the last two axes."""
    axes = list(range(rank(x)))
    return op.Transpose(x, perm=[*axes[:-2], axes[-1], axes[-2]])


def flatten(op: Emitter, x: Value) -> Value:
    """Return `x` as a matrix whose rows are all axes except the last."""
    return x if rank(x) == 2 else op.Flatten(x, axis=-1)


@rule("Det")
def det(op: Emitter, dy: Value, x: Value) -> Gradients:
    """Multiply by the cofactors: the signed determinants without an element's row and column."""
    n = dims_of(x)[-1]
    if not isinstance(n, int):
        raise GraphoptError(
            f"the gradient of Det with respect to {x.name!r} needs a known size, found {x.shape}: declare its shape"
        )
    dy = op.Unsqueeze(dy, [-1, -2])
    if n == 1:
        return [like(dy, x)]
    constant_size(n, n, n - 1, n - 1)
    others = np.array([[k for k in range(n) if k != i] for i in range(n)])
    rows, columns = others[:, None, :, None], others[None, :, None, :]
    flat = op.Reshape(x, op.Concat(*([op.shape_of(x, 0, -2)] * (rank(x) > 2)), [n * n], axis=0))
    minors = op.Gather(flat, op.constant(rows * n + columns), axis=-1)
    signs = op.constant((-1.0) ** np.add.outer(np.arange(n), np.arange(n)), like=x)
    return [like(dy * signs * op.Det(minors), x)]


@rule("DFT")
def dft(
    op: Emitter, dy: Value, x: Value, length: Input = None, axis: Input = None, *, inverse: int, onesided: int
) -> Gradients:
    """Transform back, up to a factor. Pad with zeros where the transform cropped its input, and crop where it padded.

    An inverse onesided transform counts each frequency twice, except the first and the middle one.
    """
    known = constant_number(axis)
    if axis is not None and known is None:
        raise GraphoptError(
            f"DFT of {x.name!r}: its gradient needs a known axis, found a computed one: make it an initializer"
        )
    at = rank(x) - 2 if known is None else int(known) % rank(x)
    size, halved = op.shape_of(x, at, at + 1), inverse and onesided
    n = size if length is None else op.Reshape(op.cast(length, ir.DataType.INT64), [1])
    if halved:
        n = op.shape_of(dy, at, at + 1)
    back = op.DFT(dy, op.Squeeze(n), op.constant(at), inverse=1 - inverse, onesided=halved)
    count = op.Cast(op.Squeeze(n), to=x.dtype)
    back = back / count if inverse else back * count
    if halved:
        bins = op.Range(0, op.Squeeze(n) / 2 + 1, 1)
        once = op.Cast(op.Or(op.Equal(bins, 0), op.Equal(2 * bins, n)), to=x.dtype)
        back = back * op.Unsqueeze(2 - once, [*range(1, rank(x) - at)])
        n = n / 2 + 1
    if length is not None:
        back = op.Pad(back, pads_of_all_axes(op, x, op.Concat([0], size - n, axis=0), op.constant([at])))
    is_complex = dims_of(x)[-1] == 2
    return [like(back if is_complex else op.Slice(back, [0], op.shape_of(x, rank(x) - 1), [-1]), x)]


@rule("STFT")
def stft(
    op: Emitter,
    dy: Value,
    x: Value,
    step: Value,
    window: Input = None,
    length: Input = None,
    *,
    onesided: int,
) -> Gradients:
    """Transform, weight and gather the frames in reverse: add the gradient of each frame at its position."""
    size = op.Reshape(op.Shape(window) if length is None else op.cast(length, ir.DataType.INT64), [1])
    starts = indices_along(op, dy, 1, 1) * op.Squeeze(op.cast(step, ir.DataType.INT64))
    at = starts + op.Range(0, op.Squeeze(size), 1)
    frames = op.Gather(x, at, axis=1)
    weights = window and op.Unsqueeze(window, [1])
    weighed = frames if weights is None else frames * weights
    (dweighed,) = dft(op, dy, weighed, None, op.constant(2), inverse=0, onesided=onesided)
    assert dweighed is not None
    dframes = dweighed if weights is None else dweighed * weights
    dx = gather(op, dframes, x, at, axis=1)[0]
    if window is None:
        return [dx]
    return [dx, None, like(op.ReduceSum(dweighed * frames, [0, 1, 3], keepdims=0), window)]
