"""Run training graphs on ONNX Runtime: devices, sessions, buffers of state and the executor. Imports `graph`."""
