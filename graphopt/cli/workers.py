"""Run a recipe as one of several workers."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphopt.cli.recipe import Recipe
from graphopt.communicator import Communicator
from graphopt.runtime.executor import NonFiniteLoss
from graphopt.training.fit import fit

NOT_FINITE = 3  # the exit code after a loss or a state that is not finite
PATIENCE = 2.0  # seconds that other workers wait before they report an error, as the first worker may do, too


def leave_to_first(recipe: Recipe, folder: Path) -> None:
    """Write no log, and remove the folder that Hydra has made: the first worker has the run's folder."""
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, logging.FileHandler):
            logging.getLogger().removeHandler(handler)
    if not recipe.names_folder:
        with suppress(OSError):
            folder.rmdir()


def follow(recipe: Recipe, communicator: Communicator, folder: Path) -> None:
    """Train as a worker that leads no run: it prints and writes nothing."""
    leave_to_first(recipe, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first worker has the same
        _, parts = recipe.training_step()
        executor = recipe.worker(parts, communicator)
        fit(executor, recipe.data, **recipe.fit, callbacks=recipe.callbacks(folder))


@contextmanager
def together(communicator: Communicator, complain: Callable[[BaseException], int]) -> Iterator[None]:
    """End all workers if one of them fails in a `with` block.

    Args:
        complain: prints an error and returns the exit code.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, NonFiniteLoss) as error:  # all workers end so, after the same step
        communicator.gather(b"")
        if isinstance(error, NonFiniteLoss) and not communicator.leads:
            raise SystemExit(NOT_FINITE) from error
        raise
    except Exception as error:
        if communicator.size == 1:
            raise
        if not communicator.leads:
            time.sleep(PATIENCE)
            print(f"graphopt: worker {communicator.rank} of {communicator.size}:", end=" ", file=sys.stderr)
        communicator.abort(complain(error))
