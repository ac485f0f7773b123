"""Compare the first step of a graph that was rewritten for speed with the plain step's numbers."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.files import write, write_folder
from graphopt.graph.names import next_of
from graphopt.graph.roles import Role, with_role
from graphopt.graph.storage import skeleton, whole
from graphopt.graph.values import tensor_bytes
from graphopt.runtime.bound_session import BoundSession
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor, bind, buffer
from graphopt.targets.native.cache import cache_folder

if TYPE_CHECKING:
    import onnxruntime

Arrays = dict[str, np.ndarray]

STEPS = 2  # of a call of several
TRIALS = 8  # steps on noisy numbers, to see how much of a difference is rounding
NOISE = 16  # roundings
LARGEST = 2**26  # bytes of inputs and constants that a reproducer has
UNITS = {ir.DataType.FLOAT16: 2.0**-10, ir.DataType.BFLOAT16: 2.0**-7, ir.DataType.FLOAT: 2.0**-23}


class Mistranslated(GraphoptError):
    """Report that a form of a step computes other numbers than the plain step."""


@dataclass(frozen=True)
class Form:
    """Hold an open session of a step, and the graph that it runs.

    Args:
        name: what it is called in messages.
        library: the library of the kernels that the graph calls.
        shared: the names of the state that it writes in place.
    """

    name: str
    bound: BoundSession
    model: ir.Model
    library: Path | None = None
    shared: Sequence[str] = ()


class Translation:
    """Compare forms of a step with the plain step, on the state and the batch at hand.

    Reported values, and the change of each state, may differ by a multiple of float rounding, and else by a multiple of
    what noise of some roundings in weights, state and data changes. So a sign or a factor is seen, and a tie that falls
    the other way is not, nor the direction of Adam's first step where a gradient is 0 but for rounding.

    Args:
        plain: the graph of one plain step.
        fixed: values for inputs and outputs that stay where they are.
        several: whether the forms run several steps per call, on stacked batches.
    """

    def __init__(
        self,
        device: Device,
        plain: ir.Model,
        buffers: StateBuffers,
        fixed: Mapping[str, onnxruntime.OrtValue] | None = None,
        *,
        several: bool = False,
    ) -> None:
        self._device, self._plain, self._buffers, self._several = device, plain, buffers, several
        self._fixed = dict(fixed or {})
        self._reference: Session | None = None
        self._unit = max(UNITS.get(x.dtype, 2.0**-52) for x in _values(plain) if x.dtype is not None)

    def check(self, form: Form, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Run a form and the plain step from the state in set `source`, which stays as it is.

        Raises:
            Mistranslated: their numbers differ by more than rounding.
        """
        verify = self._device.verify
        if not verify:
            return
        digest = self._digest(form)
        told = None if verify is True else _recalled(digest)
        if told is None:
            try:
                found, inputs = self._differences(form, source, feeds)
            except (
                GraphoptError
            ):  # the runtime stops on this batch, or refuses the plain graph: nothing to compare with
                if verify is True:
                    raise
                return
            told = self._told(form, found, inputs, digest) if found else ""
            _remember(digest, told)
        if told:
            raise Mistranslated(told)

    def _differences(
        self, form: Form, source: int, feeds: Mapping[str, Tensor]
    ) -> tuple[dict[str, float], Arrays]:
        """Return the outputs whose numbers differ, with the relative differences, and the step's inputs."""
        if self._several:
            feeds = {name: x[:STEPS] for name, x in feeds.items()}
        state = _arrays(self._buffers.sets[source])
        if self._reference is None:
            self._reference = Session(self._device, self._plain)
        expected = self._stepped(self._reference, state, feeds)
        if not all(np.isfinite(x).all() for x in expected.values() if x.dtype.kind == "f"):
            return {}, {}
        found = self._run(form, source, feeds, state)
        limit = (30 if self._unit > 1e-6 else 1000) * self._unit
        errors = self._errors(expected, found, state, state)
        if max(errors.values(), default=0.0) > limit:
            errors = self._beyond_rounding(errors, limit, expected, state, feeds)
            host = {name: x for name, x in feeds.items() if isinstance(x, np.ndarray)}
            return dict(sorted(errors.items(), key=lambda item: -item[1])), {**state, **host}
        return {}, {}

    def _run(self, form: Form, source: int, feeds: Mapping[str, Tensor], state: Arrays) -> Arrays:
        """Return the numbers of a form; put back the state that it replaces in place."""
        reported = {name: np.array(_on_host(x)) for name, x in form.bound.call(source, feeds).items()}
        written = _arrays(self._buffers.sets[1 - source])
        found = {next_of(name): x for name, x in written.items()} | _arrays(self._fixed)
        for name in form.shared:
            self._buffers.sets[source][name].update_inplace(state[name])
        return found | reported

    def _stepped(self, session: Session, state: Arrays, feeds: Mapping[str, Tensor]) -> Arrays:
        """Return the numbers of the plain step, or of several on stacked batches."""
        if not self._several:
            return self._once(session, state, feeds)
        reports: list[Arrays] = []
        first = next(iter(feeds.values()))
        for i in range(len(first)):
            outputs = self._once(session, state, {name: np.asarray(x[i]) for name, x in feeds.items()})
            state = {name: outputs.pop(next_of(name), x) for name, x in state.items()}
            reports.append(outputs)
        stacked = {name: np.array([report[name] for report in reports]) for name in reports[0]}
        return stacked | {next_of(name): x for name, x in state.items()}

    def _once(self, session: Session, state: Arrays, feeds: Mapping[str, Tensor]) -> Arrays:
        alive = []
        binding = session.ort.io_binding()
        values = (
            {name: buffer(self._device, x) for name, x in state.items()} | self._buffers.fed | self._fixed
        )
        types = {x.name: x.dtype.numpy() for x in self._plain.graph.inputs if x.dtype is not None}
        for x in session.ort.get_inputs():
            if x.name in values:
                binding.bind_ortvalue_input(x.name, values[x.name])
            else:
                fed, dtype = feeds[x.name], np.dtype(types[x.name])
                if isinstance(fed, np.ndarray):
                    fed = fed.astype(dtype, copy=False)
                alive.append(bind(self._device, binding, x.name, fed, dtype))
        names = [y.name for y in session.ort.get_outputs()]
        for name in names:
            binding.bind_output(name, "cpu")
        session.execute(binding)
        return {name: np.array(y.numpy()) for name, y in zip(names, binding.get_outputs(), strict=True)}

    def _beyond_rounding(
        self,
        errors: dict[str, float],
        limit: float,
        expected: Arrays,
        state: Arrays,
        feeds: Mapping[str, Tensor],
    ) -> dict[str, float]:
        """Return the errors that noise of some roundings in weights and data does not explain, in a few trials."""
        rng, data = np.random.default_rng(0), {x.name for x in with_role(self._plain, Role.DATA)}
        for _ in range(TRIALS):
            noisy = {name: self._noisy(x, rng) for name, x in state.items()}
            fed = {name: self._noisy(x, rng) if name in data else x for name, x in feeds.items()}
            session = Session(self._device, self._with_noisy_weights(rng))
            noise = self._errors(expected, self._stepped(session, noisy, fed), state, noisy)
            errors = {
                name: error
                for name, error in errors.items()
                if error > 10 * (limit + 2 * noise.get(name, 0.0))
            }
            if not errors:
                break
        return errors

    def _with_noisy_weights(self, rng: np.random.Generator) -> ir.Model:
        """Return a copy of the plain graph, with noise in its weights that do not train."""
        model = self._plain.clone()
        for name, x in model.graph.initializers.items():
            if x.const_value is not None and x.const_value.size > 1:
                x.const_value = ir.tensor(self._noisy(x.const_value.numpy(), rng), name=name)
        return model

    def _noisy(self, x: Any, rng: np.random.Generator) -> Any:
        if not isinstance(x, np.ndarray) or x.dtype.kind != "f":
            return x
        return (x * (1 - NOISE * self._unit * rng.random(x.shape))).astype(x.dtype)

    def _errors(self, expected: Arrays, found: Arrays, before: Arrays, other: Arrays) -> dict[str, float]:
        """Return the relative differences of outputs: of new state, those of its change.

        Args:
            before: the state from which what is expected was computed.
            other: the state from which the others were computed.
        """
        starts = {next_of(name): (x, other[name]) for name, x in before.items()}
        errors = {}
        for name, x in expected.items():
            if name not in found:
                continue
            y = found[name]
            if x.dtype.kind not in "fV" or x.shape != y.shape:
                errors[name] = 0.0 if np.array_equal(x, y) else math.inf
                continue
            x, y = x.astype(np.float64), y.astype(np.float64)
            slack = 0.0
            if name in starts:
                slack = 4 * self._unit * float(np.linalg.norm(x))
                x, y = x - starts[name][0], y - starts[name][1]
            errors[name] = _relative(x, y, slack)
        return errors

    def _digest(self, form: Form) -> str:
        """Return a hash of a form, of what its numbers depend on, and of how they are compared."""
        parts = [skeleton(form.model)[0], skeleton(self._plain)[0], Path(__file__).read_bytes()]
        text = repr(
            (
                form.library and form.library.name,
                list(form.shared),
                self._several,
                self._device.ort.__version__,
                self._device.execution_provider,
                self._device.threads,
            )
        )
        return hashlib.sha256(b"\0".join([*parts, text.encode()])).hexdigest()[:32]

    def _told(self, form: Form, errors: Mapping[str, float], inputs: Arrays, digest: str) -> str:
        """Write a reproducer, and return the line that tells of a difference."""
        name, error = next(iter(errors.items()))
        folder = cache_folder("steps") / f"difference-{digest[:16]}"
        constants = sum(tensor_bytes(x.const_value) for x in self._plain.graph.initializers.values())
        is_small = constants + sum(x.nbytes for x in inputs.values()) <= LARGEST
        written = whole if is_small else lambda model: skeleton(model)[0]
        files: dict[str, bytes] = {"rewritten.onnx": written(form.model), "plain.onnx": written(self._plain)}
        if is_small:
            archive = io.BytesIO()
            np.savez(archive, **inputs)  # type: ignore[arg-type]
            files["inputs.npz"] = archive.getvalue()
        files["difference.json"] = json.dumps(
            {
                "form": form.name,
                "library": form.library and form.library.name,
                "onnxruntime": self._device.ort.__version__,
                "relative_differences": {name: str(error) for name, error in errors.items()},
            },
            indent=1,
        ).encode()
        with contextlib.suppress(GraphoptError, OSError):
            folder.mkdir(exist_ok=True)
            write_folder(folder, files)
        return (
            f"{form.name}: expected the numbers of the plain step, found {name!r} off by {100 * error:.2g} %: the "
            f"plain step runs; please report it with the files in {folder}"
        )


