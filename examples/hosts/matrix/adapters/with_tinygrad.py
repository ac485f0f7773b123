"""tinygrad's importer; its CPU device needs clang."""

from tinygrad import Tensor
from tinygrad.nn.onnx import OnnxRunner


def open_graph(path, feeds):
    runner = OnnxRunner(path)
    return lambda inputs: {
        name: value.numpy() for name, value in runner({name: Tensor(array) for name, array in inputs.items()}).items()
    }
