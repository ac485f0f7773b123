"""Decide what every floating initializer is: what the user says, what the exporter wrote, what the graph tells."""
