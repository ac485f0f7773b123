"""Lower a training graph to what runs it: ONNX Runtime's kernels, compiled ones, other runtimes. Imports `graph`."""
