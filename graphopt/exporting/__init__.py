"""Export PyTorch modules with what no ONNX file records. Imports `runtime` and `graph`."""
