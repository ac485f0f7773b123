"""Export a PyTorch module so that what trains in it trains here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.storage import save

if TYPE_CHECKING:
    import torch


@checked()
def export(
    module: torch.nn.Module,
    example: object,
    path: str | os.PathLike[str] | None = None,
    *,
    exporter: Literal["dynamo", "torchscript"] = "dynamo",
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    verify: bool = True,
) -> ir.Model:
    """Export a PyTorch module by `torch.onnx.export`, and record in the file how the module trains.

    The file contains every parameter under its path, and nothing is folded. It records which parameters require
    gradients, which weights are buffers, which modules share a weight, where gradients stop (`detach`, `.data`,
    `torch.no_grad`, the padding of an embedding), which BatchNormalization and Dropout are in training mode, and the
    momentum and the averages of BatchNormalization. Its inference form is that of `module.eval()`. A training graph
    compiled from the file trains what PyTorch trains, in the mode in which the module is: call `module.train()` or
    `module.eval()` before.

    Needs PyTorch (the extra `torch`). The module is not changed, except that lazy modules are initialized.

    Args:
        module: the module.
        example: an input that forward takes: a tensor, a tuple of positional arguments, or a mapping of keyword
            arguments.
        path: where to save the model, with its weights beside it from 2 GB on; by default, it is only returned.
        exporter: `dynamo`, which is based on torch.export, or `torchscript`, the older one.
        dynamic_shapes: the names of dimensions whose size may vary, by the name of the input and the number of the
            dimension, such as `{"x": {0: "batch", 1: "length"}}`; by default, dimension 0 of all inputs of equal size
            there. An empty mapping fixes all sizes.
        input_names: the names of the inputs; by default, those of forward's arguments.
        output_names: the names of the outputs; by default, the exporter's.
        opset_version: the opset; by default, the exporter's.
        verify: run the file on the example, and on another size of each dimension that may vary, and compare it with
            the module.

    Raises:
        GraphoptError: PyTorch is missing or its exporter refuses the module, the file computes something else than the
            module, or the module does something that cannot be recorded: gradients of its own (an autograd function, a
            hook), parameters or buffers that forward changes, or random numbers in recurrent layers.

    >>> import torch
    >>> module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).eval()
    >>> _ = module[0].weight.requires_grad_(False)
    >>> model = graphopt.export(module, torch.zeros(2, 4))
    >>> step = graphopt.compile(model, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    >>> sorted(graphopt.Executor(step).parameters)
    ['0.bias', '2.bias', '2.weight']
    """
    try:
        import torch as torch
    except ImportError as error:
        raise GraphoptError("export needs PyTorch, which is not installed: pip install 'graphopt[torch]'") from error
    from graphopt.exporting.exporters import exported

    if not isinstance(module, torch.nn.Module):
        made = ": graphopt.compile takes an ONNX model as it is" * isinstance(module, str | os.PathLike | ir.Model)
        raise GraphoptError(f"export: expected a torch.nn.Module, found {kind_of(module)}{made}")
    if exporter not in ("dynamo", "torchscript"):
        raise GraphoptError(f"exporter: expected 'dynamo' or 'torchscript', found {exporter!r}")
    model = exported(module, example, exporter, dynamic_shapes, input_names, output_names, opset_version, verify)
    if path is not None:
        save(model, path)
    return model
