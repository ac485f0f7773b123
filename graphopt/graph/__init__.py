"""What a training graph is, and the tools that read and rewrite one. Imports `errors`, `files` and `intervals` only."""
