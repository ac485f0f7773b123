"""Define what a training graph is, and read and rewrite one. Imports `errors`, `files` and `intervals` only."""
