"""The `graphopt` command: a Hydra application; its configs are the recipes. Imports everything, and Hydra, alone."""

from graphopt.cli.command import INTERRUPTED, main

__all__ = ["INTERRUPTED", "main"]
