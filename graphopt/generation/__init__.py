"""Continue texts by language models. This package imports `data`, `graph` and `runtime`."""
