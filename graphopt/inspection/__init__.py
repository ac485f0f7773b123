"""Show what a pipeline makes of a model: reports, pictures, operators without a CUDA kernel. Imports `compiler`."""
