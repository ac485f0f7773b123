"""Run the `graphopt` command, a Hydra application whose configs are recipes. Only this package imports Hydra."""

from graphopt.cli.command import INTERRUPTED, main

__all__ = ["INTERRUPTED", "main"]
