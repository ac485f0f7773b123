"""Write and read the files from which onnxruntime-training trains on devices. Imports `compiler` and `passes`."""
