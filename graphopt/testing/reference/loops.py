"""Run Scan with axes and directions, Loop with stacked outputs, and RNN, GRU and LSTM one row and step at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class _WithBody(OpRun):
    body: Any
    _run_body: Any

    def need_context(self) -> bool:
        return True


class Scan(_WithBody):
    """Support axes and directions, which the reference lacks."""

    def _run(self, *args: Any, context: Any = None, bindings: Any = None, **attributes: Any) -> Any:
        count = attributes["num_scan_inputs"]
        n = len(args) - count

        def numbers(name: str) -> list[int]:
            return attributes.get(name) or [0] * len(self.onnx_node.output) + [0] * count

        sequences = [np.moveaxis(x, axis, 0) for x, axis in zip(args[n:], numbers("scan_input_axes"))]  # noqa: B905
        reversals = zip(sequences, numbers("scan_input_directions"))  # noqa: B905
        sequences = [x[::-1] if reverse else x for x, reverse in reversals]
        states, stacks = list(args[:n]), []
        for slices in zip(*sequences, strict=True):
            inputs = {**(context or {}), **dict(zip(self.body.input_names, [*states, *slices], strict=True))}
            results = self._run_body(inputs, bindings=bindings)
            states = results[:n]
            stacks.append(results[n:])
        outputs = [np.stack(steps) for steps in zip(*stacks, strict=True)]
        reversals = zip(outputs, numbers("scan_output_directions"))  # noqa: B905
        outputs = [y[::-1] if reverse else y for y, reverse in reversals]
        axes = zip(outputs, numbers("scan_output_axes"))  # noqa: B905
        return (*states, *(np.moveaxis(y, 0, axis) for y, axis in axes))


class Loop(_WithBody):
    """Stack the outputs of iterations along a new axis; the reference concatenates them along an existing one."""

    def _run(
        self, trips: Any, going: Any, *states: Any, context: Any = None, bindings: Any = None, **_: Any
    ) -> Any:
        names, n = self.body.input_names, len(states)
        stacks: list[Any] = []
        while (trips is None or len(stacks) < trips) and (going is None or going):
            values = [np.array(len(stacks), np.int64), np.array(True), *states]
            inputs = {**(context or {}), **dict(zip(names, values, strict=True))}
            going, *results = self._run_body(inputs, bindings=bindings)
            states = results[:n]
            stacks.append(results[n:])
        empty = [np.zeros((0,))] * (len(self.body.output_names) - 1 - n)
        return (*states, *([np.stack(steps) for steps in zip(*stacks, strict=True)] if stacks else empty))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


NUMPY_ACTIVATIONS: dict[str, Any] = {
    "Affine": lambda x, a, b: a * x + b,
    "Elu": lambda x, a, b: np.where(x < 0, a * np.expm1(x), x),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "LeakyRelu": lambda x, a, b: np.where(x < 0, a * x, x),
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "Sigmoid": lambda x, a, b: sigmoid(x),
    "Softplus": lambda x, a, b: np.log1p(np.exp(x)),
    "Softsign": lambda x, a, b: x / (1 + abs(x)),
    "Tanh": lambda x, a, b: np.tanh(x),
    "ThresholdedRelu": lambda x, a, b: np.where(x > a, x, 0),
}


def activation(name: str, alpha: Any, beta: Any, clip: float) -> Any:
    return lambda x: NUMPY_ACTIVATIONS[name](np.clip(x, -clip, clip), alpha, beta)


class _Recurrent(OpRun):
    """Run a recurrent operator one row and one step at a time, as specified.

    As in ONNX Runtime, `clip` applies to the gates only. `activation_alpha` and `activation_beta` list the parameters
    of the activations that have them.
    """

    default: tuple[str, ...]
    step: Any

    def _run(self, x, w, r, b=None, lengths=None, h=None, c=None, p=None, **attributes):  # type: ignore[no-untyped-def]
        present = {name: value for name, value in attributes.items() if value is not None}
        count, hidden = len(w), r.shape[-1]
        if present.get("layout"):
            x, h, c = (None if v is None else np.swapaxes(v, 0, 1) for v in (x, h, c))
        steps, rows = x.shape[:2]
        names = present.get("activations") or self.default * count
        names = names[: len(self.default) * count]
        alphas, betas = ([*present.get(f"activation_{name}", []), *names] for name in ("alpha", "beta"))
        clip = present.get("clip") or np.inf
        b = np.zeros((count, 2 * w.shape[1]), x.dtype) if b is None else b
        h, c = (np.zeros((count, rows, hidden), x.dtype) if v is None else v.copy() for v in (h, c))
        p = np.zeros((count, 3 * hidden), x.dtype) if p is None else p
        y = np.zeros((steps, count, rows, hidden), x.dtype)
        for d in range(count):
            first = d * len(self.default)
            places = range(first, first + len(self.default))
            clips = [clip, clip, np.inf]
            functions = [activation(names[i], alphas[i], betas[i], clips[i - first]) for i in places]
            backwards = present["direction"] == "reverse" or d == 1
            for row in range(rows):
                order = range(steps if lengths is None else lengths[row])
                for t in reversed(order) if backwards else order:
                    wx, wb, rb = w[d] @ x[t, row], *np.split(b[d], 2)
                    h[d, row], c[d, row] = self.step(
                        h[d, row], c[d, row], wx + wb, r[d], rb, np.split(p[d], 3), functions, present
                    )
                    y[t, d, row] = h[d, row]
        if present.get("layout"):
            y, h, c = y.transpose(2, 0, 1, 3), np.swapaxes(h, 0, 1), np.swapaxes(c, 0, 1)
        return (y, h, c)[: len(self.onnx_node.output)]


class RNN(_Recurrent):
    default = ("Tanh",)

    def step(self, h, c, wx, r, rb, p, functions, given):  # type: ignore[no-untyped-def]
        return functions[0](wx + r @ h + rb), c


class GRU(_Recurrent):
    default = ("Sigmoid", "Tanh")

    def step(self, h, c, wx, r, rb, p, functions, given):  # type: ignore[no-untyped-def]
        (xz, xr, xh), (rz, rr, rh), (bz, br, bh) = np.split(wx, 3), np.split(r, 3), np.split(rb, 3)
        z, reset = functions[0](xz + rz @ h + bz), functions[0](xr + rr @ h + br)
        before = given.get("linear_before_reset")
        n = functions[1](xh + (reset * (rh @ h + bh) if before else rh @ (reset * h) + bh))
        return (1 - z) * n + z * h, c


class LSTM(_Recurrent):
    default = ("Sigmoid", "Tanh", "Tanh")

    def step(self, h, c, wx, r, rb, p, functions, given):  # type: ignore[no-untyped-def]
        f, g, squash = functions
        i, o, forget, cell = np.split(wx + r @ h + rb, 4)
        i = f(i + p[0] * c)
        forget = 1 - i if given.get("input_forget") else f(forget + p[2] * c)
        following = forget * c + i * g(cell)
        return f(o + p[1] * following) * squash(following), following
