"""Export training graphs to other languages. Imports `runtime` and `graph`, and `passes` inside functions."""
