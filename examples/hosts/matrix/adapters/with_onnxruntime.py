"""ONNX Runtime's CPU provider."""

import onnxruntime


def open_graph(path, feeds, provider="CPUExecutionProvider"):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=[provider])
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"no {provider}")
    names = [output.name for output in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))
