"""Define training graphs; read and rewrite models. This package imports `errors`, `files` and `intervals` only."""
