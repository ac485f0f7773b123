"""Print the table of a sweep when it ends."""

from __future__ import annotations

from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console

from graphopt.cli.run_folder import sweep_table

PLAIN_WIDTH = 10_000  # wide enough that no column is cut in a file or a pipe


class SweepTable(Callback):
    """Print a table of a sweep's runs. graphopt.yaml registers this class as a callback of Hydra."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        console = Console()
        if not console.is_terminal:
            console = Console(width=PLAIN_WIDTH)
        console.print(sweep_table(config.hydra.sweep.dir))
