"""TVM's Relax, compiled with LLVM."""

import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx


def open_graph(path, feeds):
    model = onnx.load(path)
    names = [x.name for x in model.graph.input]
    shapes = {name: list(array.shape) for name, array in feeds.items()}
    types = {name: str(array.dtype) for name, array in feeds.items()}
    module = from_onnx(model, shape_dict=shapes, dtype_dict=types, sanitize_input_names=False)
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())

    def run(inputs):
        found = machine["main"](*(tvm.runtime.tensor(inputs[name]) for name in names))
        found = found if isinstance(found, tvm.ir.Array | tuple | list) else [found]
        return {y.name: value.numpy() for y, value in zip(model.graph.output, found, strict=True)}

    return run
