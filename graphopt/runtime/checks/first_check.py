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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphopt.errors import line
from graphopt.graph import provenance
from graphopt.graph.emitter import Emitter
from graphopt.graph.memory import step_bytes
from graphopt.graph.operators import CONVOLUTIONS
from graphopt.graph.roles import Role, with_role
from graphopt.graph.storage import weight_bytes
from graphopt.graph.traversal import all_nodes, viewed_model
from graphopt.graph.values import swap
from graphopt.pipeline import garbage_waits
from graphopt.runtime.checks.file import file_findings
from graphopt.runtime.checks.findings import CheckTable, Disagreement, Finding
from graphopt.runtime.checks.forward import forward_of
from graphopt.runtime.checks.precise import in_type
from graphopt.runtime.checks.rows import some_rows, some_tokens
from graphopt.runtime.checks.slopes import (
    DOUBLE,
    ROUNDINGS_OF_NOISE,
    SINGLE,
    Arrays,
    Direction,
    Entries,
    Precision,
    Question,
    Slope,
    Verdict,
    agree_at_once,
    are_finite,
    dot_along,
    inner_product,
    norm_of,
    slope_along,
    typical_sizes,
    wide,
)
from graphopt.runtime.checks.updates import Updates, some_of, update_part
from graphopt.runtime.checks.verdicts import ROOM, digest_of, read_note, write_note, write_reproducer
from graphopt.runtime.device import Device
from graphopt.runtime.frozen import placement_of
from graphopt.runtime.session import Session
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.system_memory import NoRoom, check_room, give_back

_log = logging.getLogger(__name__)

MOST_CONVERTED = 2**28  # bytes of state and weights up to which they are converted to other precisions
MOST_CHECKED = 2**30  # bytes of state up to which gradients are checked
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
NOISY_GRADIENTS = 2  # to see how much of a difference is rounding
STRICT_TOGETHER = 5  # parameters that are checked together as strictly as one
# How far, relative to others, a parameter moves at most whose slope is small: this times its size.
FARTHEST_MOVE = 4
# Forward passes, after which an open question stays open; of large graphs, while nothing differs.
MOST_PASSES, MOST_LARGE_PASSES = 300, 40
# Numbers of a parameter on average, from which on only some of them are updated, as a graph of its own.
MANY = 2**17
_FEW = 16  # times as many numbers has an array of which a direction holds the places that move
_PERIOD = 8191  # numbers from which random ones repeat, a prime
ALONG, SIGNS = "along the gradient", "along random signs"
NO_DOUBLE = CONVOLUTIONS | {"Erf", "Gelu"}  # ONNX Runtime has kernels of float32 only on every CPU
_REFERENCE = Path(__file__).parents[3] / "passes" / "optimizers" / "reference.py"
SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), _REFERENCE)


