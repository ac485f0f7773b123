"""Runs training graphs on ONNX Runtime."""

from __future__ import annotations

import itertools
import math
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.errors import GraphoptError
from graphopt.graph import inference
from graphopt.graph.loading import Source, load
from graphopt.graph.metadata import UNTRAINED
from graphopt.graph.roles import FED, Role, role_of, with_role
from graphopt.graph.state import ACCUMULATED, LEARNING_RATE, STEP
from graphopt.graph.unroll import Unroll
from graphopt.runtime.checkpoint import Property, save_state
from graphopt.runtime.device import Device, Tensor
from graphopt.runtime.evaluation import ForwardRunner
from graphopt.runtime.program import Pace, Program, Reported
from graphopt.runtime.signature import Signature
from graphopt.runtime.state_buffers import Buffers, joined, parted

if TYPE_CHECKING:
    pass

SHAPE = attrgetter("shape")
_BATCHES = "graphopt.batches"  # a property of checkpoints


def run(model: Source, inputs: Mapping[str, np.ndarray], threads: int = 1) -> dict[str, np.ndarray]:
    """Run any graph once, on the CPU, and return its outputs by name.

    Raises:
        GraphoptError: no ONNX Runtime is installed, or it has no kernel for an operator.
    """
    session = Device("cpu", threads).session(load(model))
    taken = {x.name: inputs[x.name] for x in session.get_inputs()}
    names = [y.name for y in session.get_outputs()]
    return dict(zip(names, session.run(names, taken), strict=True)) if names else {}


class NonFiniteLoss(GraphoptError):
    """A step's loss, or a number of the state that it leads to, is infinite or not a number.

    The state is that before the step.
    """


