"""Show that a training graph has the properties that all of them have. A property that fails is an error of one line.

Each function takes a training graph and a batch: arrays by the names of the graph's inputs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.derivatives import normal_form
from graphopt.errors import GraphoptError, line
from graphopt.graph import metadata
from graphopt.graph.loading import Source, load
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.rewriting import Pass
from graphopt.graph.storage import save
from graphopt.graph.values import gradient_of, is_floating, name_of, next_of, report_of, seed_of
from graphopt.pipeline import Pipeline
from graphopt.runtime.executor import Executor
from graphopt.testing.gradients import (
    ROUGH_STEP,
    ROUGH_TOLERANCE,
    NamedArrays,
    Oracle,
    computed,
    evaluator_of,
    gradient_model,
    in_types,
    prove,
    random_seeds,
)
from graphopt.testing.reference import evaluator

if TYPE_CHECKING:
    import torch

    from passes import Loss

_STEPS = 3
# The largest error of a number, relative to the largest one beside it.
ROUNDING, COARSE = 1e-4, 2e-2  # in 32 or 64 bits, and in 16


def reference_steps(step: ir.Model, steps: int, feeds: Mapping[str, np.ndarray]) -> list[NamedArrays]:
    """Run a training graph in ONNX's reference evaluator, and return all outputs of each step.

    Args:
        step: the training graph.
        steps: the number of steps.
        feeds: a batch.
    """
    proto, reference = ir.to_proto(step), evaluator(step)
    names = [output.name for output in proto.graph.output]
    state = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    state = {value.name: state[value.name] for value in proto.graph.input if value.name in state}
    results = []
    for _ in range(steps):
        outputs = dict(zip(names, reference.run(None, {**state, **feeds}), strict=True))
        state |= {name: outputs[next_of(name)] for name in state if next_of(name) in outputs}
        results.append(outputs)
    return results


def is_valid(step: ir.Model) -> None:
    """Raise an error unless ONNX's checker accepts a graph, with the types that it infers."""
    try:
        onnx.checker.check_model(ir.to_proto(step), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise GraphoptError(f"expected a graph that ONNX's checker accepts, found: {line(error)}") from error


def agrees_with_slopes(step: ir.Model, batch: Mapping[str, np.ndarray]) -> None:
    """Raise an error unless a first step passes the first check of executors: see `graphopt.check`."""
    Executor(step, native=False, verify="full").step(batch)


def trains_as_the_reference(
    step: ir.Model,
    batch: Mapping[str, np.ndarray],
    *,
    rounding: float = ROUNDING,
    native: bool = False,
    steps: int = _STEPS,
) -> None:
    """Raise an error unless an executor's steps report and leave what those of ONNX's reference evaluator do.

    Args:
        step: the training graph.
        rounding: the largest error, relative to the largest number of an array.
        native: compute by compiled kernels, not by those of ONNX Runtime.
        steps: how many.
    """
    executor = Executor(step, native=native, threads=1)
    for number, expected in enumerate(reference_steps(step, steps, batch)):
        found = executor.step(batch)
        for name in found.keys() & expected.keys():
            _compare(f"{name!r} of step {number + 1}", found[name], expected[name], rounding)
    for name, x in executor.state.items():
        if next_of(name) in expected:
            _compare(f"state {name!r} after {steps} steps", x, expected[next_of(name)], 10 * rounding)


def _compare(what: str, found: object, expected: object, rounding: float) -> None:
    ours, theirs = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    scale = max(float(np.max(np.abs(theirs), initial=0.0)), 1e-3)
    error = float(np.max(np.abs(ours - theirs), initial=0.0)) if ours.shape == theirs.shape else np.inf
    if not error <= rounding * scale:
        raise GraphoptError(
            f"{what}: expected {_shown(theirs)} (from the oracle), found {_shown(ours)}: an error of {error:.1e}"
        )


def _shown(array: np.ndarray) -> str:
    text = np.array2string(array.ravel()[:4], precision=6, separator=", ")
    return f"{text[:-1]}, ...] of shape {list(array.shape)}" if array.size > 4 else text


def resumes(step: ir.Model, batch: Mapping[str, np.ndarray]) -> None:
    """Raise an error unless a saved graph goes on from saved state as the training does, bit for bit."""
    whole = Executor(step, native=False, threads=1)
    expected = [whole.step(batch)["loss"] for _ in range(2 * _STEPS)]
    first = Executor(step, native=False, threads=1)
    for _ in range(_STEPS):
        first.step(batch)
    with tempfile.TemporaryDirectory() as folder:
        save(step, Path(folder, "step.onnx"))
        first.save(Path(folder, "state.safetensors"))
        second = Executor(Path(folder, "step.onnx"), native=False, threads=1)
        second.load(Path(folder, "state.safetensors"))
    found = [second.step(batch)["loss"] for _ in range(_STEPS)]
    if found != expected[_STEPS:]:
        raise GraphoptError(f"a resumed training: expected losses {expected[_STEPS:]}, found {found}")
    for name, x in whole.state.items():
        if not np.array_equal(x, second.state[name]):
            raise GraphoptError(f"a resumed training: expected the same state {name!r}, found another")


def keeps_the_interface(step: ir.Model, model: Source, batch: Mapping[str, np.ndarray]) -> None:
    """Raise an error unless the trained model has the file's inputs and outputs, and predicts as the executor does.

    Args:
        step: the training graph.
        model: the model of which it was made.
    """
    executor, source = Executor(step, native=False, threads=1), load(model)
    executor.step(batch)
    trained = load(executor.trained())
    for kind in ("inputs", "outputs"):
        ours, theirs = ([name_of(x) for x in getattr(each.graph, kind)] for each in (trained, source))
        if ours != theirs:
            raise GraphoptError(f"the trained model: expected the {kind} {theirs}, found {ours}")
    given = {name_of(x): batch[name_of(x)] for x in source.graph.inputs}
    outputs = [name_of(y) for y in trained.graph.outputs]
    expected = dict(zip(outputs, evaluator(trained).run(None, given), strict=True))
    for name, y in executor.predict(given).items():
        _compare(f"prediction {name!r}", y, expected[name], ROUNDING)


def trains_as_torch(
    step: ir.Model, batch: Mapping[str, np.ndarray], twin: Callable[[list[Any]], torch.optim.Optimizer]
) -> None:
    """Raise an error unless an optimizer leaves the parameters that one of PyTorch leaves, by the same gradients.

    Args:
        step: a training graph that reports its gradients, by `passes.ReportGradients`.
        twin: a function that returns PyTorch's optimizer of a list of parameters.
    """
    import torch

    executor = Executor(step, native=False, threads=1)
    theirs = {name: torch.nn.Parameter(torch.from_numpy(np.array(x))) for name, x in executor.parameters.items()}
    optimizer = twin(list(theirs.values()))
    for number in range(2 * _STEPS):
        found = executor.step(batch)
        for name, w in theirs.items():
            w.grad = torch.from_numpy(np.array(found[report_of(name)], w.detach().numpy().dtype))
        optimizer.step()
        for name, w in theirs.items():
            what = f"{name!r} after step {number + 1}, beside PyTorch's"
            _compare(what, executor.parameters[name], w.detach().numpy(), ROUNDING)


def agrees_with_torch(
    model: Source, inputs: Mapping[str, np.ndarray], twin: Callable[..., Any], **options: Any
) -> None:
    """Raise an error unless a model's outputs and gradients are those of a function of PyTorch's tensors, in float64.

    Args:
        inputs: arrays by the names of its inputs.
        twin: the function. It takes a tensor for each input, and returns the model's first output or a tuple of its
            outputs; those that it leaves out are not compared.
        options: keyword arguments of the function.
    """
    proof = prove(model, inputs, oracle=_torch_oracle(twin, options))
    if proof.oracle != _TORCH:
        raise GraphoptError("the twin: expected the outputs of the model, found others, or gradients that are NaN")


_TORCH = "PyTorch"


def _torch_oracle(twin: Callable[..., Any], options: Mapping[str, Any]) -> Oracle:
    import torch

    def differentiated(model: ir.Model, point: NamedArrays, seeds: NamedArrays) -> tuple[NamedArrays, NamedArrays]:
        tensors = {name: torch.tensor(x) for name, x in point.items()}
        floating = [name for name, x in tensors.items() if x.is_floating_point()]
        for name in floating:
            tensors[name].requires_grad_()
        found = twin(*tensors.values(), **options)
        outputs: Sequence[Any] = found if isinstance(found, tuple) else (found,)
        names = [name_of(y) for y in model.graph.outputs if is_floating(y)][: len(outputs)]
        pairs = list(zip(names, outputs, strict=True))
        total = sum((y * torch.tensor(seeds[seed_of(name)])).sum() for name, y in pairs)
        gradients = torch.autograd.grad(total, [tensors[name] for name in floating], allow_unused=True)
        values = {name: np.asarray(y.detach().numpy()) for name, y in pairs}
        return values, {
            name: np.zeros_like(point[name]) if gradient is None else gradient.numpy()
            for name, gradient in zip(floating, gradients, strict=True)
        }

    differentiated.__name__ = _TORCH
    return differentiated


def is_proved(model: Source, inputs: Mapping[str, np.ndarray], **options: Any) -> None:
    """Raise an error unless a model's gradients are proved by finite differences, some of which are not 0.

    Args:
        inputs: arrays by the names of its inputs.
        options: those of `graphopt.testing.prove`.
    """
    rough: dict[str, Any] = {} if options.get("double", True) else {"step": ROUGH_STEP, "tolerance": ROUGH_TOLERANCE}
    proof = prove(model, inputs, **rough, **options)
    if proof.vacuous and not proof.by_nature:
        raise GraphoptError("gradients: expected some that are not 0 at this point, found none: choose other inputs")


def agrees_alone(model: Source, inputs: Mapping[str, np.ndarray]) -> None:
    """Raise an error unless the gradient of each input is the same where no other input needs one.

    Args:
        inputs: arrays by the names of its inputs.
    """
    point = in_types(load(model), inputs)
    seeds = random_seeds(evaluator_of(normal_form(model), point)[1])
    whole = computed(gradient_model(model), point | seeds)
    for name in whole:
        alone = gradient_model(model, by=[name.removesuffix(gradient_of(""))])
        read = {x.name for x in alone.graph.inputs}
        found = computed(alone, {key: x for key, x in (point | seeds).items() if key in read})
        _compare(f"{name!r} alone", found.get(name, np.zeros(())), whole[name], ROUNDING)


def loss_model(loss: Pass, kind: tuple[ir.DataType, Sequence[int | str]]) -> ir.Model:
    """Return the model of a loss alone, which takes the prediction and the target, and returns the loss.

    Args:
        kind: the element type and the shape of the prediction.
    """
    dtype, shape = kind
    x, y = (ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)) for name in ("x", "y"))
    node = ir.Node("", "Identity", [x], outputs=[y], name="identity")
    graph = ir.Graph([x], [y], nodes=[node], opset_imports={"": OPSET}, name="loss")
    made = Pipeline(loss=loss)(ir.Model(graph, ir_version=IR_VERSION))
    made.graph.outputs[:] = [value for value in made.graph.outputs if value.name == "loss"]
    for value in (*made.graph.inputs, *made.graph.outputs):  # they are what they are in any function
        metadata.all_of(value).clear()
    return made


