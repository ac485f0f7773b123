"""Run a model as a layer of a larger program: forward and backward. Imports `compiler` and `runtime`."""