class Executor:
    """Runs a training graph step by step; its state lives on the device.

    Threads may share an executor: its calls run one after the other, each whole, those of `run` and `iterate` a call of
    the runtime at a time.

    Args:
        step: a training graph: a path, an onnx.ModelProto or an onnx_ir.Model.
        device: `cpu`, `cuda` or `cuda:N`.
        threads: threads an operator may use; the runtime's choice by default.
        deterministic: ask the runtime for kernels that give the same numbers each run.
        on_nonfinite: what a step does whose loss, or a number of the state after it, is not finite: `raise` an error,
            `warn` and go on, or `skip` the step; with `raise` and `skip` the state stays as it was, so that all of
            it is finite if it was so at first.
        steps_per_call: how many steps `run` and `iterate` do in one call of the runtime; None tries calls of several,
            and keeps them if a step takes a tenth less time.
        report: the outputs to return from each step, the loss among them; all but the state by default. An empty list:
            nothing, so that nothing is read from the device and what is not finite goes unnoticed.
        provider, provider_options, cuda_graph, low_memory, flush_denormals, session_options: as for `Device`. A CUDA
            graph needs a step without If, Loop and Scan; every shape of the batch has one of its own.
        as_numpy: return arrays; False: ONNX Runtime's OrtValues, on the device. Scalars are Python numbers with both.
        static_shapes: a session for each shape of the batch, which the runtime then knows beforehand.

    Raises:
        GraphoptError: no ONNX Runtime is installed, the device or the provider is not available, or the graph trains
            nothing.
    """

    _several: Program | None  # of several steps a call, made when it is first needed

    def __init__(
        self,
        step: Source,
        *,
        device: str = "cpu",
        threads: int | None = None,
        deterministic: bool = False,
        on_nonfinite: Literal["raise", "warn", "skip"] = "raise",
        steps_per_call: int | None = None,
        report: Sequence[str] | None = None,
        provider: str | None = None,
        provider_options: Mapping[str, Any] | None = None,
        cuda_graph: bool = False,
        static_shapes: bool = False,
        low_memory: bool = False,
        flush_denormals: bool = True,
        session_options: Mapping[str, Any] | None = None,
        as_numpy: bool = True,
    ) -> None:
        self.steps_per_call = _checked_count(steps_per_call)
        if on_nonfinite not in ("raise", "warn", "skip"):
            raise GraphoptError(f"on_nonfinite: expected 'raise', 'warn' or 'skip', found {on_nonfinite!r}")
        self._on_nonfinite = on_nonfinite
        self._device = Device(
            device,
            threads,
            deterministic,
            provider=provider,
            provider_options=provider_options,
            cuda_graph=cuda_graph,
            low_memory=low_memory,
            flush_denormals=flush_denormals,
            session_options=session_options,
        )
        self._static = static_shapes or cuda_graph
        self._as_numpy = as_numpy
        self._model = load(step)
        self._lock = threading.RLock()
        self._batches = 0
        self.properties: dict[str, Property] = {}  # of the user's own, kept in checkpoints
        self._signature = Signature(self._device, with_role(self._model, *FED))
        self._report = self._checked_report(report)
        self._buffers = Buffers(self._device, self._model)
        self._open()

    def step(self, data: Mapping[str, Tensor] | None = None, /, **named: Tensor) -> Reported:
        """Run one step on tensors named like the graph's inputs and return what it reports.

        Scalars come back as Python numbers, `loss` first. Contiguous arrays, onnxruntime's OrtValues and tensors of any
        package that speaks DLPack are read where they are. A hyperparameter that is fed stays as fed.

        Raises:
            GraphoptError: an array is missing, unknown, or of another type or shape, or a label in the host's memory is
                none of the loss's; nothing has run.
            NonFiniteLoss: the loss or the new state is infinite or not a number, and `on_nonfinite` is `raise`.
        """
        feeds = {**(data or {}), **named} if named else data or {}
        with self._lock:
            if not self._program.fits(feeds):
                fed, feeds = self._split(feeds)
                self._program.check(feeds)
                self.set_hyperparameters(**fed)
            self._signature.check_labels(feeds)
            reported = self._program.run(self._buffers.current, feeds)
            if self._accept(reported):
                self._buffers.swap()
                self._batches += 1
            return reported

    def run(
        self, batches: Iterable[Mapping[str, Tensor]], *, steps_per_call: int | None = None
    ) -> list[Reported]:
        """Train on all batches and return what each step reports; see `iterate`."""
        return list(self.iterate(batches, steps_per_call=steps_per_call))

    def iterate(
        self, batches: Iterable[Mapping[str, Tensor]], *, steps_per_call: int | None = None
    ) -> Iterator[Reported]:
        """Return an iterator that trains on each batch and yields what its step reports.

        The first batch is checked at once; steps run as the iterator is read. Several steps run in one call of the
        runtime: it takes the batches stacked, and a graph in which a Scan goes through them. The numbers are those of
        single steps. Batches of another shape, the last of an epoch, have calls of their own.

        Args:
            steps_per_call: how many steps a call does; by default as many as the executor was told.

        Raises:
            GraphoptError: an array does not fit; no step of its call has run.
            NonFiniteLoss: a loss or the new state is infinite or not a number. The state is that before the step: the
                steps of its call are done again, one by one.
        """
        chosen = self.steps_per_call if steps_per_call is None else _checked_count(steps_per_call)
        if chosen is None and not self._device.on_cpu:
            chosen = 1
        left = iter(batches)
        for first in left:
            with self._lock:
                fed, tensors = self._split(first)
                self._signature.check(tensors)
                self._buffers.check_hyperparameters(fed)
                self._signature.check_labels(tensors)
            return self._steps(itertools.chain([first], left), chosen)
        return iter(())

    def _steps(self, left: Iterator[Mapping[str, Tensor]], chosen: int | None) -> Iterator[Reported]:
        """Yield what a step on each batch reports, of several steps a call, or as many as is faster."""
        while not (chosen == 1 or (chosen is None and self._pace.alone)):
            waiting = list(itertools.islice(left, chosen or self._pace.steps))
            if not waiting:
                return
            for alike in _alike(waiting):
                yield from self._call(alike)
        with self._lock:
            self._several = None  # a session's memory
        yield from map(self.step, left)

    def _call(self, batches: Sequence[Mapping[str, Tensor]]) -> Iterable[Reported]:
        """Run a step on each of some batches of one shape, in one call where they can be stacked."""
        first = batches[0]
        stackable = (
            (self._as_numpy or not self._arrays_reported)
            and all(isinstance(x, np.ndarray) for x in first.values())
            and first.keys() <= self._program.inputs.keys()
        )
        if len(batches) < 2 or not stackable:  # hyperparameters, and what lies on a device, are not stacked
            return map(self._alone, batches)
        with self._lock, self._pace.timed(len(batches)):
            reported = self._at_once(batches)
        if reported is None:
            return map(self.step, batches)
        if not reported:
            return [{} for _ in batches]
        columns = (array.tolist() if array.ndim == 1 else array for array in reported.values())
        return [dict(zip(reported, row, strict=True)) for row in zip(*columns, strict=True)]

    def _alone(self, batch: Mapping[str, Tensor]) -> Reported:
        with self._lock, self._pace.timed():
            return self.step(batch)

    def _at_once(self, batches: Sequence[Mapping[str, Tensor]]) -> Reported | None:
        """Run a step on each of some batches of one shape, stacked, and return what they report, stacked.

        None where something is not finite: the state is that before the first of them.
        """
        if self._several is None:
            model = self._reporting.clone()
            Unroll()(model)
            self._several = self._compiled(model)
        stacked = {name: np.array([*map(itemgetter(name), batches)]) for name in batches[0]}
        self._several.check(stacked)
        self._signature.check_labels(stacked)
        reported = self._several.run(self._buffers.current, stacked)
        if self._wrong(reported) is not None:
            return None
        self._buffers.swap()
        self._batches += len(batches)
        return reported

    def placement(self) -> dict[str, dict[str, int]]:
        """Return for each execution provider the operators of a step that it runs, and how many nodes of each.

        Raises:
            GraphoptError: the runtime does not tell; onnxruntime 1.24 and later do.
        """
        return self._program.placement()

    def on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch on the device: on the CPU as it is, on a GPU copied; for `step`, ahead of time."""
        return {name: self._device.placed(tensor) for name, tensor in batch.items()}

    def evaluate(self, data: Mapping[str, Tensor] | None = None, /, **named: Tensor) -> Reported:
        """Return the losses and the model's outputs on some data; the state stays as it is.

        Raises:
            GraphoptError: as `step` does.
        """
        return self._forward(self._of(Role.LOSS, Role.METRIC, Role.PREDICTION), {**(data or {}), **named})

    def predict(self, data: Mapping[str, Tensor] | None = None, /, **named: Tensor) -> Reported:
        """Return the model's outputs; no target is needed, and one that is given is checked.

        Raises:
            GraphoptError: as `step` does, or the model has no output beside its own loss.
        """
        outputs = self._of(Role.PREDICTION)
        if not outputs:
            raise GraphoptError(
                "predict: expected an output beside the model's own loss, found none: use evaluate"
            )
        return self._forward(outputs, {**(data or {}), **named})

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Copies of all state: parameters, optimizer slots and counters, by name."""
        with self._lock:
            return self._buffers.arrays()

    @state.setter
    def state(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.update_state(arrays)

    def update_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace some of the state by name; nothing is written if one of the arrays does not fit.

        Raises:
            GraphoptError: a name is unknown, or an array is of another type or shape.
        """
        with self._lock:
            self._buffers.update(arrays)
            if STEP in arrays:
                self._batches = int(arrays[STEP])

    @property
    def steps(self) -> int:
        """How many updates of the parameters led to the state: its counter `step`, which schedules read.

        A batch whose gradients are only added up (`passes.Accumulate`) or that is skipped (`passes.DynamicLossScale`,
        `on_nonfinite="skip"`) is no update; `batches` counts it. A graph without that counter updates in each batch.
        """
        with self._lock:
            return self._buffers.counter(STEP, self._batches)

    @property
    def batches(self) -> int:
        """How many batches led to the state, those without an update of the parameters too; checkpoints hold it.

        A step that `on_nonfinite` refuses or skips leaves no trace in the state and is not counted. `update_state`
        with a counter `step` sets it to that number.
        """
        return self._batches

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Copies of the parameters, by name, in alphabetical order."""
        with self._lock:
            return self._buffers.arrays(sorted(self._of(Role.PARAMETER)))

    def contiguous(self, *, frozen: bool = False) -> np.ndarray:
        """Return the parameters end to end in one vector, in alphabetical order.

        Args:
            frozen: with the weights of the model that do not train.

        Raises:
            GraphoptError: they are not of one type.
        """
        return joined(self._weights(frozen))

    def set_contiguous(self, vector: np.ndarray, *, frozen: bool = False) -> None:
        """Replace the parameters by parts of a vector as `contiguous` returns it.

        Raises:
            GraphoptError: the vector is of another type or size; nothing is written.
        """
        new = parted(vector, self._weights(frozen))
        trained = set(self._of(Role.PARAMETER))
        fixed = {name: array for name, array in new.items() if name not in trained}
        with self._lock:
            self.update_state({name: array for name, array in new.items() if name in trained})
            for name, array in fixed.items():
                value = self._model.graph.initializers[name]
                value.const_value = ir.tensor(np.array(array), name=name)
            if fixed:  # they are constants of the sessions
                self._open()

    def reset_gradients(self) -> None:
        """Forget the gradients that `passes.Accumulate` has added up since the last update."""
        names = [name for name in self._of(Role.SLOT) if name.split(".")[-1] == ACCUMULATED]
        if not names:
            raise GraphoptError("reset_gradients: the training graph accumulates none: add passes.Accumulate")
        with self._lock:
            arrays = self._buffers.arrays(names)
            self.update_state({name: np.zeros_like(array) for name, array in arrays.items()})

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """What hyperparameters are fed, by name."""
        return self._buffers.hyperparameters

    @property
    def learning_rate(self) -> float:
        """The rate of the next step, by the schedule where there is one; without one it can be set."""
        if LEARNING_RATE in self.hyperparameters:
            return float(self.hyperparameters[LEARNING_RATE])
        if LEARNING_RATE in self.outputs:
            return float(self._forward([LEARNING_RATE], {})[LEARNING_RATE])
        raise GraphoptError("learning_rate: the training graph has none")

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if LEARNING_RATE not in self.hyperparameters:
            raise GraphoptError(
                "learning_rate: a schedule in the graph computes it; compile with schedule=None to set it, or feed "
                f"base_{LEARNING_RATE}"
            )
        self.set_hyperparameters(learning_rate=rate)

    def set_hyperparameters(self, **values: Any) -> None:
        """Feed hyperparameters for the steps to come.

        Raises:
            GraphoptError: there is no hyperparameter of that name, or the value does not fit, is not finite, or is a
                negative rate.
        """
        with self._lock:
            self._buffers.feed(values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all state and `properties` to a checkpoint, from which `load` goes on bit for bit."""
        with self._lock:
            arrays, properties = self._buffers.arrays(), {**self.properties, _BATCHES: self._batches}
        save_state(arrays, path, properties)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace all state and `properties` by those of a checkpoint.

        Raises:
            GraphoptError: the file is no checkpoint, is damaged, or is one of another training graph; nothing is
                replaced.
        """
        arrays, properties = self._buffers.load(path)
        with self._lock:
            self.update_state(arrays)
            self._batches = int(properties.pop(_BATCHES, self.steps))
            self.properties = properties

    @property
    def device(self) -> str:
        """Where the state lies: `cpu`, `cuda` or `cuda:N`."""
        return self._device.name

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """The inputs to feed each step, by name: data, targets and sample weights."""
        return {str(value.name): value for value in with_role(self._model, *FED)}

    @property
    def outputs(self) -> list[str]:
        """The names of everything a step can report, `loss` first."""
        return [str(v.name) for v in self._model.graph.outputs if role_of(v) not in (Role.NEXT, Role.SOURCE)]

    @property
    def reported(self) -> list[str]:
        """The names of what a step reports, `loss` first; none of an empty `report`."""
        return list(self._report)

    @property
    def model(self) -> ir.Model:
        """The training graph, without its initial state."""
        return self._model

    def trained(self, outputs: Sequence[str] | None = None) -> onnx.ModelProto:
        """Return the inference model with the trained weights, under the names of the model that was compiled.

        Args:
            outputs: the values to compute, outputs of the model or values inside; its own outputs by default.

        Raises:
            GraphoptError: the inference model has no value of such a name.
        """
        return inference.trained(self._model, self.state, outputs)

    def _checked_report(self, report: Sequence[str] | None) -> list[str]:
        """Return the names of the outputs to report."""
        if not with_role(self._model, Role.NEXT):
            raise GraphoptError(
                "expected a training graph, found one without state to update: add an optimizer"
            )
        if isinstance(report, str) or not isinstance(report, Iterable | None):
            raise GraphoptError(f"report: expected names of outputs, found {report!r}")
        unknown = [name for name in report or () if name not in self.outputs]
        if unknown:
            raise GraphoptError(f"report: unknown outputs {unknown}; the graph has {', '.join(self.outputs)}")
        return [
            name for name in self.outputs if report is None or name in report or (report and name == "loss")
        ]

    def _open(self) -> None:
        """Make the session of a step, and forget those of several steps and of parts of one."""
        self._reporting = self._pruned()
        self._arrays_reported = any(
            y.name in self._report and y.shape != () for y in self._model.graph.outputs
        )
        self._program = self._compiled(self._reporting)
        self._several = None
        self._pace = Pace()
        self._forwards = ForwardRunner(
            self._device, self._model, self._buffers, self._signature, as_numpy=self._as_numpy
        )

    def _pruned(self) -> ir.Model:
        """Return the training graph without what computes outputs that are not reported."""
        if self._report == self.outputs:
            return self._model
        model = self._model.clone()
        model.graph.outputs[:] = [
            y for y in model.graph.outputs if role_of(y) is Role.NEXT or y.name in self._report
        ]
        RemoveUnusedNodesPass()(model)
        return model

    def _compiled(self, model: ir.Model) -> Program:
        return Program(
            self._device,
            model,
            self._buffers,
            self._report,
            static_shapes=self._static,
            as_numpy=self._as_numpy,
        )

    def _of(self, *roles: Role) -> list[str]:
        """Return the names of the inputs and outputs of some roles."""
        return [str(value.name) for value in with_role(self._model, *roles)]

    def _weights(self, frozen: bool) -> dict[str, np.ndarray]:
        """Return the parameters, and the weights that do not train, in alphabetical order."""
        values = self._model.graph.initializers.values() if frozen else ()
        fixed = {
            str(value.name): value.const_value.numpy()
            for value in values
            if UNTRAINED.is_set(value) and value.const_value is not None
        }
        return dict(sorted({**self.parameters, **fixed}.items()))

    def _accept(self, reported: Reported) -> bool:
        """Tell whether the state after a step is to be kept; raise an error or warn where it is not finite."""
        wrong = self._wrong(reported)
        if wrong is None:
            return True
        message = f"step {self._batches}: {wrong}"
        if self._on_nonfinite == "raise":
            raise NonFiniteLoss(
                f"{message}; lower the learning rate, clip gradients, or look for NaN in the data"
            )
        warnings.warn(message + (", step skipped" if self._on_nonfinite == "skip" else ""), stacklevel=3)
        return self._on_nonfinite == "warn"

    def _wrong(self, reported: Reported) -> str | None:
        """Return what is not finite after a step: its loss, or a number of the state."""
        if "loss" not in reported:
            return None
        loss = reported["loss"]
        if not (math.isfinite(loss) if isinstance(loss, float) else np.isfinite(loss).all()):
            return f"expected a finite loss, found {loss}"
        name = self._buffers.spoiled()
        if name is None:
            return None
        return f"expected finite numbers in state {name!r}, found others, though the loss is finite"

    def _split(self, feeds: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return hyperparameters and tensors that are fed together."""
        fed = {name: value for name, value in feeds.items() if name in self.hyperparameters}
        return fed, {name: tensor for name, tensor in feeds.items() if name not in fed}

    def _forward(self, names: Sequence[str], feeds: Mapping[str, Any]) -> Reported:
        """Compute outputs of the graph in its inference form."""
        with self._lock:
            fed, tensors = self._split(feeds)
            self._forwards.check(names, tensors)
            self.set_hyperparameters(**fed)
            return self._forwards.compute(names, tensors)


def _checked_count(steps_per_call: int | None) -> int | None:
    if steps_per_call is not None and steps_per_call < 1:
        raise GraphoptError(f"steps_per_call: expected 1 or more, or None, found {steps_per_call}")
    return steps_per_call


def _alike(batches: list[Mapping[str, Tensor]]) -> Iterator[list[Mapping[str, Tensor]]]:
    """Yield batches in a row whose tensors have the same names and shapes."""
    try:
        sizes = [{*map(SHAPE, map(itemgetter(name), batches))} for name in batches[0]]
        sizes.append({*map(len, batches)})
    except (AttributeError, KeyError):  # of what is no array, or has no such tensor
        sizes = []
    if sizes and all(len(found) == 1 for found in sizes):
        yield batches
        return
    for _, alike in itertools.groupby(batches, _shapes):
        yield list(alike)


def _shapes(batch: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
    return [(name, getattr(tensor, "shape", None)) for name, tensor in batch.items()]
