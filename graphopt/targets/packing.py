"""Join the numbers that a step reports into one vector: a device returns it in one read."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import fix_names
from graphopt.graph.roles import Role, set_role
from graphopt.graph.values import is_floating, name_of
from graphopt.targets.check import CHECK, add_check

PACKED = "graphopt.packed"


def pack_numbers(model: ir.Model, names: Collection[str], infinite: Collection[str]) -> list[str]:
    """Replace the floating-point numbers among a step's outputs by one vector of them; return their names in order.

    The last number, `CHECK`, is finite only if the new state is. A model that has these names itself stays as it is.

    Args:
        names: the names of the outputs to join.
        infinite: the names of state that is not finite at first.
    """
    if not {CHECK, PACKED}.isdisjoint(ir.convenience.create_value_mapping(model.graph)):
        return []
    add_check(model, infinite, chained=True)
    outputs = model.graph.outputs
    packed = [y for y in outputs if (y.name in names or y.name == CHECK) and y.shape == () and is_floating(y)]
    types = {y.dtype for y in packed}
    dtype = ir.DataType.DOUBLE if ir.DataType.DOUBLE in types else ir.DataType.FLOAT
    outputs[:] = [y for y in outputs if y not in packed]
    with Emitter(model) as op:
        numbers = [op.Reshape(y if y.dtype == dtype else op.Cast(y, to=dtype), [1]) for y in packed]
        outputs.append(set_role(op.Concat(*numbers, axis=0, _outputs=[PACKED]), Role.DIAGNOSTIC))
    fix_names(model)
    return list(map(name_of, packed))
