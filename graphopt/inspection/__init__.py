"""Show how a pipeline changes a model: reports, pictures, operators without a CUDA kernel. Imports `compiler`."""
