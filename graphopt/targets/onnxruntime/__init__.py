"""Lower a training graph for ONNX Runtime's CPU kernels: fewer and faster operators, small vectors joined."""