def adds_over_rows(loss: Loss, kind: tuple[ir.DataType, Sequence[int | str]], batch: NamedArrays) -> None:
    """Raise an error unless the summed loss of a batch is the sum of those of its rows.

    A column that meets a vector makes a square of them, in which each row meets all others.

    Args:
        kind: the element type and the shape of the prediction.
        batch: predictions `x`, and targets by their names.
    """
    function: Any = evaluator(loss_model(replace(loss, reduction="sum"), kind))
    (whole,) = function.run(None, batch)
    rows = len(batch["x"])
    parts = [function.run(None, {name: x[i : i + 1] for name, x in batch.items()})[0] for i in range(rows)]
    _compare(f"the summed loss of {rows} rows, beside the sum of theirs", whole, np.sum(parts), ROUNDING)


def operator_model(operator: str, inputs: Mapping[str, np.ndarray], **attributes: Any) -> ir.Model:
    """Return the model of an operator, whose inputs have open sizes.

    Args:
        operator: its name.
        inputs: arrays by the names of the inputs, in order.
        attributes: the operator's attributes.
    """
    infos = [
        onnx.helper.make_tensor_value_info(
            name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), [f"{name}_{axis}" for axis in range(x.ndim)]
        )
        for name, x in inputs.items()
    ]
    node = onnx.helper.make_node(operator, list(inputs), ["y"], **attributes)
    graph = onnx.helper.make_graph([node], operator, infos, [onnx.ValueInfoProto(name="y")])
    opset = onnx.helper.make_opsetid("", OPSET)
    return load(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION))


def survives_a_file(pipeline: Pipeline, model: Source, step: str, batch: Mapping[str, np.ndarray]) -> None:
    """Raise an error unless a model that is saved after a step, and read again, trains as the one that is not saved.

    Args:
        step: the name of the step.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(pipeline.until(step)(model), Path(folder, "model.onnx"))
        again = pipeline.after(step)(Path(folder, "model.onnx"))
    options: dict[str, Any] = {"native": False, "threads": 1}
    first, second = (Executor(each, **options) for each in (pipeline(model), again))
    for number in range(_STEPS):
        ours, theirs = second.step(batch), first.step(batch)
        if ours["loss"] != theirs["loss"]:
            raise GraphoptError(
                f"a model saved after {step}: expected the loss {theirs['loss']} in step {number + 1}, found "
                f"{ours['loss']}: keep what later steps read in metadata, as roles are"
            )
    for name, x in first.state.items():
        if not np.array_equal(x, second.state[name]):
            raise GraphoptError(f"a model saved after {step}: expected the same state {name!r}, found another")
