"""Write and read the files that onnxruntime-training trains with on devices. Imports `compiler` and `passes`."""
