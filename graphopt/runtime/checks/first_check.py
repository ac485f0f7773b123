"""Check a plain training graph on a batch, by oracles that share nothing with what made it.

The file as it is, run by ONNX Runtime, is the oracle of predictions. Central differences of the loss are that of
gradients: forward passes of the plain graph, in float64 where the runtime has kernels. Published formulas in NumPy are
that of updates. What trains is not checked: the report lists it.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import line
from graphopt.graph import provenance
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import CONVOLUTIONS
from graphopt.graph.precision import retype
from graphopt.graph.roles import Role, with_role
from graphopt.graph.state import LEARNING_RATE, LOSS_SCALE, STEP, accumulators
from graphopt.graph.storage import weight_bytes
from graphopt.graph.values import name_of, next_of, state_of, swap
from graphopt.runtime.checks.file import file_findings
from graphopt.runtime.checks.findings import CheckTable, Disagreement, Finding
from graphopt.runtime.checks.forward import Forward, forward_of
from graphopt.runtime.checks.slopes import (
    DOUBLE,
    SINGLE,
    Arrays,
    Precision,
    Slope,
    dot,
    norm_of,
    sizes_of,
    slope_along,
)
from graphopt.runtime.checks.verdicts import ROOM, digest_of, read_note, write_note, write_reproducer
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.state_buffers import StateBuffers

_log = logging.getLogger(__name__)

CONVERTED = 2**28  # bytes of state and weights up to which they are converted to other precisions
CHECKED = 2**30  # bytes of state up to which gradients are checked
MANY = 2**20  # numbers in parameters from which two groups of them are checked
NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
TRIALS = 2  # of a gradient, to see how much of a difference is rounding
NOISE = 16  # roundings
LOST = 0.02  # of the slope that lost entries of typical size would have, what rounding may be
WHOLE = "the whole gradient"
SOURCES = tuple(sorted(Path(__file__).parent.glob("*.py")))


class FirstCheck:
    """Check a training graph before its first update, once per graph, form of the data and machine.

    Args:
        model: the plain training graph without its initial state.
        buffers: its state and hyperparameters.
    """

    def __init__(self, device: Device, model: ir.Model, buffers: StateBuffers) -> None:
        self._device, self._model, self._buffers = device, model, buffers
        self._origin = provenance.of(model)
        self._cpu = Device(
            "cpu", threads=device.threads, custom_ops=device.custom_ops, native=False, flush_denormals=False
        )

    def check(self, batch: Arrays) -> None:
        """Check the graph on a batch, unless the machine remembers that it has.

        Raises:
            Disagreement: an output, a gradient or an update differs.
        """
        begun = time.perf_counter()
        digest = self._digest(batch)
        note = f"{digest}.checked.json"
        remembered = None if self._device.verify is True else read_note(ROOM, note, "difference", str)
        message = ""
        if remembered != "":  # a difference is looked at again, since other data of this form may have none
            table = CheckTable(self.findings(batch), "the first batch")
            message = self._reported(table, batch, digest)
            write_note(ROOM, note, {"difference": message, "findings": [str(x) for x in table.findings]})
            _log.info("checked the first step in %.3f s", time.perf_counter() - begun)
        provenance.forget(self._model)
        if message:
            raise Disagreement(message)

    def findings(self, batch: Arrays) -> list[Finding]:
        """Return what is found about the file, the gradient and the update."""
        return [
            *file_findings(self._cpu, self._model, self._origin, self._state(), batch),
            *self._steps(batch),
        ]

    def _digest(self, batch: Arrays) -> str:
        """Return a hash of what the verdict depends on."""
        device, origin = self._device, self._origin
        form = sorted((name, str(x.dtype), x.shape) for name, x in batch.items())
        made = origin and (
            origin.file and origin.file.mark,
            _told(origin.passes),
            origin.is_initial(self._state()),
        )
        facts = (form, made, device.ort.__version__, device.verify == "full", type(device.verify))
        return digest_of([self._model], SOURCES, facts)

    @functools.cached_property
    def _hyperparameters(self) -> Arrays:
        return {name: np.array(x.numpy()) for name, x in self._buffers.fed.items()}

    def _state(self) -> Arrays:
        buffers = self._buffers.sets[self._buffers.current]
        return {**{name: np.asarray(x.numpy()) for name, x in buffers.items()}, **self._hyperparameters}

    def _steps(self, batch: Arrays) -> Iterator[Finding]:
        """Yield what is found about the gradient and the update."""
        state = self._state()
        if sum(x.nbytes for x in state.values()) > CHECKED and self._device.verify != "full":
            yield Finding(
                "gradient",
                "all",
                "not checked",
                reason="the state has more than 1 GB: verify='full' checks it",
            )
            return
        try:
            yield from _Step(self._cpu, self._model, state, batch, self._device.verify == "full").findings(
                self._origin
            )
        except Exception as error:  # noqa: BLE001 - the runtime raises many types; the table says which
            yield Finding("gradient", "all", "not checked", reason=line(error))

    def _reported(self, table: CheckTable, batch: Arrays, digest: str) -> str:
        """Return the line that tells of the largest difference after writing a reproducer; an empty one without."""
        if table.agrees:
            return ""
        worst = table.differences[0]
        facts = {
            "onnxruntime": self._device.ort.__version__,
            "findings": [str(x) for x in table.findings],
        }
        folder = write_reproducer(digest, {"plain": self._model}, self._state() | batch, facts)
        found, expected = (f"{x:.6g}" if x is not None else "other" for x in (worst.found, worst.expected))
        told = {
            "file": f"output {worst.name!r}: expected the file's own numbers, of which one is {expected}, found {found}"
            " from the training graph before its first step",
            "gradient": f"parameter {worst.name!r}: expected a gradient with the slope {expected} of the loss by "
            f"central differences, found {found}: a gradient rule of your own may be wrong (or is one that "
            "passes.gradient has to declare by surrogate=True)",
            "update": f"parameter {worst.name!r}: expected {worst.reason} to move it by {expected}, found {found}",
        }[worst.part]
        return f"{told}; please report it with the files in {folder}; verify=False trains without this check"


def _told(passes: Mapping[str, Sequence[Any]]) -> str:
    """Return passes as a text that is the same in other processes."""
    return repr(
        {name: [getattr(x, "__qualname__", None) or repr(x) for x in given] for name, given in passes.items()}
    )


class _Step:
    """Hold the plain step on a batch near the state at hand: its loss, gradients and update."""

    def __init__(self, device: Device, model: ir.Model, state: Arrays, batch: Arrays, is_full: bool) -> None:
        self._device, self._is_full, self._batch = device, is_full, batch
        self._forward = forward_of(model)
        whole = self._forward.whole
        self._parameters = {x.name: x for x in with_role(whole, Role.PARAMETER)}
        size = sum(x.nbytes for x in state.values()) + weight_bytes(model)
        self._is_small = size <= CONVERTED
        self._is_narrow = self._is_small and any(
            y.dtype in NARROW for node in whole.graph.all_nodes() for y in node.outputs
        )
        self._types = {y.name: y.type for y in whole.graph.outputs}
        if self._is_narrow:
            _in(whole, ir.DataType.FLOAT)
        self._session = Session(device, whole)
        for name in self._forward.gradients:
            if not np.isfinite(state[name]).all():
                self._forward.unchecked[name] = "it has numbers that are not finite"
        for jitter in (True, False):  # beside a kink that parameters are at exactly
            self.state = self._moved(state) if jitter else state
            self.outputs = self._session.compute_arrays(_fed(whole, {**self.state, **batch}))
            if all(np.isfinite(x).all() for x in self.outputs.values() if x.dtype.kind == "f"):
                break
        self.gradients = {
            name: self.outputs[y].astype(np.float64) for name, y in self._forward.gradients.items()
        }

    def _moved(self, state: Arrays) -> Arrays:
        """Return a state whose parameters differ a little from those at hand."""
        rng = np.random.default_rng(0)
        moved = dict(state)
        names = [name for name in self._forward.gradients if name not in self._forward.unchecked]
        for name, size in sizes_of({name: state[name] for name in names}).items():
            noise = (SINGLE.jitter * size * rng.standard_normal(state[name].shape)).astype(np.float32)
            for each in (name, *self._forward.moved.get(name, [])):
                moved[each] = (state[each] + noise).astype(state[each].dtype)
        return moved

    def findings(self, origin: provenance.Provenance | None) -> Iterator[Finding]:
        """Yield what is found about the gradient and the update."""
        if not all(
            np.isfinite(x).all() for x in (*self.gradients.values(), self.outputs[self._forward.loss])
        ):
            yield Finding("gradient", "all", "not checked", reason="the loss or a gradient is not finite")
            return
        for name, reason in self._forward.unchecked.items():
            yield Finding("gradient", name, "not checked", norm=self._norm(name), reason=reason)
        names = [name for name in self.gradients if name not in self._forward.unchecked]
        if names:
            yield from _Slopes(self, names).findings()
        yield from self._updates(origin)

    def _stays_finite(self, following: ir.Value) -> bool:
        """Return whether a step makes no number of a state infinite or NaN that was finite."""
        old, new = self.state[state_of(following)], self.outputs[name_of(following)]
        return new.dtype.kind != "f" or bool(np.isfinite(new[np.isfinite(old)]).all())

    def _norm(self, name: str) -> float:
        return norm_of(self.gradients[name])

    @functools.cached_property
    def noisy_gradients(self) -> list[Arrays]:
        """Return gradients at points, and of data, that differ by some roundings."""
        data = {x.name for x in with_role(self._forward.whole, Role.DATA)}
        found = []
        for seed in range(TRIALS):
            rng = np.random.default_rng(seed)

            def noisy(x: np.ndarray, rng: np.random.Generator = rng) -> np.ndarray:
                if x.dtype.kind != "f":
                    return x
                spread = float(np.abs(x).max(initial=0.0)) or 1.0
                return (x + NOISE * SINGLE.unit * spread * rng.uniform(-1, 1, x.shape)).astype(x.dtype)

            state = {name: noisy(x) if name in self.gradients else x for name, x in self.state.items()}
            batch = {name: noisy(x) if name in data else x for name, x in self._batch.items()}
            outputs = self._session.compute_arrays(_fed(self._forward.whole, {**state, **batch}))
            found.append({name: outputs[y].astype(np.float64) for name, y in self._forward.gradients.items()})
        return found

    @functools.cached_property
    def precise_gradients(self) -> Arrays | None:
        """Return the gradients in float64; None if the runtime has no kernels for them."""
        whole = self._forward.whole.clone()
        try:
            _write_out_hard_sigmoids(whole)
            _in(whole, ir.DataType.DOUBLE)
            outputs = Session(self._device, whole).compute_arrays(_fed(whole, {**self.state, **self._batch}))
        except Exception as error:  # noqa: BLE001 - versions raise different types
            _log.debug("no gradient in float64: %s", line(error))
            return None
        return {name: outputs[y] for name, y in self._forward.gradients.items()}

    def losses(self) -> Iterator[tuple[Callable[[Arrays], float], Precision]]:
        """Yield functions that compute the loss at points, the most precise one that runs first."""
        part = self._forward.part
        has_convolutions = any(node.op_type in CONVOLUTIONS for node in part.graph)  # float32 on every CPU
        types = [ir.DataType.DOUBLE] if self._is_small and not has_convolutions else []
        for dtype in (*types, ir.DataType.FLOAT if self._is_narrow else None):
            part = self._forward.part.clone()
            if dtype is not None:
                _in(part, dtype)
            known = {**self.state, **self._batch, **self.outputs}
            try:
                session = Session(self._device, part)
                fed = _fed(part, {name: known[name] for name in session.inputs})

                def loss(
                    point: Arrays, session: Session = session, fed: Arrays = fed, part: ir.Model = part
                ) -> float:
                    near = dict(point)
                    for name, slots in self._forward.moved.items():
                        if name in point:
                            change = point[name] - self.state[name].astype(np.float64)
                            near |= {slot: self.state[slot].astype(np.float64) + change for slot in slots}
                    moved = _fed(part, {name: x for name, x in near.items() if name in fed})
                    (value,) = session.run({**fed, **moved})
                    return float(value)

                loss({})
            except Exception as error:  # noqa: BLE001 - versions raise different types
                _log.debug("no loss in %s: %s", dtype, line(error))
                continue
            is_double = dtype is ir.DataType.DOUBLE or part.graph.outputs[0].dtype is ir.DataType.DOUBLE
            yield loss, DOUBLE if is_double else SINGLE

    @property
    def forward(self) -> Forward:
        return self._forward

    @property
    def is_full(self) -> bool:
        return self._is_full

    def _updates(self, origin: provenance.Provenance | None) -> Iterator[Finding]:
        """Yield what is found about the update of each parameter."""
        passes = {} if origin is None else origin.passes
        optimizers = passes.get("optimizer", ())
        if len(optimizers) != 1:
            why = "the optimizer is not known" if not optimizers else "several passes update"
            yield Finding("update", "all", "not checked", reason=why)
            return
        if accumulators(self._forward.whole):
            yield Finding(
                "update", "all", "not checked", reason="gradients of several batches are accumulated"
            )
            return
        following = {name: y for name in self.gradients if (y := self.outputs.get(next_of(name))) is not None}
        if LOSS_SCALE in self.state and all(
            np.array_equal(y, self.state[name]) for name, y in following.items()
        ):
            yield Finding("update", "all", "not checked", reason="the scale of the loss skips this step")
            return
        if not all(map(self._stays_finite, with_role(self._forward.whole, Role.NEXT))):
            yield Finding("update", "all", "not checked", reason="the new state is not finite")
            return
        from passes.optimizers.optimizer import Optimizer
        from passes.optimizers.reference import UPDATES, clipped, update_of

        (optimizer,) = optimizers
        gradients = clipped(passes.get("clip", ()), self.gradients)
        if not isinstance(optimizer, Optimizer) or gradients is None:
            name = type(optimizer if gradients is not None else passes["clip"][-1]).__name__
            yield Finding("update", "all", "not checked", reason=f"no formula of {name} is known")
            return
        rate = self.outputs.get(LEARNING_RATE, self.state.get(LEARNING_RATE))
        time = int(self.state[STEP]) + 1
        for name, g in gradients.items():
            if not np.isfinite(self.state[name]).all():
                yield Finding("update", name, "not checked", reason="it has numbers that are not finite")
                continue
            own = update_of(optimizer, self._parameters[name])
            w = self.state[name].astype(np.float64)
            new = self.outputs.get(next_of(name))
            if own is None or new is None or rate is None:
                why = f"no formula of {type(optimizer).__name__} is known"
                yield Finding("update", name, "not checked", reason=why)
                continue
            prefix = f"{name}."
            slots = {
                key.removeprefix(prefix): x.astype(np.float64)
                for key, x in self.state.items()
                if key.startswith(prefix)
            }
            moved = UPDATES[type(own[0])](own[0], w, g, float(rate) * own[1], time, slots) - w
            yield _compared(
                name, moved, new.astype(np.float64) - w, w, type(own[0]).__name__, self._norm(name)
            )


def _compared(
    name: str, expected: np.ndarray, found: np.ndarray, w: np.ndarray, optimizer: str, norm: float
) -> Finding:
    """Compare the update of a parameter with that of the formula."""
    slack = 8 * SINGLE.unit * norm_of(w)
    lengths = [norm_of(x) for x in (expected, found)]
    off = norm_of(found - expected) - slack
    verdict = "agrees" if off <= 1e-3 * lengths[0] else "differs"
    along = dot(found, expected) / lengths[0] if lengths[0] else lengths[1]
    return Finding("update", name, verdict, lengths[0], along, norm, optimizer)  # type: ignore[arg-type]


class _Slopes:
    """Compare the gradients of some parameters with slopes of the loss."""

    def __init__(self, step: _Step, names: Sequence[str]) -> None:
        self._step, self._names = step, list(names)
        self._point = {name: step.state[name].astype(np.float64) for name in names}
        self._sizes = sizes_of(self._point)
        self._norms = {name: norm_of(step.gradients[name]) for name in names}
        self._found: dict[str, Slope] = {}

    def findings(self) -> Iterator[Finding]:
        step = self._step
        for loss, precision in step.losses():
            start, noted = loss({}), float(step.outputs[step.forward.loss])
            if not math.isfinite(start) or abs(start - noted) > 1e-2 * max(abs(noted), 1e-3):
                continue
            self._loss, self._start, self._precision = loss, start, precision
            break
        else:
            reason = "the loss could not be computed again with the same number"
            yield Finding("gradient", "all", "not checked", reason=reason)
            return
        rng = np.random.default_rng(1)
        if step.is_full:
            yield from (self._of_one(name) for name in self._names)
        else:
            yield from self._of_groups(rng)
        yield from self._of_zeros(rng)

    def _of_groups(self, rng: np.random.Generator) -> Iterator[Finding]:
        """Check along the whole gradient, and along a random direction of each group."""
        whole = {name: self._step.gradients[name] for name in self._names}
        groups = [(self._names, whole)]
        count = 1
        if self._precision is not DOUBLE:
            total = sum(x.size for x in self._point.values())
            count = min(8, math.ceil(len(self._names) / 4)) if total <= MANY else min(2, len(self._names))
        typical = float(np.median([self._norms[n] * self._length(n) for n in self._names])) or 1.0
        for i in range(count):
            names = self._names[i::count]
            direction = {}
            for name in names:
                g, norm = self._step.gradients[name], self._norms[name]
                if norm:
                    share = min(typical / norm, self._length(name)) / norm
                    direction[name] = share * g * rng.uniform(0.5, 1.5, g.shape)
            groups.append((names, direction))
        for names, direction in groups:
            slope = self._along(direction)
            norm = math.sqrt(sum(self._norms[name] ** 2 for name in names))
            title = WHOLE if direction is whole else _titled(names)
            if slope.verdict != "agrees" and (title != WHOLE or slope.verdict == "differs"):
                single = [self._of_one(name) for name in names]
                wrong = [x for x in single if x.verdict == "differs"]
                if wrong:
                    yield from sorted(wrong, key=_difference, reverse=True)
                    return
                if all(x.verdict == "agrees" for x in single):
                    yield self._finding(title, slope, norm, "agrees")
                    continue
            verdict = "not checked" if slope.verdict == "differs" and len(names) > 1 else slope.verdict
            yield self._finding(title, slope, norm, verdict)

    def _length(self, name: str) -> float:
        """Return the size of a parameter as a vector."""
        return self._sizes[name] * math.sqrt(self._point[name].size)

    def _least(self, direction: Mapping[str, np.ndarray]) -> float:
        """Return what rounding of the gradient may add to a slope."""
        length = math.sqrt(sum(float(np.square(d).sum()) for d in direction.values()))
        return 2e-6 * max(self._norms.values()) * length

    def _along(self, direction: Mapping[str, np.ndarray]) -> Slope:
        return self._compared(direction, _inner(self._step.gradients, direction), self._least(direction))

    def _compared(self, direction: Mapping[str, np.ndarray], found: float, least: float) -> Slope:
        """Compare slopes; a difference that rounding of the gradient may explain is none."""

        def slope_of(found: float) -> Slope:
            return slope_along(self._loss, self._point, self._start, direction, found, least, self._precision)

        slope = slope_of(found)
        if slope.verdict != "differs":
            return slope
        doubt = max(abs(_inner(noisy, direction) - found) for noisy in self._step.noisy_gradients)
        is_rounding = not abs(slope.expected - found) > 4 * doubt
        if not is_rounding and self._precision is DOUBLE and (precise := self._step.precise_gradients):
            doubt = abs(_inner(precise, direction) - found)
            is_rounding = slope_of(_inner(precise, direction)).verdict == "agrees"
        return replace(slope, doubt=doubt, verdict="not checked") if is_rounding else slope

    def _of_one(self, name: str) -> Finding:
        """Check along a parameter's own gradient, whose slope is the gradient's norm."""
        norm = self._norms[name]
        if not norm:
            return Finding("gradient", name, "agrees", 0.0, 0.0, 0.0, "0; see the entries that are 0")
        if name not in self._found:
            self._found[name] = self._along({name: self._step.gradients[name] / norm})
        return self._finding(name, self._found[name], norm, self._found[name].verdict)

    def _finding(self, name: str, slope: Slope, norm: float, verdict: Any) -> Finding:
        reason = "rounding and curvature overlap" if verdict == "not checked" else ""
        return Finding("gradient", name, verdict, slope.expected, slope.found, norm, reason)

    def _of_zeros(self, rng: np.random.Generator) -> Iterator[Finding]:
        """Check along a random direction of the entries whose gradient is exactly 0."""
        direction = {}
        for name in self._names:
            g = self._step.gradients[name]
            zero = g == 0
            if zero.any():
                direction[name] = np.where(zero, self._sizes[name] * rng.choice([-1.0, 1.0], g.shape), 0.0)
        if not direction:
            return
        typical = {
            name: self._norms[name] / math.sqrt(max(1, int(np.count_nonzero(self._step.gradients[name]))))
            for name in self._names
        }
        least = min((x for x in typical.values() if x), default=0.0)
        square = sum((typical[name] or least) ** 2 * dot(d, d) for name, d in direction.items())

        def slope_of(part: Mapping[str, np.ndarray]) -> Slope:
            return self._compared(part, 0.0, max(self._least(part), LOST * math.sqrt(square)))

        slope = slope_of(direction)
        if slope.verdict == "differs":
            for name, d in direction.items():
                own = slope_of({name: d})
                if own.verdict == "differs":
                    reason = "entries that are 0"
                    yield Finding("gradient", name, "differs", own.expected, 0.0, self._norms[name], reason)
                    return
        count = sum(int(np.count_nonzero(d)) for d in direction.values())
        verdict = "agrees" if slope.verdict == "agrees" else "not checked"
        yield self._finding(f"{count:,} entries that are 0", slope, 0.0, verdict)


def _inner(gradients: Arrays, direction: Mapping[str, np.ndarray]) -> float:
    """Return the inner product of gradients and a direction."""
    return sum(dot(gradients[name], d) for name, d in direction.items())


def _titled(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} parameters, {names[0]} to {names[-1]}"


def _difference(finding: Finding) -> float:
    """Return by how much a finding's numbers differ."""
    assert finding.found is not None and finding.expected is not None
    return abs(finding.found - finding.expected)


