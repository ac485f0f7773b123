"""Replace operators of ONNX's reference evaluator that onnx 1.23 computes wrongly, partly or only in float32.

Programs show it (tests/faults.py: reference).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ValueInfoProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import full_attributes
from graphopt.graph.values import is_read, swap
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session

# Operators that the gradients' own traced functions compute: the reference lacks them, parts of them, or float64.
_EXPANDED = ("DeformConv", "GRU", "GridSample", "LSTM", "MaxRoiPool", "RNN")

# Operators that ONNX Runtime computes, which has kernels for float64. The reference returns float32 (AffineGrid),
# accepts few elements (GatherElements), sums signed numbers for p = 1 (LpNormalization), lacks positions for strides
# of 1 (MaxPool), rejects negative pads (Pad), and gathers elements along another axis (Unique).
_OF_RUNTIME = ("AffineGrid", "GatherElements", "LpNormalization", "MaxPool", "Pad", "Unique")

_Context = Mapping[str, np.ndarray] | None  # outer values, by name

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(x: np.ndarray, approximate: str) -> np.ndarray:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + _erf(x * math.sqrt(0.5)))


def _lrn(x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> np.ndarray:
    channels = np.arange(x.shape[1])
    offset = channels - channels[:, None]
    near = (offset >= -((size - 1) // 2)) & (offset <= size // 2)
    squares = np.einsum("ij,nj...->ni...", near.astype(x.dtype), x * x)
    return x / (bias + alpha / size * squares) ** beta


def _spatial(x: np.ndarray) -> tuple[int, ...]:
    """Return the axes after batch and channels."""
    return tuple(range(2, x.ndim))


_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "Erf": _erf,  # the reference has only float32's
    "Gelu": _gelu,  # the reference uses its own erf
    "GlobalLpPool": lambda x, p: (np.abs(x) ** p).sum(_spatial(x), keepdims=True) ** (1 / p),  # it lacks this
    "GlobalMaxPool": lambda x: x.max(_spatial(x), keepdims=True),  # it assumes images
    "LRN": _lrn,  # it mistakes the batch for the channels
    "Softsign": lambda x: x / (1 + np.abs(x)),  # it rejects scalars
}


def _computed_by(function: Callable[..., np.ndarray]) -> Callable[..., tuple[np.ndarray]]:
    return lambda self, x, **attributes: (np.asarray(function(x, **attributes), x.dtype),)


def _run_kernel(self: OpRun, *inputs: np.ndarray | None, **_: object) -> tuple[np.ndarray, ...]:
    """Run one node in ONNX Runtime."""
    node = copy.deepcopy(self.onnx_node)
    node.output[:] = [f"{i}/output" for i in range(len(node.output))]  # also those without a name
    given = {name: x for name, x in zip(node.input, inputs, strict=False) if x is not None}
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in given.items()
    ]
    graph = helper.make_graph([node], "node", infos, [ValueInfoProto(name=name) for name in node.output])
    opset = helper.make_opsetid("", self.run_params["opsets"][""])
    model = ir.from_proto(helper.make_model_gen_version(graph, opset_imports=[opset]))
    found = Session(Device("cpu", threads=1, flush_denormals=False), model).compute_arrays(given)
    return tuple(found.values())


class _WithBody(OpRun):
    """Run the body of a loop once per step."""

    body: ReferenceEvaluator
    _run_body: Callable[..., list[np.ndarray]]

    def need_context(self) -> bool:
        return True

    def step(self, values: Sequence[np.ndarray], context: _Context, bindings: object) -> list[np.ndarray]:
        inputs = {**(context or {}), **dict(zip(self.body.input_names, values, strict=True))}
        return self._run_body(inputs, bindings=bindings)


class Scan(_WithBody):
    """Support axes and directions, which the reference lacks."""

    def _run(
        self, *args: np.ndarray, context: _Context = None, bindings: object = None, **attributes: Any
    ) -> tuple[np.ndarray, ...]:
        count = attributes["num_scan_inputs"]
        n = len(args) - count

        def ways(name: str, count: int) -> Iterator[tuple[int, slice]]:
            axes, directions = (attributes.get(f"scan_{name}_{what}") or [0] * count for what in ("axes", "directions"))
            return zip(axes, (slice(None, None, -1 if reverse else 1) for reverse in directions), strict=True)

        inputs = zip(args[n:], ways("input", count), strict=True)
        sequences = [np.moveaxis(x, axis, 0)[order] for x, (axis, order) in inputs]
        states, stacks = list(args[:n]), []
        for slices in zip(*sequences, strict=True):
            results = self.step([*states, *slices], context, bindings)
            states = results[:n]
            stacks.append(results[n:])
        outputs = [np.stack(steps) for steps in zip(*stacks, strict=True)]
        stacked = zip(outputs, ways("output", len(outputs)), strict=True)
        return (*states, *(np.moveaxis(y[order], 0, axis) for y, (axis, order) in stacked))


class Loop(_WithBody):
    """Stack the outputs of iterations along a new axis; the reference concatenates them along an existing one."""

    def _run(
        self,
        trips: np.ndarray | None,
        going: np.ndarray | None,
        *states: np.ndarray,
        context: _Context = None,
        bindings: object = None,
        **_: object,
    ) -> tuple[np.ndarray, ...]:
        n = len(states)
        stacks: list[list[np.ndarray]] = []
        while (trips is None or len(stacks) < trips) and (going is None or going):
            values = [np.array(len(stacks), np.int64), np.array(True), *states]
            going, *results = self.step(values, context, bindings)
            states = tuple(results[:n])
            stacks.append(results[n:])
        empty = [np.zeros((0,))] * (len(self.body.output_names) - 1 - n)
        return (*states, *([np.stack(steps) for steps in zip(*stacks, strict=True)] if stacks else empty))


class ConvTranspose(OpRun):
    """Separate the channels of groups, which the reference mixes, and accept output padding as large as the stride."""

    def _run(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, **how: Any) -> tuple[np.ndarray]:
        n, sizes, kernel, group = x.ndim - 2, x.shape[2:], w.shape[2:], how["group"]
        strides, dilations = how["strides"] or [1] * n, how["dilations"] or [1] * n
        pads, more = how["pads"] or [0] * 2 * n, how["output_padding"] or [0] * n
        whole = (np.array(sizes) - 1) * strides + (np.array(kernel) - 1) * dilations + 1 + more
        begin, out = np.array(pads[:n]), whole - pads[:n] - pads[n:]
        if how["output_shape"] or how["auto_pad"].startswith("SAME"):
            out = np.array(how["output_shape"] or np.multiply(sizes, strides))
            cut = np.maximum(whole - out, 0)
            begin = cut // 2 if how["auto_pad"] == "SAME_UPPER" else cut - cut // 2
        grouped = x.reshape(len(x), group, -1, *sizes)
        weights = w.reshape(group, -1, *w.shape[1:])
        y = np.zeros((len(x), group * w.shape[1], *np.maximum(whole, begin + out)), x.dtype)
        for tap in np.ndindex(*kernel):
            part = np.einsum("bgc...,gcm->bgm...", grouped, weights[(..., *tap)])
            places = zip(np.multiply(tap, dilations), sizes, strides, strict=True)
            at: Any = [slice(first, first + (size - 1) * stride + 1, stride) for first, size, stride in places]
            y[(..., *at)] += part.reshape(*y.shape[:2], *sizes)
        crop: Any = map(slice, begin, begin + out)
        y = y[(..., *crop)]
        return (y if bias is None else y + bias.reshape(-1, *[1] * n),)


_REPLACED: list[type[OpRun]] = [
    *(ConvTranspose, Loop, Scan),
    *(type(name, (OpRun,), {"_run": _run_kernel}) for name in _OF_RUNTIME),
    *(type(name, (OpRun,), {"_run": _computed_by(function)}) for name, function in _FUNCTIONS.items()),
]


def evaluator(model: ir.Model) -> ReferenceEvaluator:
    """Return the reference evaluator of a model, with the corrected operators."""
    if any(node.op_type in _EXPANDED for node in model.graph):
        model = _expanded(model.clone())
    return ReferenceEvaluator(ir.to_proto(model), new_ops=_REPLACED)


def _expanded(model: ir.Model) -> ir.Model:
    """Replace operators by the traced functions that their gradients differentiate."""
    from passes.gradients.registry import EXPANSIONS, accepted

    with Emitter(model) as op:
        for node in [node for node in model.graph if node.op_type in _EXPANDED]:
            named = {**full_attributes(node, op.versions), "node": node, "y": node.outputs[0]}
            function = EXPANSIONS[node.op_type]
            outputs = function(op, *node.inputs, **accepted(function, named))
            for own, y in zip(node.outputs, outputs, strict=False):
                if is_read(own):  # unless the function has exchanged it
                    swap(own, y)
            model.graph.remove(node, safe=True)
    model.graph.sort()
    return model
