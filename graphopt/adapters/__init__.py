"""Read and write adapters in the formats of other libraries."""
