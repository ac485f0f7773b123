"""Run PyTorch's exporters so that they fold nothing, and write notes of how the module trains into the model."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn
from torch.onnx import symbolic_helper
from torch.onnx import utils as registry
from torch.utils import _pytree as pytree

from graphopt.errors import GraphoptError, kind_of, line, some
from graphopt.exporting import tracing
from graphopt.exporting.tracing import Example
from graphopt.graph.loading import load
from graphopt.graph.metadata import EXPORTED_CALL, IN_TRAINING, STOP_GRADIENT
from graphopt.graph.operators import DRAWING
from graphopt.graph.origins import CumulativeAverage, Exported, Kind, ModuleWeight, PaddingIndex
from graphopt.graph.shapes import fold_integers
from graphopt.graph.traversal import all_nodes
from graphopt.graph.values import constant_of, name_of
from graphopt.runtime.device import Device
from graphopt.runtime.optimizers import has_nested_choices
from graphopt.runtime.session import Session

_Shapes = Mapping[str, Mapping[int, str]]
_OPSET = 20  # the newest of the older exporter
_OWN = "graphopt"  # the domain of operators that stand for what the older exporter drops
_DETACH = "target=torch.ops.aten.detach"
_EXAMPLE = "the example"
_TOLERANCE = 1e-3  # of predictions: kernels of PyTorch and of the runtime round in other orders


@dataclass(frozen=True)
class _Call:
    """Hold what an exporter is asked for; see `graphopt.export`.

    Args:
        leaves: the tensors of the example by the names of their arguments.
    """

    module: nn.Module
    example: Example
    shapes: _Shapes
    leaves: Mapping[str, torch.Tensor]
    inputs: Sequence[str] | None
    outputs: Sequence[str] | None
    opset: int | None


def exported(
    module: nn.Module,
    given: object,
    exporter: str,
    shapes: _Shapes | None,
    inputs: Sequence[str] | None,
    outputs: Sequence[str] | None,
    opset: int | None,
    verify: bool,
) -> ir.Model:
    """Export a module with notes of how it trains; see `graphopt.export`."""
    example = _arguments(given)
    tracing.check_module(module)
    tracing.initialize(module, example)
    with _one_line("a module that takes the example", "pass the arguments of forward"):
        tracing.check_functions(module, example)
    leaves = _named_inputs(module, example)
    if shapes is None:
        example = _with_rows(example)
        leaves = _named_inputs(module, example)
        shapes = _batch(leaves)
    shapes = _checked(shapes, leaves)
    call = _Call(module, example, shapes, leaves, inputs, outputs, opset)
    with _errors(exporter), tracing.traced(module):
        model = _dynamo(call) if exporter == "dynamo" else _torchscript(call)
    model = load(model)
    while has_nested_choices(model) and fold_integers(model):
        pass  # the runtime's own folding would end the process
    _write_notes(model, module, exporter, example)
    draws = [node for node in all_nodes(model.graph) if node.op_type in DRAWING and node.domain == ""]
    if draws and any(part.training for part in module.modules()):
        raise tracing.refuse(
            f"that {draws[0].op_type} node {draws[0].name!r} draws random numbers in training only",
            "call eval() of the part that draws them, such as stochastic depth, or pass them as an input",
        )
    if verify and not draws:
        _verify(model, module, example, shapes)
    return model


def _checked(shapes: object, leaves: Mapping[str, torch.Tensor]) -> _Shapes:
    """Return the names of sizes by input and dimension; torch.export.Dim has a name, too."""
    such = f"such as {{{next(iter(leaves), 'x')!r}: {{0: 'n'}}}}"
    if not isinstance(shapes, Mapping):
        raise GraphoptError(f"dynamic_shapes: expected a dict by the names of inputs, {such}, found {kind_of(shapes)}")
    if unknown := [name for name in shapes if name not in leaves]:
        raise GraphoptError(f"dynamic_shapes: expected names of inputs, {list(leaves)}, found {unknown[0]!r}")
    named: dict[str, dict[int, str]] = {}
    for name, axes in shapes.items():
        sizes: Mapping[Any, Any] = axes if isinstance(axes, Mapping) else {None: axes}
        named[name] = {axis: getattr(size, "__name__", size) for axis, size in sizes.items()}
        for axis, size in named[name].items():
            if axis not in range(leaves[name].ndim) or not isinstance(size, str):
                raise GraphoptError(
                    f"dynamic_shapes: {name}: expected names of sizes by dimension, of 0 to {leaves[name].ndim - 1}, "
                    f"{such}, found {axes!r}"
                )
    return named


def _arguments(example: object) -> Example:
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def _named_inputs(module: nn.Module, example: Example) -> dict[str, torch.Tensor]:
    """Return the tensors of an example by the names of their arguments; tensors in containers have a number."""
    args, kwargs = example
    forward = inspect.signature(module.forward)
    given: dict[str, object] = {}
    for name, value in forward.bind(*args, **kwargs).arguments.items():
        kind = forward.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            given |= {f"{name}_{i}": x for i, x in enumerate(value)}
        else:
            given |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    found: dict[str, torch.Tensor] = {}
    for name, value in given.items():
        tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        is_alone = isinstance(value, torch.Tensor)
        found |= {name if is_alone else f"{name}_{i}": x for i, x in enumerate(tensors)}
    return found


def _with_rows(example: Example) -> Example:
    """Repeat the rows of an example of one row: torch.export fixes the size of dimensions of size 1."""
    tensors = [x for x in pytree.tree_leaves(example) if isinstance(x, torch.Tensor) and x.ndim]
    if not tensors or any(len(x) != 1 for x in tensors):
        return example
    args, kwargs = pytree.tree_map(
        lambda x: torch.cat([x, x]) if isinstance(x, torch.Tensor) and x.ndim else x, example
    )
    return args, kwargs


def _batch(leaves: Mapping[str, torch.Tensor]) -> dict[str, dict[int, str]]:
    """Name dimension 0 of the inputs that have as many rows as the first."""
    rows = next((len(x) for x in leaves.values() if x.ndim), None)
    return {name: {0: "batch"} for name, x in leaves.items() if x.ndim and len(x) == rows}


@contextlib.contextmanager
def _errors(exporter: str) -> Iterator[None]:
    """Turn errors of PyTorch's exporter into one line."""
    try:
        yield
    except GraphoptError:
        raise
    except Exception as error:  # exporters raise errors of many kinds
        causes: list[BaseException] = [error]
        while (found := causes[-1].__cause__ or causes[-1].__context__) is not None and found not in causes:
            causes.append(found)
        if own := next((x for x in causes if isinstance(x, GraphoptError)), None):
            raise own from None
        other = "torchscript" if exporter == "dynamo" else "dynamo"
        raise GraphoptError(
            f"export: PyTorch's exporter refuses the module: {type(causes[-1]).__name__}: {line(causes[-1])[:300]}: "
            f"change the module, fix sizes by dynamic_shapes={{}}, or try exporter={other!r}"
        ) from error


