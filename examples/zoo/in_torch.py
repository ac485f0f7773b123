"""Train and export PyTorch modules, with PyTorch's two exporters."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from comparison import Batch, Case, Model, Training
from torch import nn

import passes

EXPORTERS = ("dynamo, dynamic", "torchscript, static")
BATCH = 4


@dataclass(frozen=True)
class TorchCase(Case):
    """Describe a module, and a function that draws inputs for a batch size from PyTorch's generator.

    Args:
        ways: the exporters, each `dynamo` or `torchscript`, with a `dynamic` or `static` batch, `unfolded` to
            disable the default folding of constants.
        fresh: keep the initial weights, of which exporters merge equal ones.
        batch: the number of rows.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]
    ways: Sequence[str] = field(default=EXPORTERS, kw_only=True)
    fresh: bool = field(default=False, kw_only=True)
    batch: int = field(default=BATCH, kw_only=True)

    @property
    def exporters(self) -> Sequence[str]:
        return self.ways

    def model(self, exporter: str) -> TorchModel:
        torch.manual_seed(0)
        module = self.build()
        if not self.fresh:
            perturb(module)
        return TorchModel(self, module.eval(), exporter)


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
        return [self._batch(self.case.batch + (i % 2 if self.dynamic else 0)) for i in range(count)]

    def _batch(self, size: int) -> Batch:
        inputs = self.case.inputs(size)
        with torch.no_grad():
            prediction = copy.deepcopy(self.module)(*inputs)
        if isinstance(self.case.loss, passes.CrossEntropy):
            shape = list(prediction.shape)
            classes = shape.pop(self.case.loss.axis)
            target = torch.randint(0, classes, shape)
        else:
            target = torch.randn_like(prediction)
        named = {f"x{i}": x.numpy() for i, x in enumerate(inputs)}
        return Batch(named, target.numpy())

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in self.module.named_parameters()}

    def train(self, batches: Sequence[Batch], double: bool) -> Training:
        module = copy.deepcopy(self.module)
        module.train(any(isinstance(part, NORMALIZATIONS) for part in module.modules()))
        if double:
            module.double()
        trainable = [p for p in module.parameters() if p.requires_grad]
        optimizer = torch_optimizer(self.case.optimizer, trainable)
        losses = []
        for batch in batches[:-1]:
            inputs, target = tensors(batch, double)
            optimizer.zero_grad()
            loss = torch_loss(self.case.loss, module(*inputs), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        reached = {name: p for name, p in module.named_parameters() if p.grad is not None}
        module.eval()
        inputs, _ = tensors(batches[-1], double)
        with torch.no_grad():
            predictions = module(*inputs).numpy()
        weights = {name: p.detach().numpy() for name, p in reached.items()}
        return Training(losses, weights, predictions, {name: p.numel() for name, p in reached.items()})

    def export(self) -> onnx.ModelProto:
        torch.manual_seed(1)
        inputs = self.case.inputs(self.case.batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return export(copy.deepcopy(self.module), inputs, self.exporter)


def export(module: nn.Module, inputs: tuple[torch.Tensor, ...], exporter: str) -> onnx.ModelProto:
    """Export with the exporter's defaults, except that BatchNormalization is not folded into convolutions."""
    dynamic = "dynamic" in exporter
    folds = "unfolded" not in exporter and not any(
        isinstance(part, NORMALIZATIONS) for part in module.modules()
    )
    evaluated = torch.onnx.TrainingMode.EVAL if folds else torch.onnx.TrainingMode.PRESERVE
    names: dict[str, Any] = {"input_names": [f"x{i}" for i in range(len(inputs))], "output_names": ["y"]}
    if exporter.startswith("dynamo"):
        shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs) if dynamic else None
        program = torch.onnx.export(
            module, inputs, dynamo=True, dynamic_shapes=shapes, optimize=folds, verbose=False, **names
        )
        return program.model_proto
    buffer = io.BytesIO()
    torch.onnx.export(
        module,
        inputs,
        buffer,
        dynamo=False,
        opset_version=20,
        dynamic_axes={name: {0: "batch"} for name in [*names["input_names"], "y"]} if dynamic else None,
        do_constant_folding=folds,
        training=evaluated,
        **names,
    )
    return onnx.load_from_string(buffer.getvalue())


def warm_up() -> None:
    """Make the exporters import their modules."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for exporter in EXPORTERS:
            export(nn.Linear(2, 2), (torch.zeros(BATCH, 2),), exporter)


def torch_optimizer(step: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return PyTorch's optimizer with the options of a pass."""
    if isinstance(step, passes.SGD):
        return torch.optim.SGD(parameters, step.learning_rate, momentum=step.momentum)
    betas = step.beta1, step.beta2
    return torch.optim.Adam(parameters, step.learning_rate, betas=betas, eps=step.epsilon)


def torch_loss(loss: Any, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's loss for a pass."""
    if isinstance(loss, passes.CrossEntropy):
        return nn.functional.cross_entropy(prediction.movedim(loss.axis, 1), target)
    return nn.functional.mse_loss(prediction, target)


def tensors(batch: Batch, double: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    def tensor(array: np.ndarray) -> torch.Tensor:
        x = torch.from_numpy(array.copy())
        return x.double() if double and x.is_floating_point() else x

    return [tensor(x) for x in batch.inputs.values()], tensor(batch.target)
