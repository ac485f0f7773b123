"""Decide what each floating-point initializer is from the user's options, the exporter's records and the graph."""