@contextlib.contextmanager
def _one_line(expected: str, remedy: str) -> Iterator[None]:
    """Turn errors of many types, of a module, into one line."""
    try:
        yield
    except GraphoptError:
        raise
    except Exception as error:
        raise GraphoptError(f"export: expected {expected}, found {line(error)[:300]}: {remedy}") from error


def _dynamo(call: _Call) -> ir.Model:
    """Export by torch.export, and mark the nodes of `detach` and Dropout."""
    given = {id(x): dict(call.shapes.get(name, {})) for name, x in call.leaves.items()}
    args, kwargs = call.example
    bound = inspect.signature(call.module.forward).bind(*args, **kwargs).arguments
    sized = {name: pytree.tree_map(lambda x: given.get(id(x)) or None, value) for name, value in bound.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            call.module,
            args,
            kwargs=kwargs or None,
            dynamo=True,
            optimize=False,
            verbose=False,
            dynamic_shapes=sized if any(given.values()) else None,
            input_names=call.inputs,
            output_names=call.outputs,
            opset_version=call.opset,
        )
    if program is None or program.exported_program is None:
        raise GraphoptError("export: expected a program of torch.export, found none: try exporter='torchscript'")
    signature = program.exported_program.graph_signature
    if changed := [*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()]:
        raise tracing.changing(changed)
    model = program.model
    for graph in model.graphs():
        for value in graph.initializers.values():  # which share memory with the module
            tensor = value.const_value
            if tensor is not None:
                value.const_value = ir.Tensor(tensor.numpy().copy(), tensor.dtype, name=value.name)
    nodes = list(all_nodes(model.graph))
    calls = {node: EXPORTED_CALL.read(node) or "" for node in nodes}
    stops = [node for node, call in calls.items() if _DETACH in call and node.op_type == "Identity"]
    for node in stops:
        STOP_GRADIENT.set(node)
    graphs = [x for x in program.exported_program.graph_module.modules() if isinstance(x, torch.fx.GraphModule)]
    wanted = {x.name for graph in graphs for x in graph.graph.nodes if "aten.detach" in str(x.target) and x.users}
    marked = {calls[node].partition(" ")[0].lstrip("%") for node in stops}
    if lost := wanted - marked:
        raise tracing.refuse(f"{sorted(lost)[0]}, which PyTorch's exporter drops", "export by torchscript")
    return model