class FirstCheck:
    """Check a training graph before its first update, once per graph, form of the data and machine.

    Args:
        model: the plain training graph without its initial state.
        buffers: its state and hyperparameters.
    """

    def __init__(self, device: Device, model: ir.Model, buffers: StateBuffers) -> None:
        self._device, self._model, self._buffers = device, model, buffers
        self._origin, self._has_room = provenance.of(model), True
        self._cpu = Device(
            "cpu",
            threads=device.threads,
            custom_ops=device.custom_ops,
            native=False,
            flush_denormals=False,
            frozen=placement_of(device, model),
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
            if self._has_room:
                write_note(ROOM, note, {"difference": message, "findings": [str(x) for x in table.findings]})
            _log.info("checked the first step in %.3f s", time.perf_counter() - begun)
            give_back()
        provenance.forget_source(self._model)
        if message:
            raise Disagreement(message)

    def findings(self, batch: Arrays) -> list[Finding]:
        """Return what is found about the file, the gradient and the update."""
        rows = None if self._device.verify == "full" else some_rows(self._model, batch)
        tokens = rows
        if rows is None and self._device.verify != "full" and self._cpu.frozen == "low":
            tokens = some_tokens(self._model, batch)
        with garbage_waits():
            return [*self._file(batch, rows), *self._steps(batch, tokens)]

    def _file(self, batch: Arrays, rows: Arrays | None) -> list[Finding]:
        """Return what is found about the file, on some rows of the batch if all of it agrees there."""
        found = list[Finding]()
        for given in (rows, batch):
            if given is not None:
                found = list(file_findings(self._cpu, self._model, self._origin, self._state(), given))
                if all(x.verdict == "agrees" for x in found):
                    break
        return found

    def _digest(self, batch: Arrays) -> str:
        """Return a hash of what the verdict depends on."""
        device, origin = self._device, self._origin
        form = sorted((name, str(x.dtype), x.shape) for name, x in batch.items())
        made = origin and (
            origin.file and origin.file.digest(),
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

    def _steps(self, batch: Arrays, rows: Arrays | None) -> Iterator[Finding]:
        """Yield what is found about the gradient and the update."""
        state = self._state()
        if sum(x.nbytes for x in state.values()) > MOST_CHECKED and self._device.verify != "full":
            yield Finding(
                "gradient",
                "all",
                "not checked",
                reason="the state has more than 1 GB: verify='full' checks it",
            )
            return
        if rows is not None and (found := self._agreed(state, rows)):
            yield from found
            return
        try:
            self._check_room(batch)
            yield from _Step(self._cpu, self._model, state, batch, self._device.verify == "full").findings(self._origin)
        except NoRoom as error:
            self._has_room = False
            warnings.warn(f"the first check: {error}: gradients and updates are not checked", stacklevel=2)
            yield Finding("gradient", "all", "not checked", reason=line(error))
        except Exception as error:  # noqa: BLE001 - the runtime raises many types; the table says which
            yield Finding("gradient", "all", "not checked", reason=line(error))

    def _check_room(self, batch: Arrays) -> None:
        """Raise `NoRoom` if there is less memory than the step takes on a batch; look only if it may be much."""
        if self._cpu.frozen == "low":
            needed = step_bytes(self._model, {name: x.shape for name, x in batch.items()})
            check_room(needed, self._device.memory, "a step on the whole batch")

    def _agreed(self, state: Arrays, rows: Arrays) -> list[Finding]:
        """Return what is found on some rows of the batch, or nothing unless all gradients agree there."""
        try:
            step = _Step(self._cpu, self._model, state, rows, is_full=False)
            found = list(step.findings(self._origin)) if all(step.norms.values()) else []
        except Exception as error:  # noqa: BLE001 - the runtime raises many types; the whole batch decides
            _log.debug("no check on some rows: %s", line(error))
            return []
        # What stays open on some tokens of a large graph is told, and not asked again of all: it would take minutes.
        is_enough = ("update",) if self._cpu.frozen != "low" else ("update", "gradient")
        agrees = all(x.verdict == "agrees" or (x.part in is_enough and x.verdict != "differs") for x in found)
        return found if agrees else []

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
            "passes.gradient has to declare by surrogate=True, and passes.surrogate for one compilation)",
            "update": f"parameter {worst.name!r}: expected {worst.reason} to move it by {expected}, found {found}",
        }[worst.part]
        return f"{told}; please report it with the files in {folder}; verify=False trains without this check"


def _told(passes: Mapping[str, Sequence[object]]) -> str:
    """Return passes as a text that is the same in other processes."""
    return repr({name: [getattr(x, "__qualname__", None) or repr(x) for x in given] for name, given in passes.items()})


class _Step:
    """Hold the plain step on a batch near the state at hand: its loss, gradients and update."""

    def __init__(self, device: Device, model: ir.Model, state: Arrays, batch: Arrays, is_full: bool) -> None:
        self._device, self.is_full, self._batch = device, is_full, batch
        self.is_low = device.frozen == "low"
        size = sum(x.nbytes for x in state.values()) + weight_bytes(model)
        self._is_small = size <= MOST_CONVERTED
        self._is_narrow = self._is_small and any(
            y.dtype in _NARROW for node in all_nodes(model.graph) for y in node.outputs
        )
        self.forward = forward_of(model)
        with self.forward.shown() as whole:
            if self._is_narrow:
                whole = whole.clone()
                in_type(whole, ir.DataType.FLOAT)
            numbers = sum(state[name].size for name in self.forward.gradients)
            is_worth = numbers >= MANY * max(1, len(self.forward.gradients))
            self._update = update_part(whole, self.forward.gradients) if is_worth else None
            # Predictions are large, and only a loss may read them.
            predictions = {y.name for y in with_role(whole, Role.PREDICTION)}
            left = predictions - {x.name for x in self.forward.part.graph.inputs}
            left |= self._update.outputs if self._update is not None else set()
            whole = viewed_model(whole, [y for y in whole.graph.outputs if y.name not in left])
            # Few runs do not make up for the runtime's optimization.
            self._session = Session(device, whole, optimized=False)
        self._whole = whole
        for name in self.forward.gradients:
            if not are_finite(state[name]):
                self.forward.unchecked[name] = "it has numbers that are not finite"
        for jitter in (True, False):  # beside a kink that parameters are at exactly
            self.state = self._moved(state) if jitter else state
            self.outputs = self.run(self.state)
            self._is_finite = all(are_finite(x) for x in self.outputs.values() if x.dtype.kind == "f")
            if self._is_finite:
                break
        self._read_gradients()

    def _read_gradients(self) -> None:
        self.gradients = {name: wide(self.outputs[y]) for name, y in self.forward.gradients.items()}
        if self._update is not None:
            # Copies: of small gradients, `some_of` returns views, which directions may be written over
            self._some = {name: np.array(some_of(g)) for name, g in self.gradients.items()}

    @functools.cached_property
    def may_overwrite(self) -> bool:
        """Return whether directions may take the memory of gradients, until `compute_again`; new memory takes long."""
        arrays = [self.outputs[y] for y in self.forward.gradients.values()]
        is_own = len({id(x) for x in arrays}) == len(arrays) and all(x.flags.writeable for x in arrays)
        return self._update is not None and is_own

    def compute_again(self) -> None:
        """Compute the gradients again that a direction was written over."""
        self.outputs = self.run(self.state)
        self._read_gradients()

    def _moved(self, state: Arrays) -> Arrays:
        """Return a state whose parameters differ a little from those at hand."""
        rng = np.random.default_rng(0)
        moved = dict(state)
        names = [name for name in self.forward.gradients if name not in self.forward.unchecked]
        for name, size in typical_sizes({name: state[name] for name in names}).items():
            noise = SINGLE.jitter * size * rng.standard_normal(min(_PERIOD, state[name].size), np.float32)
            for each in (name, *self.forward.moved.get(name, [])):
                moved[each] = _periodic(np.add, state[each], noise).astype(state[each].dtype, copy=False)
        return moved

    def findings(self, origin: provenance.Provenance | None) -> Iterator[Finding]:
        """Yield what is found about the gradient and the update."""
        shown = (*self.gradients.values(), self.outputs[self.forward.loss])
        if not (self._is_finite or all(map(are_finite, shown))):
            yield Finding("gradient", "all", "not checked", reason="the loss or a gradient is not finite")
            return
        for name, reason in self.forward.unchecked.items():
            yield Finding("gradient", name, "not checked", norm=self.norms[name], reason=reason)
        names = [name for name in self.gradients if name not in self.forward.unchecked]
        if names:
            yield from _Slopes(self, names).findings()
        yield from self._updates().findings({} if origin is None else origin.passes)

    def _updates(self) -> Updates:
        """Return the updates of the step; of some numbers if the others have no part in them."""
        part = self._update
        if part is None:
            return Updates(self._whole, self.run, self.state, self.outputs, self.gradients, self.norms)
        session = Session(self._device, part.model, optimized=False)
        state, gradients = {name: some_of(x) for name, x in self.state.items()}, self._some
        given = {self.forward.gradients[name]: g for name, g in gradients.items()}

        def run(arrays: Arrays) -> Arrays:
            def computed(xs: Arrays) -> Arrays:
                return session.compute_arrays(_fed(part.model, xs))

            return part.compute(computed, {**arrays, **given})

        return Updates(self._whole, run, state, run(state), gradients, self.norms)

    def run(self, arrays: Arrays) -> Arrays:
        """Return the outputs of the step for a state and its batch."""
        return self._session.compute_arrays(_fed(self._whole, {**arrays, **self._batch}))

    @property
    def loss(self) -> float:
        return float(self.outputs[self.forward.loss])

    @functools.cached_property
    def norms(self) -> dict[str, float]:
        return {name: norm_of(g) for name, g in self.gradients.items()}

    @functools.cached_property
    def noisy_gradients(self) -> list[Arrays]:
        """Return gradients at points, and of data, that differ by some roundings."""
        data = {x.name for x in with_role(self._whole, Role.DATA)}
        found = []
        for seed in range(NOISY_GRADIENTS):
            rng = np.random.default_rng(seed)

            def noisy(x: np.ndarray, rng: np.random.Generator = rng) -> np.ndarray:
                if x.dtype.kind != "f":
                    return x
                spread = float(np.abs(x).max(initial=0.0)) or 1.0
                return (x + ROUNDINGS_OF_NOISE * SINGLE.unit * spread * rng.uniform(-1, 1, x.shape)).astype(x.dtype)

            state = {name: noisy(x) if name in self.gradients else x for name, x in self.state.items()}
            batch = {name: noisy(x) if name in data else x for name, x in self._batch.items()}
            outputs = self._session.compute_arrays(_fed(self._whole, {**state, **batch}))
            found.append({name: wide(outputs[y]) for name, y in self.forward.gradients.items()})
        return found

    @functools.cached_property
    def precise_gradients(self) -> Arrays | None:
        """Return the gradients in float64; None if the runtime has no kernels for them."""
        with self.forward.shown() as shown:
            whole = shown.clone()
        try:
            _write_out_hard_sigmoids(whole)
            in_type(whole, ir.DataType.DOUBLE)
            outputs = Session(self._device, whole).compute_arrays(_fed(whole, {**self.state, **self._batch}))
        except Exception as error:  # noqa: BLE001 - versions raise different types
            _log.debug("no gradient in float64: %s", line(error))
            return None
        return {name: outputs[y] for name, y in self.forward.gradients.items()}

    def losses(self) -> Iterator[tuple[Callable[[Arrays], float], float, Precision]]:
        """Yield functions that compute the loss at points, and the loss here; the most precise one first.

        The loss here is the step's own if the function computes in its types.
        """
        part = self.forward.part
        is_single = not self._is_small or any(node.op_type in NO_DOUBLE for node in part.graph)
        types = [] if is_single else [ir.DataType.DOUBLE]
        known = {**self.state, **self._batch, **self.outputs}
        for dtype in (*types, ir.DataType.FLOAT if self._is_narrow else None):
            if dtype is not None:
                part = self.forward.part.clone()
                in_type(part, dtype)
            else:
                part = self.forward.part
            try:
                session = Session(self._device, part, optimized=False)
                fed = _fed(part, {name: known[name] for name in session.inputs})

                def loss(point: Arrays, session: Session = session, fed: Arrays = fed, part: ir.Model = part) -> float:
                    near = dict(point)
                    for name, slots in self.forward.moved.items():
                        if name in point:
                            change = point[name] - self.state[name].astype(np.float64)
                            near |= {slot: self.state[slot].astype(np.float64) + change for slot in slots}
                    moved = _fed(part, {name: x for name, x in near.items() if name in fed})
                    (value,) = session.run({**fed, **moved})
                    return float(value)

                start = self.loss if part is self.forward.part else loss({})
            except Exception as error:  # noqa: BLE001 - versions raise different types
                _log.debug("no loss in %s: %s", dtype, line(error))
                continue
            is_double = dtype is ir.DataType.DOUBLE or part.graph.outputs[0].dtype is ir.DataType.DOUBLE
            yield loss, start, DOUBLE if is_double else SINGLE


class _Slopes:
    """Compare the gradients of some parameters with slopes of the loss.

    One direction moves all parameters, and only if its slope differs are they halved, until the ones that differ are
    found (group testing, Dorfman 1943).
    """

    def __init__(self, step: _Step, names: Sequence[str]) -> None:
        self._step, self._names, self._passes = step, list(names), 0
        self._sizes = typical_sizes({name: step.state[name] for name in names})
        self._norms = {name: step.norms[name] for name in names}
        self._typical = float(np.median([self._norms[name] * self._length(name) for name in names])) or 1.0
        self._zeros = {name: int(np.count_nonzero(step.gradients[name] == 0)) for name in names}
        self._entry = {
            name: self._norms[name] / math.sqrt(max(1, step.gradients[name].size - zeros))
            for name, zeros in self._zeros.items()
        }

    def findings(self) -> Iterator[Finding]:
        step = self._step
        reason = "the loss could not be computed again with the same number"
        for loss, start, precision in step.losses():
            if self._is_noted(start):
                self._compute, self._start, self._precision = loss, start, precision
                self._is_double = precision is DOUBLE
                break
        else:
            yield Finding("gradient", "all", "not checked", reason=reason)
            return
        dtype = np.float64 if self._is_double else np.float32
        self._point = {name: step.state[name].astype(dtype, copy=False) for name in self._names}
        signed = [name for name in self._names if self._is_double or self._zeros[name]]
        if signed and not step.is_full:
            signs = self._along_signs(signed)
            asked = self._along_gradients(self._names, overwrite=step.may_overwrite), signs
            if both := agree_at_once(self._loss, self._point, start, asked):
                yield self._finding(self._names, *both, "agrees", f"{ALONG} and {SIGNS}")
                return
            if step.may_overwrite:
                step.compute_again()
        groups = [[name] for name in self._names] if step.is_full else [self._names]
        found = [x for names in groups for x in self._searched(names, self._along_gradients, ALONG)]
        found += self._searched(signed, self._along_signs, SIGNS) if signed else []
        if not self._is_double and any(x.verdict != "agrees" for x in found) and not self._is_noted(loss({})):
            yield Finding("gradient", "all", "not checked", reason=reason)
            return
        wrong = [x for x in found if x.verdict == "differs"]
        yield from sorted(wrong, key=_difference, reverse=True)
        yield from (x for x in found if x.verdict != "differs")

    def _is_noted(self, loss: float) -> bool:
        """Return whether a loss is about that of the step."""
        noted = self._step.loss
        return math.isfinite(loss) and abs(loss - noted) <= 1e-2 * max(abs(noted), 1e-3)

    def _searched(
        self, names: Sequence[str], question_of: Callable[[Sequence[str]], Question], how: str
    ) -> Iterator[Finding]:
        """Yield a finding for parameters whose slope agrees, and for each one of the others."""
        slope = self._compared(question_of(names))

        def finding(verdict: Verdict, reason: str = "") -> Finding:
            told = f"{how}{reason and ', '}{reason}"
            return self._finding(names, slope.expected, slope.found, verdict, told)

        if slope.verdict == "agrees":
            yield finding("agrees")
        elif len(names) == 1:
            yield finding(slope.verdict, "" if slope.verdict == "differs" else "rounding and curvature overlap")
        elif self._passes > self._most_passes(slope) and not self._step.is_full:
            yield finding("not checked", f"after {self._passes} forward passes: verify='full' goes on")
        else:
            halves = (names[: len(names) // 2], names[len(names) // 2 :])
            found = [x for half in halves for x in self._searched(half, question_of, how)]
            if slope.verdict == "differs" and all(x.verdict == "agrees" for x in found):
                yield finding("not checked", "they differ together, and agree in parts")
            yield from found

    def _finding(self, names: Sequence[str], expected: float, found: float, verdict: Verdict, how: str) -> Finding:
        """Return what is found about some parameters."""
        norm = math.sqrt(sum(self._norms[name] ** 2 for name in names))
        title = names[0] if len(names) == 1 else f"{len(names)} parameters, {names[0]} to {names[-1]}"
        return Finding("gradient", title, verdict, expected, found, norm, how)

    def _most_passes(self, slope: Slope) -> int:
        is_large = self._step.is_low and slope.verdict != "differs"
        return MOST_LARGE_PASSES if is_large else MOST_PASSES

    def _loss(self, point: Arrays) -> float:
        self._passes += 1
        return self._compute(point)

    def _length(self, name: str) -> float:
        """Return the size of a parameter as a vector."""
        return self._sizes[name] * math.sqrt(self._step.state[name].size)

    def _along_gradients(self, names: Sequence[str], *, overwrite: bool = False) -> Question:
        """Ask along a gradient, or a sum of several that have about the same slope, in their memory or in other."""
        if len(names) == 1:
            (name,) = names
            direction = {name: self._step.gradients[name] / (self._norms[name] or 1.0)}
            return self._question(direction, 0.0, self._precision)
        rng, direction, found = np.random.default_rng(1), Arrays(), 0.0
        for name in names:
            if norm := self._norms[name]:
                g = self._step.gradients[name]
                share = min(self._typical / norm, FARTHEST_MOVE * self._length(name)) / norm
                weights = share * rng.uniform(0.5, 1.5, min(_PERIOD, g.size))
                direction[name] = d = _periodic(np.multiply, g, weights.astype(g.dtype))
                found += inner_product(g, d)
                if overwrite:
                    np.copyto(g, d)
                    direction[name] = g
        change = self._precision.change * len(names) ** 0.25
        tolerance = self._precision.tolerance * min(1.0, STRICT_TOGETHER / len(names))
        doubted = self._precision.doubted / len(names)
        precision = replace(self._precision, change=change, tolerance=tolerance, doubted=doubted)
        return self._question(direction, 0.0, precision, found)

    def _along_signs(self, names: Sequence[str]) -> Question:
        """Ask along random signs of each entry, in float32 of those whose gradient is 0."""
        rng, square = np.random.default_rng(2), 0.0
        direction: dict[str, np.ndarray | Entries] = {}
        slopes = {name: self._norms[name] * self._sizes[name] for name in self._names}
        typical = float(np.median([*slopes.values()])) or 1.0
        least = min((x for x in self._entry.values() if x), default=0.0)
        for name in names:
            g, scale = self._step.gradients[name], self._sizes[name]
            scale *= min(1.0, typical / (slopes[name] or typical))
            signs = scale * rng.choice([-1.0, 1.0], min(_PERIOD, g.size))
            signs = signs.astype(g.dtype)
            if not self._is_double and self._zeros[name] * _FEW <= g.size:
                where = np.flatnonzero(g == 0)
                direction[name] = Entries(where, signs[where % signs.size])
            else:
                direction[name] = _periodic(np.multiply, np.ones(g.shape, bool) if self._is_double else g == 0, signs)
            square += (self._entry[name] or least) ** 2 * _square(direction[name])
        return self._question(direction, self._precision.lost * math.sqrt(square), self._precision)

    def _question(
        self, direction: Direction, least: float, precision: Precision, found: float | None = None
    ) -> Question:
        """Ask whether slopes agree along a direction; `found` is its inner product with the gradients, if known."""
        length = math.sqrt(sum(_square(d) for d in direction.values()))
        least = max(least, 2e-6 * max(self._norms.values()) * length)
        found = _inner(self._step.gradients, direction) if found is None else found
        return Question(direction, found, least, precision, self._sizes)

    def _compared(self, asked: Question) -> Slope:
        """Compare slopes; a difference that rounding of the gradient may explain is none."""
        direction, found = asked.direction, asked.found

        def slope_of(found: float) -> Slope:
            return slope_along(self._loss, self._point, self._start, replace(asked, found=found))

        slope = slope_of(found)
        if slope.verdict != "differs":
            return slope
        doubt = max(abs(_inner(noisy, direction) - found) for noisy in self._step.noisy_gradients)
        is_rounding = not abs(slope.expected - found) > 4 * doubt
        if not is_rounding and self._is_double and (precise := self._step.precise_gradients):
            doubt = abs(_inner(precise, direction) - found)
            is_rounding = slope_of(_inner(precise, direction)).verdict == "agrees"
        return replace(slope, doubt=doubt, verdict="not checked") if is_rounding else slope


def _periodic(operation: np.ufunc, x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return an array combined with numbers that repeat along it."""
    if not x.size:
        return x
    flat, count = x.ravel(), x.size - x.size % numbers.size
    found = np.empty(x.size, np.result_type(x, numbers))
    operation(flat[:count].reshape(-1, numbers.size), numbers, out=found[:count].reshape(-1, numbers.size))
    operation(flat[count:], numbers[: x.size - count], out=found[count:])
    return found.reshape(x.shape)


def _inner(gradients: Arrays, direction: Direction) -> float:
    return sum(dot_along(gradients[name], d) for name, d in direction.items())


def _square(d: np.ndarray | Entries) -> float:
    """Return the squared length of a part of a direction."""
    numbers = d.numbers if isinstance(d, Entries) else d
    return inner_product(numbers, numbers)


def _difference(finding: Finding) -> float:
    """Return by how much a finding's numbers differ."""
    assert finding.found is not None and finding.expected is not None
    return abs(finding.found - finding.expected)


def _write_out_hard_sigmoids(model: ir.Model) -> None:
    """Replace HardSigmoid by its definition: it has no kernel for float64 (tests/faults.py: HardSigmoid-float64)."""
    with Emitter(model) as op:
        for node in list(model.graph):
            if node.op_type == "HardSigmoid" and not node.domain and node.inputs[0] is not None:
                slope, shift = (node.attributes.get_float(name, x) for name, x in (("alpha", 0.2), ("beta", 0.5)))
                swap(node.outputs[0], op.Clip(node.inputs[0] * slope + shift, 0.0, 1.0))
                model.graph.remove(node, safe=True)
    model.graph.sort()


def _fed(model: ir.Model, arrays: Arrays) -> Arrays:
    """Return arrays in the types of a model's inputs, of those that it has."""
    types = {x.name: x.dtype for x in model.graph.inputs if x.dtype is not None}
    return {name: np.asarray(x, types[name].numpy()) for name, x in arrays.items() if name in types}
