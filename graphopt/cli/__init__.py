"""The `graphopt` command: a Hydra application; its configs are the recipes. No other package imports hydra."""

from graphopt.cli.command import INTERRUPTED, main

__all__ = ["INTERRUPTED", "main"]
