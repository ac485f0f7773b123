"""Run training graphs on ONNX Runtime."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.arguments import Checked, checked, keywords_of
from graphopt.errors import GraphoptError, kind_of, nearest, unknown
from graphopt.graph.loading import Source, load
from graphopt.graph.not_a_model import check_path
from graphopt.graph.roles import STATE, Role, with_role
from graphopt.graph.state import LEARNING_RATE
from graphopt.graph.storage import path_of_file
from graphopt.graph.values import name_of
from graphopt.pipeline import garbage_waits
from graphopt.runtime import placement
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.checkpoint import Property
from graphopt.runtime.device import Device
from graphopt.runtime.evaluation import WITH_WEIGHTS, Evaluations, reductions_of, weights_of_means
from graphopt.runtime.executor_options import ExecutorOptions
from graphopt.runtime.executor_state import ExecutorState, joined
from graphopt.runtime.frozen import FrozenPlacement, placement_of
from graphopt.runtime.runners import Batch
from graphopt.runtime.session import Session
from graphopt.runtime.signature import InputSpec, reportable
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.steps import Parts, Steps
from graphopt.runtime.tensors import Tensor, to_ort

_SETTABLE = ("learning_rate", "properties", "state")
# What changes the attributes that cannot be set
_MEANS_OF_CHANGE = {
    "parameters": "call executor.update_state({name: array})",
    "hyperparameters": "call executor.set_hyperparameters(name=value)",
    "batches": "call executor.set_batches(count)",
    "reported": "create another executor, with report=[name]",
}
# Of an executor and data
_FUNCTIONS = {name: name for name in ("evaluate", "fit", "predict")} | {"train": "fit"}


@checked()
def run(model: Source, inputs: Mapping[str, np.ndarray], threads: int = 1) -> dict[str, np.ndarray]:
    """Run any graph once, on the CPU, and return its outputs by name.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model.
        inputs: an array for each input, by name; state has an initial value, and may be left out.
        threads: the number of threads per operator.

    Raises:
        GraphoptError: no ONNX Runtime is installed, or has no kernel for an operator; an input is missing or unknown.

    >>> import numpy
    >>> from graphopt import models
    >>> outputs = graphopt.run(models.linear((2,), 1), {"x": numpy.zeros((3, 2), numpy.float32)})
    >>> outputs["y"].shape
    (3, 1)
    """
    if not isinstance(inputs, Mapping):
        raise GraphoptError(f"run: expected arrays by name, such as {{'x': ...}}, found {kind_of(inputs)}")
    device = Device("cpu", threads=threads, flush_denormals=False)
    loaded = load(model)
    known = [name_of(value) for value in loaded.graph.inputs]
    if others := [name for name in inputs if name not in known]:
        raise GraphoptError(f"run: {unknown('input', str(others[0]), known)}")
    for name in loaded.graph.initializers.keys() & inputs.keys():  # initial values, in whose place these are fed
        loaded.graph.initializers.pop(name).const_value = None
    for value in loaded.graph.inputs:
        array = inputs.get(name_of(value))
        if isinstance(array, np.ndarray) and array.dtype.kind in "iufb" and value.dtype is not None:
            InputSpec(value).check_type(array.dtype, array.shape)
    return Session(device, loaded).compute_arrays(inputs)


def _check_initial(model: ir.Model) -> None:
    """Raise an error if state has no initial value, as in the graph that an executor holds."""
    for x in with_role(model, *STATE):
        if x.const_value is None:
            raise GraphoptError(
                f"step: expected a training graph with its state, found {name_of(x)!r} without a value: pass the graph "
                "that an executor was opened with, not executor.model"
            )


class Executor(Checked):
    """Run a training graph step by step. The state stays on the device.

    Threads may share an executor. Its calls do not overlap: other threads wait until a call ends. `run` and `iterate`
    let other threads in after each call of the runtime.

    The options are the fields of `ExecutorOptions` and `DeviceOptions`, which explain each of them. They do not change
    later.

    Args:
        step: a training graph: a path, an onnx.ModelProto or an onnx_ir.Model.

    Attributes:
        options: the options.
        workers: the workers that train together; in most executors, only this process.

    Raises:
        GraphoptError: no ONNX Runtime is installed, the device or the provider is not available, or the graph trains
            nothing.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> executor = graphopt.Executor(step)
    >>> zero, one = numpy.zeros((4, 1), numpy.float32), numpy.ones((4, 1), numpy.float32)
    >>> [round(executor.step(x=zero, target=one)["loss"], 4) for _ in range(3)]
    [1.0, 0.64, 0.4096]
    """

    Options: ClassVar[type[ExecutorOptions]] = ExecutorOptions  # explains the options to the command
    options: ExecutorOptions

    @keywords_of(ExecutorOptions)
    def __init__(self, step: Source, **options: Any) -> None:
        chosen = ExecutorOptions(**options)
        with garbage_waits():
            device, model = chosen.opened(), load(step)
            _check_initial(model)
            self._assemble(Parts(chosen, device, model, StateBuffers(device, model)))

    def _assemble(self, parts: Parts) -> None:
        """Put the parts of an executor together."""
        self._parts, self._inputs, self._device, self._model = parts, parts.inputs, parts.device, parts.model
        self.options, self.workers = parts.options, parts.workers
        self._state, self._steps, self._evaluations = ExecutorState(parts), Steps(parts), Evaluations(parts)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.Options.__dataclass_fields__:
            raise GraphoptError(
                f"{name}: expected no new value, as the options of an executor do not change, found {value!r}: create "
                f"another executor"
            )
        kind = getattr(type(self), name, None)
        means = _MEANS_OF_CHANGE.get(name, "it can only be read")
        if isinstance(kind, property) and kind.fset is None:
            raise GraphoptError(f"{name}: expected no new value, found one: {means}")
        is_own = name[:1] == "_" or name in _SETTABLE or hasattr(type(self), name)
        if not is_own and nearest(name, _SETTABLE):
            raise GraphoptError(f"executor: {unknown('attribute', name, _SETTABLE)}")
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # for type checkers, an unknown attribute stays one

        def __getattr__(self, name: str) -> NoReturn:
            meant = _FUNCTIONS.get(name)
            called = f": call graphopt.{meant}(executor, data)" if meant else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{called}")

    def __repr__(self) -> str:
        weights = [x for x in with_role(self._model, Role.PARAMETER) if x.shape is not None]
        sizes = sum(int(np.prod(x.shape.numpy())) for x in weights if x.shape is not None)
        shared = "" if self.frozen == "packed" else f", frozen weights {self.frozen}"
        return (
            f"{type(self).__name__}({self._model.graph.name!r}, device={self.device!r}, "
            f"provider={self._device.execution_provider!r}, target={str(self._device.target)!r}: "
            f"{self.batches:,} batches so far, {sizes:,} parameters in {len(weights)} tensors{shared})"
        )

    def __reduce__(self) -> NoReturn:
        raise GraphoptError(
            f"{type(self).__name__}: expected a training graph to pickle, found its session, which another process "
            "cannot use: save a checkpoint with save(PATH), and load it there"
        )

    def step(self, data: Mapping[str, Tensor] | None = None, /, *unnamed: object, **named: Tensor) -> Reported:
        """Run one step on tensors named like the graph's inputs and return what it reports.

        Scalars come back as Python numbers, `loss` first. Contiguous arrays, onnxruntime's OrtValues and tensors of
        any package that supports DLPack are read in place. A hyperparameter that you feed keeps its new value in
        later steps.

        Raises:
            GraphoptError: an array is missing, is unknown or has the wrong type or shape, or the loss does not accept
                a label in host memory. Nothing has run.
            NonFiniteLoss: the loss or the new state is infinite or NaN, and `on_nonfinite` is `raise`.
        """
        return self._steps.step(self._inputs.of_call(data, unnamed, named))

    def run(self, batches: Iterable[Batch]) -> list[Reported]:
        """Train on all batches and return what each step reports; see `iterate`."""
        return list(self.iterate(batches))

    def iterate(self, batches: Iterable[Batch]) -> Iterator[Reported]:
        """Return an iterator that trains on each batch and yields what its step reports.

        The first batch is checked immediately. Steps run as you read the iterator. With the option `steps_per_call`,
        several steps run in one call of the runtime: a Scan in the graph iterates over stacked batches. The results
        equal those of single steps. Batches of a different shape, such as the last one of an epoch, run in separate
        calls.

        Raises:
            GraphoptError: an array has the wrong type or shape. No step of its call has run.
            NonFiniteLoss: a loss or the new state is infinite or NaN. The steps of its call are repeated one by one,
                so that the state is the one before the failing step.
        """
        return self._steps.iterate(batches)

    @property
    def is_synchronized(self) -> bool:
        """Return whether all workers have the same weights."""
        return self._parts.rounds is None or self._parts.rounds.is_synchronized

    def synchronize(self) -> None:
        """Synchronize the workers' weights. Every worker must call this.

        Raises:
            NonFiniteLoss: the workers have dropped the third round in succession.
        """
        if self._parts.rounds is not None:
            with self._parts.lock:
                self._parts.rounds.synchronize()

    def placement(self) -> dict[str, dict[str, int]]:
        """Return for each execution provider the operators of a step that it runs, and how many nodes of each.

        Raises:
            GraphoptError: onnxruntime is older than 1.24 and does not report this, or sessions depend on shapes and no
                step has run yet.
        """
        return placement.operators_by_provider(form.session for form in self._steps.runner.forms)

    def fallbacks(self) -> dict[str, str]:
        """Return the nodes of a step that run on the CPU instead of the device, by name, each with the reason.

        Raises:
            GraphoptError: as `placement` does.
        """
        forms = [] if self._device.on_cpu else self._steps.runner.forms
        found = [placement.fallbacks(form.session, form.model) for form in forms]
        return {name: reason for nodes in found for name, reason in nodes.items()}

    def evaluate(self, data: Mapping[str, Tensor] | None = None, /, *unnamed: object, **named: Tensor) -> Reported:
        """Return the losses and the model's outputs on some data, without changing the state.

        Raises:
            GraphoptError: as `step` does.
        """
        return self._evaluations.compute("evaluate", self._inputs.of_call(data, unnamed, named))

    def losses(self, data: Mapping[str, Tensor] | None = None, /, *unnamed: object, **named: Tensor) -> Reported:
        """Return the losses on some data as `evaluate` does, without the model's outputs.

        Raises:
            GraphoptError: as `step` does.
        """
        return self._evaluations.compute("losses", self._inputs.of_call(data, unnamed, named))

    def predict(self, data: Mapping[str, Tensor] | None = None, /, *unnamed: object, **named: Tensor) -> Reported:
        """Return the model's outputs. Targets are optional, and are checked if they are fed.

        Raises:
            GraphoptError: as `step` does, or the model has no output other than its own loss.
        """
        return self._evaluations.compute("predict", self._inputs.of_call(data, unnamed, named))

    @property
    def loss_weights(self) -> str | None:
        """Return the name of the weights of the loss's mean, which may be an input; None unless one loss has some."""
        names = [*map(name_of, weights_of_means(self._model))]
        return names[0] if len(names) == 1 else None

    @property
    def has_one_loss(self) -> bool:
        """Return whether the loss is one mean or sum, beside penalties."""
        return len(reductions_of(self._model)) == 1

    def with_weights(self, data: Mapping[str, Tensor], *, outputs: bool) -> Reported:
        """Return what `evaluate` does with `outputs`, and `losses` without, and `loss_weights`, by their name."""
        call = ("evaluate" if outputs else "losses") + WITH_WEIGHTS
        values = self._evaluations.compute(call, self._inputs.of_call(data, (), {}))
        (name,) = map(name_of, weights_of_means(self._model))
        weights = values[name]
        return {**values, name: np.asarray(weights.numpy() if hasattr(weights, "numpy") else weights)}

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step. You can set it if the graph has no schedule."""
        if LEARNING_RATE in self.hyperparameters:
            return float(self.hyperparameters[LEARNING_RATE])
        if LEARNING_RATE in self.outputs:
            return float(self._evaluations.compute(LEARNING_RATE, {})[LEARNING_RATE])
        raise GraphoptError("learning_rate: expected an optimizer in the training graph, found none: add one")

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if LEARNING_RATE not in self.hyperparameters:
            raise GraphoptError(
                "learning_rate: a schedule in the graph computes it; compile with schedule=None to set it, or feed "
                f"base_{LEARNING_RATE}"
            )
        self.set_hyperparameters(learning_rate=rate)

    @property
    def device(self) -> str:
        """Return the name of the device."""
        return self._device.name

    @property
    def device_options(self) -> Device:
        """Return the device with its options."""
        return self._device

    @property
    def frozen(self) -> FrozenPlacement:
        """Return where the weights lie that do not train: the option `frozen`, or what `auto` chose by their size.

        `packed`: in each session; `mapped`: in memory that all sessions share; `low`: so, and values of a step are
        freed early.
        """
        return placement_of(self._device, self._model)

    @property
    def in_place(self) -> bool:
        """Return whether a step writes the new state over the old one."""
        return self.options.in_place

    def on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy a batch to the GPU ahead of `step`. On the CPU, return the batch itself."""
        device = self._device
        if self._inputs.encoding is not None:
            batch = self._inputs.encoding.encoded(batch)
        if device.machine.in_host_memory or device.graph_capture:
            return {**batch}
        arrays = {name: x for name, x in batch.items() if isinstance(x, np.ndarray)}
        return {**batch, **{name: to_ort(device, x, x.dtype) for name, x in arrays.items()}}

    @property
    def model(self) -> ir.Model:
        """Return the training graph without its initial state."""
        return self._model

    @checked()
    def trained(
        self,
        outputs: Sequence[str] | None = None,
        *,
        into: Source | None = None,
        adapters: Literal["merged", "slots"] = "merged",
        quantized: bool = True,
    ) -> onnx.ModelProto:
        """Return the inference model with the trained weights, under the names of the model that was compiled.

        Args:
            outputs: the names of the outputs or inner values to compute; the model's outputs by default.
            into: the model that was compiled, whose nodes, inputs and outputs stay as they are: a path, bytes, an
                onnx.ModelProto or an onnx_ir.Model. By default, the model is written anew from the training graph,
                without operators and outputs that training has removed.
            adapters: merge adapters into the weights (`merged`), or add inputs for them to the model `into` (`slots`):
                its outputs are those of the model without adapters until a file of `graphopt.save_adapter` is active.
                Nothing can be merged into integers: if the model has quantized weights with adapters, adapters stay
                operators.
            quantized: return the model in integers if it trains by `passes.FakeQuantize`; otherwise, in floats.

        Raises:
            GraphoptError: the inference model has no value with one of these names, or `into` is another model.
        """
        if isinstance(outputs, str):
            raise GraphoptError(
                f"trained: expected the names of outputs, found {outputs!r}: write trained([{outputs!r}]); for a file, "
                f"executor.save_trained({outputs!r})"
            )
        return self._state.trained("trained", outputs, into, adapters, quantized).message()

    @checked()
    def save_trained(
        self,
        path: str | os.PathLike[str],
        outputs: Sequence[str] | None = None,
        *,
        into: Source | None = None,
        adapters: Literal["merged", "slots"] = "merged",
        quantized: bool = True,
    ) -> None:
        """Write the model that `trained` returns to the file that `graphopt.save` would write.

        Beyond 2 GB, weights are written one at a time: those that do not train go from the mapped file of the model to
        the new one, and adapters are merged into one weight after the other. Smaller models are one message in memory.

        Args:
            path: the file to write; beyond 2 GB, its weights are in `PATH.data`.
            outputs: as in `trained`.
            into: as in `trained`.
            adapters: as in `trained`.
            quantized: as in `trained`.

        Raises:
            GraphoptError: as in `trained`, the path has the ending of another format, or the file cannot be written.
                Nothing is changed.
        """
        check_path(path, "save_trained", "executor.save_trained('trained.onnx')")
        path = path_of_file(path, "save_trained")
        self._state.trained("save_trained", outputs, into, adapters, quantized).save(path)

    @property
    def labels(self) -> list[str] | None:
        """Return the names of the classes: those of the data that `fit` had, or of the model, or None."""
        return self._state.labels

    @labels.setter
    def labels(self, labels: Sequence[str] | None) -> None:
        if labels is not None and (isinstance(labels, str) or not isinstance(labels, Iterable)):
            raise GraphoptError(
                f"labels: expected the names of the classes, or None for those of the model, found {kind_of(labels)}: "
                "set a list, such as ['cat', 'dog']"
            )
        self._state.own_labels = None if labels is None else list(map(str, labels))

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """Return the inputs to feed in each step by name: data, targets and sample weights."""
        return dict(self._inputs.values)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Return the names of all outputs that a step can report, `loss` first."""
        return tuple(reportable(self._model))

    @property
    def reported(self) -> tuple[str, ...]:
        """Return the names of the outputs that a step reports, `loss` first: those of the option `report`."""
        return tuple(self._parts.report)

    @property
    def properties(self) -> dict[str, Property]:
        """Return what checkpoints have beside the state: numbers and texts by name, which you can set."""
        return self._state.properties

    @properties.setter
    def properties(self, properties: dict[str, Property]) -> None:
        self._state.properties = properties

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Return copies of all state by name: parameters, optimizer slots and counters.

        They cannot be written to. `update_state`, or `executor.state = arrays`, changes the state.
        """
        return self._state.copies()

    @state.setter
    def state(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._state.update(arrays)

    def update_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace part of the state by name. If an array has the wrong type or shape, nothing is replaced.

        Raises:
            GraphoptError: a name is unknown, or an array has the wrong type or shape.
        """
        self._state.update(arrays)

    @property
    def steps(self) -> int:
        """Return the number of parameter updates so far: the counter `step`, which schedules read.

        A batch does not count if `passes.Accumulate` only accumulates its gradients, or if `passes.DynamicLossScale`
        skips it. `batches` counts all of them. A graph without the counter updates the parameters in every batch.
        """
        return self._state.steps

    @property
    def batches(self) -> int:
        """Return the number of batches so far, including those without a parameter update. Checkpoints contain it.

        A step that `on_nonfinite` refuses or skips does not change the state and does not count. If `update_state`
        sets the counter `step`, it sets this number too.
        """
        return self._parts.buffers.batches

    def set_batches(self, count: int) -> None:
        """Set the number of batches so far, as a checkpoint has it."""
        self._state.set_batches(count)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Return copies of the parameters by name, in alphabetical order.

        They cannot be written to. `update_state` changes parameters.
        """
        return self._state.parameters

    def contiguous(self, *, frozen: bool = False) -> np.ndarray:
        """Return the parameters concatenated into one vector, in alphabetical order.

        Args:
            frozen: include the model's weights that do not train.

        Raises:
            GraphoptError: their types differ.
        """
        return joined(self._state.weights(frozen))

    def set_contiguous(self, vector: np.ndarray, *, frozen: bool = False) -> None:
        """Replace the parameters by the parts of a vector in the layout of `contiguous`.

        Raises:
            GraphoptError: the vector has the wrong type or size. Nothing is replaced.
        """
        with self._parts.lock:  # no step of another thread may keep a session with the former weights
            if self._state.set_contiguous(vector, frozen):  # weights that are constants of the sessions
                self._steps.open()
                self._evaluations.opened.clear()

    def reset_gradients(self) -> None:
        """Reset the gradients that `passes.Accumulate` has accumulated since the last update."""
        self._state.reset_gradients()

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Return the values of the hyperparameters by name."""
        return self._parts.buffers.hyperparameters

    def set_hyperparameters(self, **values: object) -> None:
        """Set hyperparameters for all later steps.

        Raises:
            GraphoptError: a hyperparameter is unknown, or its value has the wrong type or shape, is not finite, or is
                a negative rate.
        """
        with self._parts.lock:
            self._parts.buffers.feed(values)

    @checked()
    def save(self, path: str | os.PathLike[str], *, checksum: bool = True) -> None:
        """Write all state and `properties` to a checkpoint, from which `load` continues bit for bit.

        Args:
            path: the file to write.
            checksum: write a checksum, which finds a damaged file. Without it and `properties`, the file has the
                layout of `state.safetensors` that `graphopt.export_hosts` writes and hosts read.

        Raises:
            GraphoptError: the path has the ending of a model or of another format. Nothing is written.
        """
        self._state.save(path, checksum)

    @checked()
    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace all state and `properties` by those of a checkpoint.

        Raises:
            GraphoptError: the file is not a checkpoint, is damaged, or belongs to another training graph. Nothing is
                replaced.
        """
        self._state.load(path)
