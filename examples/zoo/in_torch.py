"""Train and export PyTorch modules, with PyTorch's two exporters."""

from __future__ import annotations

import copy
import inspect
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
from comparison import RECORDED, Batch, Case, Model, NotExported, Training, relative
from torch import nn

import graphopt
import passes

EXPORTERS = ("dynamo, dynamic", "torchscript, static")
BOTH = (
    "dynamo, dynamic",
    "dynamo unfolded, dynamic",
    "torchscript, dynamic",
    "torchscript unfolded, dynamic",
)
ROADS = ("dynamo unfolded, dynamic", f"{RECORDED} dynamo, dynamic", f"{RECORDED} torchscript, dynamic")
BATCH = 4
LENGTHS = 5, 7, 3


@dataclass(frozen=True)
class TorchCase(Case):
    """Describe a module, and a function that draws inputs for a batch size from PyTorch's generator.

    Args:
        ways: the exporters, each `dynamo` or `torchscript`, with a `dynamic` or `static` batch, `unfolded` to
            disable the default folding of constants, and last the tool that rewrites the file.
        roads: also export by the roads that lose nothing: without folding, and by graphopt.export.
        lengths: the lengths of sequences, in turn, for inputs with a second dynamic dimension: the function that draws
            inputs takes one as its second argument.
        script: compile the module by torch.jit.script before the export.
        fresh: keep the initial weights, of which exporters merge equal ones.
        batch: the number of rows.
        branches: give weights of a branch that a step does not take a gradient of 0, as a graph does; PyTorch gives
            them none, and its optimizers do not touch them.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[..., tuple[torch.Tensor, ...]]
    ways: Sequence[str] = field(default=EXPORTERS, kw_only=True)
    roads: bool = field(default=True, kw_only=True)
    fresh: bool = field(default=False, kw_only=True)
    batch: int = field(default=BATCH, kw_only=True)
    lengths: Sequence[int] = field(default=(), kw_only=True)
    script: bool = field(default=False, kw_only=True)
    branches: bool = field(default=False, kw_only=True)

    @property
    def exporters(self) -> Sequence[str]:
        return (*self.ways, *(x for x in ROADS if self.roads and x not in self.ways))

    def model(self, exporter: str) -> TorchModel:
        torch.manual_seed(0)
        module = self.build()
        if not self.fresh:
            perturb(module)
        module.eval()
        with torch.no_grad():
            module(*self.draw(0, self.batch))  # hooks compute weights, for example of torch.nn.utils.prune
        return TorchModel(self, module, exporter)

    def draw(self, step: int, rows: int) -> tuple[torch.Tensor, ...]:
        """Draw the inputs of a step from PyTorch's generator."""
        return self.inputs(rows, self.lengths[step % len(self.lengths)]) if self.lengths else self.inputs(rows)


def perturb(module: nn.Module) -> None:
    """Make the values of every trainable weight different, and remove randomness from training."""
    for parameter in module.parameters():
        noise = 0.05 * torch.randn_like(parameter)
        if parameter.requires_grad:
            parameter.data += noise
    for part in module.modules():
        if isinstance(part, NORMALIZATIONS) and part.running_mean is not None:
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
        if isinstance(getattr(part, "drop_prob", None), float):
            part.drop_prob = 0.0


def trains(module: nn.Module) -> bool:
    """Return whether a module trains in training mode: only BatchNormalization then behaves otherwise."""
    return any(isinstance(part, NORMALIZATIONS) for part in module.modules())


def merge_equal(module: nn.Module) -> None:
    """Share one parameter among all with the same numbers, as tools do that rewrite files."""
    first: dict[Any, nn.Parameter] = {}
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            setattr(part, name, first.setdefault((weight.shape, weight.detach().numpy().tobytes()), weight))