def check_delivery(
    device: Device, bound: BoundSession, buffers: StateBuffers, source: int, feeds: Mapping[str, Tensor]
) -> None:
    """Check on one step that a provider writes the new state where the executor reads it.

    Raises:
        GraphoptError: it does not.
    """
    names = buffers.mark(1 - source)
    bound.call(source, feeds)
    kept = buffers.marked(1 - source, names)
    if kept:
        raise GraphoptError(
            f"{device.execution_provider}: expected the new state in the memory that it was given, found {kept[0]!r} "
            f"as before: take another provider"
        )


def _relative(x: np.ndarray, y: np.ndarray, slack: float) -> float:
    """Return the norm of y - x, less a slack, by the norm of x; infinite if only one of two numbers is finite."""
    if not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return math.inf
    distance = float(np.linalg.norm(y - x)) - slack
    return distance / max(float(np.linalg.norm(x)), 1e-300) if distance > 0 else 0.0


def _arrays(values: Mapping[str, onnxruntime.OrtValue]) -> Arrays:
    return {name: np.array(x.numpy()) for name, x in values.items()}


def _values(model: ir.Model) -> list[ir.Value]:
    return [y for node in model.graph for y in node.outputs]


def _on_host(x: Any) -> Any:
    return x.numpy() if hasattr(x, "numpy") else x


def _recalled(digest: str) -> str | None:
    """Return what was found about a form on this machine: "" if its numbers agree; None if it is new."""
    try:
        told = json.loads((cache_folder("steps") / f"{digest}.verified.json").read_text())["difference"]
    except (GraphoptError, OSError, ValueError, KeyError, TypeError):
        return None
    return told if isinstance(told, str) else None


def _remember(digest: str, told: str) -> None:
    with contextlib.suppress(GraphoptError, OSError):  # a cache that cannot be written to forgets
        write(cache_folder("steps") / f"{digest}.verified.json", json.dumps({"difference": told}))
