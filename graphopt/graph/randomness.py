"""Emit random numbers: integer arithmetic on a counter, the same on every runtime."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import POSITIONS

GOLDEN = 0x9E3779B1 - 2**32  # 2^32 divided by the golden ratio, as a signed number
_SINE = {7: -1.9515295891e-4, 5: 8.3321608736e-3, 3: -1.6666654611e-1, 1: 1.0}  # the factor of each power of an angle
SUMMAND = 0x846CA68B - 2**32  # Wellons, https://github.com/skeeto/hash-prospector


def uniform(
    op: Emitter, shape: ir.Value, step: ir.Value, seed: int, number: int, secret: ir.Value | None = None
) -> ir.Value:
    """Emit uniform int32 numbers from -2^31 to 2^31 - 1, from a counter (seed, number, step, position).

    The multiples of the golden ratio spread positions, and two rounds of x -> x (128 x / 2^16 + k) modulo 2^32 mix
    them. This hash is not a published one. It needs int32 alone, which wraps on every runtime, and no bitwise
    operators, for which the CUDA provider has no kernels. 128 x has 25 bits, one of them the sign, so that a runtime
    that divides integers as float32, as OpenVINO does, divides exactly. The first k is c t + d of the step t.
    Positions start from (c t + d) t + o, a permutation of the integers modulo 2^32, as c is even and d is odd
    (Rivest, Permutation polynomials modulo 2^w, 2001). For 2^22 numbers, chi-squared tests of 1024 bins, of pairs at
    ten distances and of pairs of steps, seeds and numbers, and the spectrum, distinguish it from random numbers no
    better than they distinguish NumPy's. Masks of two steps with a distance of 2^25, and parts of a
    mask with this distance, resemble each other.

    Args:
        secret: two int32 numbers that are added to d and o, fed at run time. The hash is not cryptographic.
    """
    even, odd, offset = np.random.default_rng([seed, number]).integers(-(2**31), 2**31, (3, 1), np.int32)
    t = op.Cast(step, to=ir.DataType.INT32)
    d, o = op.constant(odd | 1), op.constant(offset)
    if secret is not None:
        first, second = op.Split(secret, num_outputs=2, axis=0, _outputs=2)
        d, o = d + 2 * first, o + second
    key = t * op.constant(even & ~1) + d
    count = op.Cast(op.ReduceProd(shape, keepdims=0), to=ir.DataType.INT32)
    positions = op.Range(0, count, 1)
    POSITIONS.set(positions.producer())
    spread = positions * GOLDEN
    mixed = spread + (key * t + o)
    for k in (key, SUMMAND):
        mixed = mixed * (mixed * (1 << 7) / (1 << 16) + k)
    return op.Reshape(mixed, shape)


def normal(
    op: Emitter, draw: Callable[[int], ir.Value], twice: bool = False, scale: ir.Value | float = 1.0
) -> ir.Value:
    """Emit float32 numbers of a normal distribution (Box, Muller 1958).

    The angle is 2 t for t from -pi/4 to pi/4. A polynomial gives sin t (Cephes, sinf, https://www.netlib.org/cephes).
    cos 2t and sin 2t follow from it, and a random sign turns the pair by pi. So there is no Sin or Cos of large angles,
    which cost several times as much.

    Args:
        draw: emits `uniform` numbers for the number 0, and others for the number 1.
        twice: whether to emit twice as many numbers as are drawn, those of sines behind those of cosines.
        scale: the standard deviation.
    """
    first, second = (op.Cast(draw(i), to=ir.DataType.FLOAT) for i in (0, 1))
    first, turn = first + 0.5, second / 2.0**31  # not 0; from -1 to 1
    size = op.Abs(first)
    radius = op.Sqrt(-2 * op.Log(size / 2.0**31)) * (first / size)
    radius = radius if isinstance(scale, float) else scale * radius
    square = turn * turn
    series, *factors = (2**0.5 * factor * (math.pi / 4) ** power for power, factor in _SINE.items())
    for factor in factors:
        series = series * square + factor
    sine = turn * series  # times the root of 2
    double = sine * sine
    y = radius * (1 - double)
    return op.Concat(y, radius * (sine * op.Sqrt(2 - double)), axis=0) if twice else y