NORMALIZATIONS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class TorchModel(Model):
    case: TorchCase
    module: nn.Module
    exporter: str

    @property
    def dynamic(self) -> bool:
        return "dynamic" in self.exporter

    def batches(self, count: int) -> list[Batch]:
        torch.manual_seed(1)
        return [self._batch(i, self.case.batch + (i % 2 if self.dynamic else 0)) for i in range(count)]

    def _batch(self, step: int, rows: int) -> Batch:
        inputs = self.case.draw(step, rows)
        named = {f"x{i}": x.numpy() for i, x in enumerate(inputs)}
        return Batch(named, self._target(inputs))

    def _target(self, inputs: Sequence[torch.Tensor]) -> np.ndarray | None:
        if isinstance(self.case.loss, passes.OwnLoss):
            return None
        with torch.no_grad():
            prediction = copy.deepcopy(self.module)(*inputs)
        if isinstance(self.case.loss, passes.CrossEntropy):
            shape = list(prediction.shape)
            classes = shape.pop(self.case.loss.axis)
            return torch.randint(0, classes, shape).numpy()
        return torch.randn_like(prediction).numpy()

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in self.module.named_parameters()}

    def rounded_otherwise(self, optimizer: Any, batches: Sequence[Batch]) -> Iterator[Training]:
        with torch.backends.mkldnn.flags(enabled=False):  # other convolutions
            yield self.train(optimizer, batches, double=False)
        yield from super().rounded_otherwise(optimizer, batches)

    def train_as_recorded(self, optimizer: Any, batches: Sequence[Batch]) -> Training:
        module = copy.deepcopy(self.module)
        for part in module.modules():
            if isinstance(part, nn.Embedding):
                part.padding_idx = None
        merge_equal(module)
        with mock.patch.object(torch.Tensor, "detach", lambda self: self):
            return replace(self, module=module).train(optimizer, batches, double=False)

    def train(self, optimizer: Any, batches: Sequence[Batch], double: bool) -> Training:
        module = copy.deepcopy(self.module)
        module.train(trains(module))
        if double:
            module.double()
        masters = Masters(module)
        updates = torch_optimizer(optimizer, [p for p in masters.weights.values() if p.requires_grad])
        losses = []
        for batch in batches[:-1]:
            inputs, target = tensors(batch, double)
            for p in masters.weights.values():
                p.grad = torch.zeros_like(p) if self.case.branches else None
            loss = torch_loss(self.case.loss, masters(*inputs), target)
            loss.backward()
            updates.step()
            losses.append(loss.item())
        reached = {name: p for name, p in masters.weights.items() if p.grad is not None}
        module.eval()
        inputs, _ = tensors(batches[-1], double)
        with torch.no_grad():
            predictions = masters(*inputs).numpy()
        weights = {name: p.data.numpy() for name, p in reached.items()}
        return Training(losses, weights, predictions, {name: p.numel() for name, p in reached.items()})

    def export(self) -> onnx.ModelProto:
        torch.manual_seed(1)
        inputs = self.case.draw(0, self.case.batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            axes = {0: "batch", **({1: "length"} if self.case.lengths else {})} if self.dynamic else {}
            module = copy.deepcopy(self.module)
            module.train(trains(module))
            module = torch.jit.script(module) if self.case.script else module
            if self.exporter.startswith(RECORDED):
                return self._recorded(module, inputs, axes)
            module.eval()
            proto = export(module, inputs, self.exporter, axes)
            proto = TOOLS.get(self.exporter.rpartition(", ")[2], lambda proto: proto)(proto)
        self._check(proto)
        return proto

    def _recorded(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], axes: dict[int, str]) -> onnx.ModelProto:
        """Export by graphopt.export, which records what trains."""
        names = [f"x{i}" for i in range(len(inputs))]
        arguments = list(inspect.signature(module.forward).parameters)
        shapes = {
            name: {i: axis for i, axis in axes.items() if i < x.ndim}
            for name, x in zip(arguments, inputs, strict=False)
        }
        exporter = "torchscript" if "torchscript" in self.exporter else "dynamo"
        how = {"exporter": exporter, "input_names": names, "output_names": ["y"]}
        model = graphopt.export(module, inputs, dynamic_shapes=shapes if len(axes) > 1 else None, **how)
        proto = onnx_ir.to_proto(model)
        self._check(proto)
        return proto

    def _check(self, proto: onnx.ModelProto) -> None:
        """Raise NotExported if the file computes other predictions than the module, on batches of two sizes."""
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
        for batch in self.batches(2):
            with torch.no_grad():
                expected = copy.deepcopy(self.module)(*tensors(batch, double=False)[0]).double().numpy()
            (found,) = session.run(None, {x.name: batch.inputs[x.name] for x in session.get_inputs()})
            difference = relative(found.astype(float), expected)
            if difference > 10 * self.case.tolerance:
                shapes = f"{found.shape} in place of {expected.shape}"
                how = shapes if found.shape != expected.shape else f"by {difference:.0e}"
                raise NotExported(f"the file predicts otherwise than the module: {how}")


