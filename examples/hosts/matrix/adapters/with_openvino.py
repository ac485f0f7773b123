"""OpenVINO, without ONNX Runtime."""

import openvino


def open_graph(path, feeds):
    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda inputs: {name: value.copy() for output, value in model(inputs).items() for name in output.names}