def _torchscript(call: _Call) -> ir.Model:
    """Export by the older exporter, with operators for `detach` and embeddings, which become standard ones."""
    args, kwargs = call.example
    names = list(call.inputs or call.leaves)
    axes = {own: dict(call.shapes[name]) for own, name in zip(names, call.leaves, strict=False) if name in call.shapes}
    opset = call.opset or _OPSET
    symbols: dict[str, Callable[..., Any]] = {
        "aten::detach": _stop,
        "aten::detach_": _stop,
        "aten::embedding": _gather,
    }
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        file = os.path.join(folder, "module.onnx")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        try:
            for name, symbol in symbols.items():
                registry.register_custom_op_symbolic(name, symbol, opset)
            torch.onnx.export(
                call.module,
                args,
                file,
                kwargs=kwargs or None,
                dynamo=False,
                training=torch.onnx.TrainingMode.PRESERVE,
                do_constant_folding=False,
                dynamic_axes=axes,
                input_names=names,
                output_names=call.outputs,
                opset_version=opset,
            )
        finally:
            for name in symbols:
                registry.unregister_custom_op_symbolic(name, opset)
        model = ir.from_proto(onnx.load(file))
    for node in list(all_nodes(model.graph)):
        if node.domain != _OWN:
            continue
        node.domain = ""
        node.outputs[0].shape = None  # for what it does not know, the exporter writes the sizes of the example
        if node.op_type == "Identity":
            STOP_GRADIENT.set(node)
        else:
            PaddingIndex(node.attributes.get_int("padding_idx", 0)).write(node)
            node.attributes.pop("padding_idx")
    model.opset_imports.pop(_OWN, None)
    _separate(model, call.module)
    return model


def _separate(model: ir.Model, module: nn.Module) -> None:
    """Separate weights with equal numbers, which the exporter merges if the module is in eval mode."""
    paths = tracing.state_of_module(module)
    for node in [node for node in model.graph if node.op_type == "Identity"]:
        x, y = node.inputs[0], node.outputs[0]
        if x is None or x.const_value is None or y.name not in paths:
            continue
        name, y.name = name_of(y), f"{y.name}/merged"
        own = ir.val(name, const_value=ir.Tensor(x.const_value.numpy().copy(), x.dtype, name=name))
        model.graph.register_initializer(own)
        ir.convenience.replace_all_uses_with(y, own, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)


def _stop(g: Any, x: Any) -> Any:
    return g.op(f"{_OWN}::Identity", x).setType(x.type())


@symbolic_helper.parse_args("v", "v", "i", "b", "b")
def _gather(g: Any, weight: Any, indices: Any, padding: int, scaled: bool, sparse: bool) -> Any:
    if padding < 0:
        return g.op("Gather", weight, indices)
    result = g.op(f"{_OWN}::Gather", weight, indices, padding_idx_i=padding)
    rows, width = indices.type().varyingSizes(), weight.type().varyingSizes()
    known = rows is not None and width is not None
    return result.setType(weight.type().with_sizes([*rows, width[-1]] if known else None))


def _write_notes(model: ir.Model, module: nn.Module, exporter: str, example: Example) -> None:
    """Write what the module's parameters, buffers, normalizations and dropouts are."""
    groups: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for path, x in tracing.state_of_module(module).items():
        groups.setdefault(id(x), (x, []))[1].append(path)
    persistent = module.state_dict().keys()
    noted: dict[str, ModuleWeight] = {}
    gone: list[str] = []
    for x, paths in groups.values():
        kind = Kind.BUFFER
        if isinstance(x, nn.Parameter):
            kind = Kind.PARAMETER if x.requires_grad else Kind.FROZEN
        names = [path for path in paths if path in model.graph.initializers]
        if len(names) > 1:
            raise GraphoptError(f"export: expected one initializer for {names}, found {len(names)}")
        noted |= {name: ModuleWeight(kind, tuple(paths), paths[0] in persistent) for name in names}
        if not names and kind is not Kind.BUFFER:
            gone += paths[:1]
    if gone and (lost := tracing.trained_paths(module, gone, example)):
        raise tracing.refuse(f"parameters {some(lost)}, which PyTorch's exporter leaves out", "try the other exporter")
    Exported(exporter, noted).write(model)
    switched = tracing.in_training(module)
    for node in all_nodes(model.graph):
        if node.domain == "" and node.op_type == "BatchNormalization":
            _note_normalization(node, switched)
        elif node.domain == "" and node.op_type == "Dropout" and len(node.inputs) > 2:
            if constant_of(node.inputs[2]):
                IN_TRAINING.set(node)
            node.resize_inputs(2)


