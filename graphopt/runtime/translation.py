"""Compare the first step of a graph that was rewritten for speed with the plain step's numbers."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import PRODUCTS
from graphopt.graph.roles import FED, Role, with_role
from graphopt.graph.storage import weight_bytes
from graphopt.graph.values import name_of, next_of, tensor_bytes
from graphopt.runtime.bound_session import BoundSession
from graphopt.runtime.checks.first_check import SOURCES
from graphopt.runtime.checks.rows import some_tokens
from graphopt.runtime.checks.slopes import ROUNDINGS, ROUNDINGS_OF_NOISE, Arrays, allowed_error, norm_of
from graphopt.runtime.checks.verdicts import (
    LARGEST_REPRODUCER,
    ROOM,
    digest_of,
    read_note,
    write_note,
    write_reproducer,
)
from graphopt.runtime.device import Device
from graphopt.runtime.frozen import placement_of
from graphopt.runtime.session import Session
from graphopt.runtime.signature import Signature
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.system_memory import NoRoom, check_room, give_back, taken
from graphopt.runtime.tensors import OrtValues, Tensor, overwrite, to_ort
from graphopt.targets.native.attention import attending_to_many, attends

COMPARED_STEPS = 2  # of a call of several
NOISY_STEPS = 8  # to see how much of a difference is rounding
LARGEST_STATE, LARGEST_WEIGHTS = 2**28, 2**26  # bytes that another process reads; no measurement is on record


@dataclass(frozen=True)
class Sample:
    """Hold the numbers of one step: state and hyperparameters, values that stay where they are, and a batch."""

    state: Arrays
    fixed: Arrays
    batch: Arrays


class Mistranslated(GraphoptError):
    """Report that a form of a step computes other numbers than the plain step."""


class Translation:
    """Compare forms of a step with the plain step, on the state and the batch at hand.

    Reported values, and the change of each state, may differ by a multiple of float rounding, and else by a multiple of
    what noise of some roundings in weights, state and data changes. So a sign or a factor is seen, and a tie that falls
    the other way is not, nor the direction of Adam's first step where a gradient is 0 but for rounding.

    Args:
        plain: the graph of one plain step.
        fixed: values for inputs and outputs that stay where they are.
        report: the names of the outputs that the forms return.
        several: whether the forms run several steps per call, on stacked batches.
    """

    def __init__(
        self,
        device: Device,
        plain: ir.Model,
        buffers: StateBuffers,
        fixed: OrtValues,
        report: Sequence[str],
        *,
        several: bool,
    ) -> None:
        self._device, self._plain, self._buffers = device, plain, buffers
        # The plain step on WebGPU is no reference: some kernels are missing, and some are wrong.
        on_cpu = functools.partial(Device, threads=device.threads, custom_ops=device.custom_ops)
        self._oracle = device if device.machine.is_oracle else on_cpu()
        self._fixed, self._several = fixed, several
        self._signature = Signature(device, with_role(plain, *FED))
        compared = {*report, *fixed, *map(next_of, buffers.updated)}
        self._left_out = {name_of(y) for y in plain.graph.outputs} - compared
        types = [y.dtype for node in plain.graph for y in node.outputs if y.dtype is not None]
        self._rounding = max(ROUNDINGS.get(dtype, 2.0**-52) for dtype in types)
        self._has_floats = ir.DataType.FLOAT in types

    @functools.cached_property
    def _reference(self) -> Session:
        # Few runs do not make up for the runtime's optimization, which would fold the weights that are not given.
        is_low = placement_of(self._oracle, self._plain) == "low"
        return Session(self._oracle, self._plain, optimized=not is_low)

    def agrees(self, form: BoundSession, source: int, feeds: Mapping[str, Tensor]) -> bool:
        """Run a form and the plain step from the state in set `source`, which stays as it is, and compare them.

        Return False, after a warning, if their numbers differ by more than rounding.

        Raises:
            Mistranslated: they do, and the option `verify` is True, or there is no form to take in its place.
        """
        # On CPUs, only the products of kernels may be of lower precision than that of their type.
        on_cpu = self._device.on_cpu
        has_products = self._has_floats and (form.library is not None or not on_cpu)
        self._unit = max(self._rounding, (has_products and self._device.product_unit) or 0.0)
        verify, digest = self._device.verify, self._digest(form)
        note = f"{digest}.verified.json"
        # Of GPUs, the runtime does not tell which one it is.
        remembers = verify is not True and on_cpu
        message = read_note(ROOM, note, "difference", str) if remembers else None
        if message is None:
            try:
                message = self._difference(form, source, feeds, digest)
                give_back()
            except NoRoom as error:
                if verify is True:
                    raise
                warnings.warn(f"{form.name}: {error}: it runs without", stacklevel=2)
                return True
            except GraphoptError:  # the runtime stops on this batch, or refuses the plain graph
                if verify is True:
                    raise
                return True
            if on_cpu:
                write_note(ROOM, note, {"difference": message})
        trusts_plain, is_last = self._device.machine.is_oracle, self._several and form.library is None
        if message and (verify is True or is_last or not trusts_plain):
            raise Mistranslated(message)
        if message:
            warnings.warn(message, stacklevel=2)
        return not message

    def sample(self, source: int, feeds: Mapping[str, Tensor]) -> Sample | None:
        """Return the numbers of a step, on which another process may compare it.

        Return None if they are large, or if forms are to be compared in this process each time.
        """
        state = {**self._buffers.sets[source], **self._buffers.fed}
        is_large = weight_bytes(self._plain) > LARGEST_WEIGHTS
        if self._device.verify is True or is_large or sum(x.numpy().nbytes for x in state.values()) > LARGEST_STATE:
            return None
        return Sample(_arrays(state), _arrays(self._fixed), self._signature.arrays(feeds))

    def _difference(self, form: BoundSession, source: int, feeds: Mapping[str, Tensor], digest: str) -> str:
        """Return the line that tells of a difference, or an empty one."""
        if self._several:
            feeds = {name: x[:COMPARED_STEPS] for name, x in feeds.items()}
        data, state = self._signature.arrays(feeds), _arrays(self._buffers.sets[source])
        is_low = form.session.frozen == "low" and not self._several
        few = some_tokens(form.model, data) if is_low else None
        feeds, data = few or feeds, few or data
        before = taken()
        results = self._run(form, source, feeds, state)
        if form.session.frozen != "low":  # else, the plain step takes the memory that the form has left
            check_room(taken() - before, self._device.memory, "the comparison with the plain step")
        expected = self._stepped(self._reference, state, data)
        if not all(np.isfinite(x).all() for x in expected.values() if x.dtype.kind == "f"):
            return ""
        errors = self._errors(expected, results, state, state)
        if few is not None and form.library is not None and attends(form.model):
            with attending_to_many(form.library):
                others = self._errors(expected, self._run(form, source, feeds, state), state, state)
            errors = {name: max(error, others[name]) for name, error in errors.items()}
        limit = allowed_error(self._unit)
        if max(errors.values(), default=0.0) <= limit:
            return ""
        errors = self._beyond_rounding(errors, limit, expected, state, data)
        return self._reported(form, errors, state | data, digest) if errors else ""

    def _run(self, form: BoundSession, source: int, feeds: Mapping[str, Tensor], state: Arrays) -> Arrays:
        """Return the numbers of a form; put back the state that it replaces in place."""
        reported = {
            name: np.array(x.numpy() if hasattr(x, "numpy") else x) for name, x in form.call(source, feeds).items()
        }
        written = _arrays(self._buffers.sets[1 - source])
        results = {next_of(name): x for name, x in written.items()} | _arrays(self._fixed)
        for name in form.shared:
            overwrite(self._device, self._buffers.sets[source][name], state[name])
        return results | reported

    def _stepped(self, session: Session, state: Arrays, data: Arrays) -> Arrays:
        """Return the numbers of the plain step, or of several on stacked batches."""
        if not self._several:
            return self._once(session, state | data)
        reports: list[Arrays] = []
        for i in range(COMPARED_STEPS):
            outputs = self._once(session, state | {name: np.asarray(x[i]) for name, x in data.items()})
            state = {name: outputs.pop(next_of(name), x) for name, x in state.items()}
            reports.append(outputs)
        stacked = {name: np.array([report[name] for report in reports]) for name in reports[0]}
        return stacked | {next_of(name): x for name, x in state.items()}

    def _once(self, session: Session, arrays: Arrays) -> Arrays:
        """Return the numbers of one plain step."""
        fed: OrtValues = self._buffers.fed
        if self._oracle is not self._device:
            arrays, fed = {**_arrays(fed), **arrays}, {}
        values = {name: to_ort(self._oracle, x, x.dtype) for name, x in arrays.items()}
        return _arrays(session.compute({**values, **fed, **self._fixed}, self._left_out))

    def _beyond_rounding(
        self, errors: dict[str, float], limit: float, expected: Arrays, state: Arrays, data: Arrays
    ) -> dict[str, float]:
        """Return the errors that noise of some roundings in weights and data does not explain, in a few trials."""
        rng, noisy_inputs = np.random.default_rng(0), {x.name for x in with_role(self._plain, Role.DATA)}
        for trial in range(NOISY_STEPS):
            noisy = {name: self._noisy(x, rng) for name, x in state.items()}
            fed = {name: self._noisy(x, rng) if name in noisy_inputs else x for name, x in data.items()}
            weights = {x: self._noisy(tensor.numpy(), rng) for x, tensor in _smallest_weights(self._plain)}
            if self._reference.frozen == "low" and self._unit <= self._rounding:
                given = {name_of(x): weight for x, weight in weights.items()}
                found = self._stepped(self._reference, noisy, {**fed, **given})
            else:
                found = self._stepped(self._rounded(weights, trial), noisy, fed)
            noise = self._errors(expected, found, state, noisy)
            bounds = {name: 10 * (limit + 2 * noise.get(name, 0.0)) for name in errors}
            errors = {name: error for name, error in errors.items() if error > bounds[name]}
            if not errors:
                break
        return errors

    def _rounded(self, weights: Mapping[ir.Value, np.ndarray], trial: int) -> Session:
        """Return the plain step with other weights, and with noise in products of lower precision."""
        model = self._plain.clone()
        for x, weight in weights.items():
            model.graph.initializers[name_of(x)].const_value = ir.tensor(weight, name=x.name)
        if self._unit > self._rounding:
            round_products(model, 2 * self._unit, trial)
        return Session(self._oracle, model)

    def _noisy(self, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if x.dtype.kind != "f":
            return x
        numbers = rng.random(x.shape, np.float32 if x.dtype == np.float32 else np.float64)
        return (x * (1 - ROUNDINGS_OF_NOISE * self._unit * numbers)).astype(x.dtype, copy=False)

    def _errors(self, expected: Arrays, results: Arrays, before: Arrays, other: Arrays) -> dict[str, float]:
        """Return the relative differences of outputs; of new state, those of its change from `before` and `other`."""
        starts = {next_of(name): (x, other[name]) for name, x in before.items()}
        return {
            name: self._error(x, results[name], *starts.get(name, ()))
            for name, x in expected.items()
            if name in results
        }

    def _error(self, x: np.ndarray, y: np.ndarray, *starts: np.ndarray) -> float:
        """Return the relative difference of two arrays, or of their changes if they start from others."""
        if x.dtype.kind not in "fV" or x.shape != y.shape:
            return 0.0 if np.array_equal(x, y) else math.inf
        x, y = x.astype(np.float64), y.astype(np.float64)
        slack = 0.0 if x.ndim else 4 * self._unit  # a loss near 0 is a difference of numbers near 1
        if starts:
            slack = 4 * self._unit * norm_of(x)
            x, y = x - starts[0], y - starts[1]
        if not np.array_equal(np.isfinite(x), np.isfinite(y)):
            return math.inf
        distance = norm_of(y - x) - slack
        return distance / max(norm_of(x), 1e-300) if distance > 0 else 0.0

    def _digest(self, form: BoundSession) -> str:
        """Return a hash of a form and of what its numbers depend on, and of how they are compared.

        Weights that are stored apart from the graph have no part in it.
        """
        library, device = form.library and form.library.name, self._device
        facts = (device.ort.__version__, device.execution_provider, device.threads)
        return digest_of(
            [form.model, self._plain], [*SOURCES, Path(__file__)], (library, list(form.shared), self._several, *facts)
        )

    def _reported(self, form: BoundSession, errors: Mapping[str, float], inputs: Arrays, digest: str) -> str:
        """Write a reproducer, and return the line that tells of a difference."""
        errors = dict(sorted(errors.items(), key=lambda item: -item[1]))
        name, error = next(iter(errors.items()))
        folder = write_reproducer(
            digest,
            {"rewritten": form.model, "plain": self._plain},
            inputs,
            {
                "form": form.name,
                "library": form.library and form.library.name,
                "onnxruntime": self._device.ort.__version__,
                "relative_differences": {name: str(error) for name, error in errors.items()},
            },
        )
        is_last = not self._device.machine.is_oracle and not self._several
        other = "leave out graph_capture" if self._device.graph_capture else "take device='cpu'"
        runs = other if is_last else "the plain step runs"
        return (
            f"{form.name}: expected the numbers of the plain step, found {name!r} off by {100 * error:.2g} %: {runs}; "
            f"please report it with the files in {folder}"
        )


def round_products(model: ir.Model, unit: float, trial: int) -> None:
    """Add noise to the operands of products, as lower precision does.

    Noise in weights and data does not show what rounding of operands does to a gradient that is 0 for all of these, as
    of a bias before a normalization or of the keys' bias, by which Adam divides.
    """
    with Emitter(model) as op:
        for i, node in enumerate(list(model.graph)):
            for index in (0, 1) if node.op_type in PRODUCTS and not node.domain else ():
                x = node.inputs[index]
                if x is not None and x.dtype == ir.DataType.FLOAT:
                    seed = float(NOISY_STEPS * (2 * i + index) + trial)
                    noise = op.RandomUniformLike(x, low=1 - unit, high=1 + unit, seed=seed)
                    node.replace_input_with(index, op.Mul(x, noise))
    model.graph.sort()


def _smallest_weights(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield the smallest weights that do not train, as many as have `LARGEST_REPRODUCER` bytes together."""
    weights = [(x, x.const_value) for x in model.graph.initializers.values() if x.const_value is not None]
    room = LARGEST_REPRODUCER
    for x, tensor in sorted(weights, key=lambda pair: tensor_bytes(pair[1])):
        room -= tensor_bytes(tensor)
        if room >= 0 and tensor.size > 1 and tensor.dtype.is_floating_point():
            yield x, tensor


def _arrays(values: OrtValues) -> Arrays:
    return {name: np.array(x.numpy()) for name, x in values.items()}