class Masters:
    """Hold the weights that an optimizer updates: in float32 for a module with 16-bit weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self.weights = module, dict(module.named_parameters())
        self._types = {name: p.dtype for name, p in self.weights.items()}
        self._narrow = any(kind.itemsize < 4 for kind in self._types.values())
        if self._narrow:
            self.weights = {name: nn.Parameter(p.data.float()) for name, p in self.weights.items()}

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if not self._narrow:
            return self._module(*inputs)
        stored = {name: p.to(self._types[name]) for name, p in self.weights.items()}
        return torch.func.functional_call(self._module, stored, inputs)


def export(module: nn.Module, inputs: tuple[torch.Tensor, ...], exporter: str, axes: dict[int, str]) -> onnx.ModelProto:
    """Export with the exporter's defaults, except that BatchNormalization is not folded into convolutions.

    `axes` names the dynamic dimensions of every input.
    """
    folds = "unfolded" not in exporter and not any(isinstance(part, NORMALIZATIONS) for part in module.modules())
    evaluated = torch.onnx.TrainingMode.EVAL if folds else torch.onnx.TrainingMode.PRESERVE
    names: dict[str, Any] = {"input_names": [f"x{i}" for i in range(len(inputs))], "output_names": ["y"]}
    if exporter.startswith("dynamo"):
        sizes = {0: torch.export.Dim("batch")} if len(axes) == 1 else dict.fromkeys(axes, torch.export.Dim.AUTO)
        shapes = tuple({i: size for i, size in sizes.items() if i < x.ndim} for x in inputs) if axes else None
        program = torch.onnx.export(
            module, inputs, dynamo=True, dynamic_shapes=shapes, optimize=folds, verbose=False, **names
        )
        return program.model_proto
    buffer = io.BytesIO()
    given = dict(zip(names["input_names"], inputs, strict=True))
    dynamic = {name: {i: axis for i, axis in axes.items() if i < x.ndim} for name, x in given.items()}
    dynamic["y"] = {0: "batch"}
    torch.onnx.export(
        module,
        inputs,
        buffer,
        dynamo=False,
        opset_version=20,
        dynamic_axes=dynamic if axes else None,
        do_constant_folding=folds,
        training=evaluated,
        **names,
    )
    return onnx.load_from_string(buffer.getvalue())


def slimmed(proto: onnx.ModelProto) -> onnx.ModelProto:
    import onnxslim

    return onnxslim.slim(proto)


def simplified(proto: onnx.ModelProto) -> onnx.ModelProto:
    import onnxsim

    return onnxsim.simplify(proto)[0]


def optimized(proto: onnx.ModelProto) -> onnx.ModelProto:
    import onnxoptimizer

    return onnxoptimizer.optimize(proto)


def optimized_by_the_runtime(proto: onnx.ModelProto) -> onnx.ModelProto:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(proto.SerializeToString(), options)
        return onnx.load(path)


TOOLS = {
    "onnxslim": slimmed,
    "onnxsim": simplified,
    "onnxoptimizer": optimized,
    "onnxruntime": optimized_by_the_runtime,
}


def warm_up() -> None:
    """Make the exporters import their modules."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for exporter in EXPORTERS:
            export(nn.Linear(2, 2), (torch.zeros(BATCH, 2),), exporter, {0: "batch"})


def torch_optimizer(step: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer with the options of a pass."""
    if isinstance(step, passes.SGD):
        return torch.optim.SGD(parameters, step.learning_rate, momentum=step.momentum)
    betas = step.beta1, step.beta2
    if isinstance(step, passes.AdamW):
        return torch.optim.AdamW(parameters, step.learning_rate, betas, step.epsilon, step.weight_decay)
    return torch.optim.Adam(parameters, step.learning_rate, betas=betas, eps=step.epsilon)


def torch_loss(loss: Any, prediction: torch.Tensor, target: Any) -> torch.Tensor:
    """Return PyTorch's loss for a pass."""
    if isinstance(loss, passes.OwnLoss):
        return prediction
    if isinstance(loss, passes.CrossEntropy):
        return nn.functional.cross_entropy(prediction.movedim(loss.axis, 1), target)
    return nn.functional.mse_loss(prediction.to(target.dtype), target)


def tensors(batch: Batch, double: bool) -> tuple[list[torch.Tensor], Any]:
    def tensor(array: np.ndarray) -> torch.Tensor:
        x = torch.from_numpy(array.copy())
        return x.double() if double and x.is_floating_point() else x

    target = None if batch.target is None else tensor(batch.target)
    return [tensor(x) for x in batch.inputs.values()], target