def _write_out_hard_sigmoids(model: ir.Model) -> None:
    """Replace HardSigmoid, of which ONNX Runtime 1.32 has no kernel for float64, by its definition."""
    with Emitter(model) as op:
        for node in list(model.graph):
            if node.op_type == "HardSigmoid" and not node.domain and node.inputs[0] is not None:
                slope, shift = (
                    node.attributes.get_float(name, x) for name, x in (("alpha", 0.2), ("beta", 0.5))
                )
                swap(node.outputs[0], op.Clip(node.inputs[0] * slope + shift, 0.0, 1.0))
                model.graph.remove(node, safe=True)
    model.graph.sort()


def _in(model: ir.Model, dtype: ir.DataType) -> None:
    """Change the floating-point type of a model; outputs keep their other types."""
    types = {y: y.type for y in model.graph.outputs}
    retype(model, dtype)
    for y, kind in types.items():
        is_float = kind is not None and kind.dtype.is_floating_point()
        y.type = ir.TensorType(dtype) if is_float else kind


def _fed(model: ir.Model, arrays: Arrays) -> Arrays:
    """Return arrays in the types of a model's inputs, of those that it has."""
    types = {x.name: x.dtype for x in model.graph.inputs if x.dtype is not None}
    return {name: np.asarray(x, types[name].numpy()) for name, x in arrays.items() if name in types}
