"""Training graphs, executors and files that tests make, and what they find in them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

import graphopt
import passes
from graphopt.compiler import STANDARD

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, np.ndarray]


def compiled(model: Any, **steps: Any) -> ir.Model:
    """Return a training graph, of the mean squared error and plain descent at 0.1 unless `steps` says otherwise."""
    return graphopt.compile(model, **{"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1), **steps})


def executor(model: Any, **options: Any) -> graphopt.Executor:
    """Return an executor of what `compiled` returns; options that are no steps are the executor's."""
    steps = {name: options.pop(name) for name in STANDARD if name in options}
    return graphopt.Executor(compiled(model, **steps), **{"threads": 1, **options})


def losses(executor: graphopt.Executor, feeds: Arrays | Sequence[Arrays], count: int = 1) -> list[float]:
    """Train on a batch, or on each of several, `count` times, and return the losses."""
    batches = [feeds] if isinstance(feeds, Mapping) else feeds
    return [float(executor.step(batch)["loss"]) for _ in range(count) for batch in batches]


def trained(model: Any, feeds: Arrays | Sequence[Arrays], count: int = 1, **options: Any) -> graphopt.Executor:
    """Return an executor, as `executor` does, that has trained on a batch, or on each of several, `count` times."""
    own = executor(model, **options)
    losses(own, feeds, count)
    return own


def session(
    model: ir.Model | onnx.ModelProto | str | PathLike[str], *, optimize: bool = True, library: Any = None
) -> onnxruntime.InferenceSession:
    """Open a model in ONNX Runtime itself, with one thread and without its warnings."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library is not None:
        options.register_custom_ops_library(str(library))
    source = ir.to_proto(model) if isinstance(model, ir.Model) else model
    if isinstance(source, onnx.ModelProto):
        source = source.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def outputs(
    model: ir.Model | onnx.ModelProto | str | PathLike[str], feeds: Arrays, **options: Any
) -> dict[str, np.ndarray]:
    """Run a model in ONNX Runtime itself, on those feeds that it reads."""
    opened = session(model, **options)
    read = {x.name: feeds[x.name] for x in opened.get_inputs() if x.name in feeds}
    return dict(zip([y.name for y in opened.get_outputs()], opened.run(None, read), strict=True))


def exported(
    module: torch.nn.Module,
    *inputs: torch.Tensor,
    dynamo: bool,
    names: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    **options: Any,
) -> onnx.ModelProto:
    """Return the file that one of PyTorch's exporters writes, without its warnings; `options` are those of export."""
    import torch  # which some environments of tests lack

    options = {"input_names": [*names], "output_names": [*outputs], "verbose": False, **options}
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            return torch.onnx.export(module, inputs, dynamo=True, **options).model_proto
        torch.onnx.export(module, inputs, buffer, dynamo=False, **{"opset_version": 17, **options})
    return onnx.load_from_string(buffer.getvalue())


def weights(model: onnx.ModelProto | str | PathLike[str]) -> dict[str, np.ndarray]:
    """Return copies of a file's initializers."""
    proto = model if isinstance(model, onnx.ModelProto) else onnx.load(model)
    return {x.name: onnx.numpy_helper.to_array(x).copy() for x in proto.graph.initializer}


def assert_equal(found: Arrays, expected: Arrays) -> None:
    """Compare arrays of the same names bit by bit."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)


def assert_close(found: Arrays, expected: Arrays, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Compare arrays of the same names."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol, atol, err_msg=name)


def settled(state: Arrays) -> Arrays:
    """Return state without that of keys' biases, whose gradient is 0 but for rounding, which Adam scales."""
    return {name: x for name, x in state.items() if "attention.key.bias" not in name}


def normalized(proto: onnx.ModelProto) -> ir.Model:
    model = graphopt.load(proto)
    passes.Normalize()(model)
    return model
