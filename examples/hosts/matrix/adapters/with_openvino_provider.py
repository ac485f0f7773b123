"""ONNX Runtime's OpenVINO provider."""

import with_onnxruntime


def open_graph(path, feeds):
    return with_onnxruntime.open_graph(path, feeds, "OpenVINOExecutionProvider")
