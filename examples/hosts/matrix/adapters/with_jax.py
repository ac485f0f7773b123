"""JAX, by the importer jaxonnxruntime."""

import jax
import onnx
from jaxonnxruntime import call_onnx, config

jax.config.update("jax_enable_x64", True)
config.update("jaxort_only_allow_initializers_as_static_args", False)


def open_graph(path, feeds):
    model = onnx.load(path)
    names = [y.name for y in model.graph.output]
    call, parameters = call_onnx.call_onnx_model(model, feeds)
    return lambda inputs: dict(zip(names, call(parameters, inputs), strict=True))