def _note_normalization(node: ir.Node, modules: Mapping[str, nn.Module]) -> None:
    mean = node.inputs[3]
    path = "" if mean is None else name_of(mean).rpartition(".")[0]
    part: Any = modules.get(path)
    if part is None or part.running_mean is None:
        return
    IN_TRAINING.set(node)
    momentum = part.momentum if part.track_running_stats else 0.0
    node.attributes.add(ir.AttrFloat32("momentum", 0.9 if momentum is None else 1 - momentum))
    if momentum is None:
        CumulativeAverage(int(part.num_batches_tracked)).write(node)


def _verify(model: ir.Model, module: nn.Module, example: Example, shapes: _Shapes) -> None:
    """Compare what the file and the module predict, also for other sizes of each dimension that may vary."""
    names = [name_of(x) for x in model.graph.inputs]
    device = Device("cpu", threads=1, flush_denormals=False)
    session = Session(device, model, optimized=False)
    for size, examples in _examples(module, example, shapes):
        with _one_line(f"a module that takes {size}", "fix it by dynamic_shapes, such as {}"):
            accepted, predicted = _accepted(module, examples)
        given = _named_inputs(module, accepted)
        ordered = given if given.keys() == set(names) else dict(zip(names, given.values(), strict=False))
        feeds = {name: x.detach().cpu().numpy() for name, x in ordered.items()}
        expected = [x for x in pytree.tree_leaves(predicted) if isinstance(x, torch.Tensor)]
        try:
            found = session.compute_arrays(feeds)
        except GraphoptError as error:
            raise GraphoptError(
                f"export: expected a file that runs on {size}, found {line(error)[:300]}: {_instead(size)}"
            ) from error
        for (name, ours), theirs in zip(found.items(), expected, strict=True):
            wanted = theirs.detach().cpu().float().numpy() if theirs.is_floating_point() else theirs.cpu().numpy()
            if ours.shape != wanted.shape:
                raise _other(name, size, f"shape {list(ours.shape)} in place of {list(wanted.shape)}")
            if ours.size and not np.allclose(ours, wanted, _TOLERANCE, _TOLERANCE * np.abs(wanted).max(), True):
                raise _other(name, size, f"numbers that differ by {np.abs(ours - wanted).max():.2g}")


def _examples(module: nn.Module, example: Example, shapes: _Shapes) -> Iterator[tuple[str, list[Example]]]:
    """Yield the example, and for each dimension that may vary, examples of which the module takes at least one."""
    yield _EXAMPLE, [example]
    places: dict[str, dict[int, int]] = {}  # for each dimension, its axis in tensors
    for name, x in _named_inputs(module, example).items():
        for axis, dim in shapes.get(name, {}).items():
            places.setdefault(dim, {})[id(x)] = axis
    for dim, axes in places.items():
        yield (
            f"another size of dimension {dim!r}",
            [
                pytree.tree_map(lambda x, r=resized, a=axes: r(x, a[id(x)]) if id(x) in a else x, example)
                for resized in _RESIZED
            ],
        )


def _accepted(module: nn.Module, examples: Sequence[Example]) -> tuple[Example, object]:
    """Return the first example that the module takes, and what it predicts; the last one's error if it takes none."""
    for example in examples[:-1]:
        with contextlib.suppress(Exception):
            return example, tracing.predicted(module, example)
    return examples[-1], tracing.predicted(module, examples[-1])


# Tensors of another size along an axis: turned, and with one element more; the last one twice; without it; all twice.
_RESIZED = (
    lambda x, axis: torch.cat([x.flip(axis), x.narrow(axis, 0, 1)], axis),
    lambda x, axis: torch.cat([x, x.narrow(axis, x.shape[axis] - 1, 1)], axis),
    lambda x, axis: x.narrow(axis, 0, max(1, x.shape[axis] - 1)),
    lambda x, axis: torch.cat([x, x], axis),
)


def _instead(size: str) -> str:
    """Return what to do about a file that is another function than the module."""
    if size == _EXAMPLE:
        return "PyTorch's exporter has written another function: try the other exporter"
    return (
        "PyTorch's exporter has written another function, whose control flow or sizes follow from the example: try the "
        "other exporter, or fix sizes by dynamic_shapes, such as {}"
    )


def _other(name: str, size: str, what: str) -> GraphoptError:
    return GraphoptError(
        f"export: output {name!r}: expected what the module predicts for {size}, found {what}: {_instead(size)}"
    )
