"""Train with workers that Ray Train starts, and starts again after a failure."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.communicator import Communicator
from graphopt.distributed.launchers import Launcher, RunCommand, passing_on_signals
from graphopt.errors import GraphoptError
from graphopt.intervals import within

if TYPE_CHECKING:
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

IN_WORKER = "GRAPHOPT_RAY_RENDEZVOUS"  # an environment variable of workers: the name of their `Rendezvous`
# A folder where workers note with which code they have ended, and where they look whether they are to end.
MARK, CODE, END = "GRAPHOPT_RAY_MARK", "exit_code", "end"
_SETTINGS = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # otherwise, Ray Train hides what workers print to stderr
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # otherwise, Ray hides GPUs that it has not reserved
}
_MOST_INLINE = 65536  # bytes that travel in a call of the actor, in place of the object store


class Rendezvous:
    """Hand each worker the references of all workers to Ray's object store. This is an actor of Ray."""

    def __init__(self, size: int) -> None:
        import asyncio

        self._size = size
        self._items: dict[int, dict[int, object]] = {}  # by round and rank
        self._changed = asyncio.Condition()

    async def exchange(self, number: int, rank: int, item: list[object]) -> list[object]:
        """Return the references of all workers in a round, in the order of their ranks, once they are there."""
        async with self._changed:
            self._items.setdefault(number, {})[rank] = item[0]
            self._items.pop(number - 2, None)  # all have read it, since they have come to the round after it
            self._changed.notify_all()
            await self._changed.wait_for(lambda: len(self._items[number]) == self._size)
            return [self._items[number][other] for other in range(self._size)]


class RayCommunicator(Communicator):
    """Exchange numbers between workers of Ray Train through Ray's object store.

    Args:
        rendezvous: the name of the actor `Rendezvous`.
        timeout: the time limit of each exchange in seconds.
    """

    def __init__(self, rendezvous: str, timeout: float) -> None:
        import ray
        import ray.train

        context = ray.train.get_context()
        self.rank, self.size = context.get_world_rank(), context.get_world_size()
        self.local_rank, self.local_size = context.get_local_rank(), context.get_local_world_size()
        self._ray, self._timeout, self._round = ray, timeout, 0
        self._end = Path(os.environ[MARK]) / END
        self._rendezvous = (
            ray.remote(num_cpus=0)(Rendezvous).options(name=rendezvous, get_if_exists=True).remote(self.size)
        )

    def sum(self, array: np.ndarray) -> None:
        if self.size == 1:
            return
        wide = np.float32 if array.dtype == np.float16 else array.dtype
        first, *others = self._exchanged(array)
        total = np.array(first, wide)
        for part in others:
            total += part
        np.copyto(array, total, casting="same_kind")

    def gather(self, content: bytes) -> list[bytes]:
        return [bytes(part) for part in self._exchanged(content)]

    def asked_to_end(self) -> bool:
        return self.leads and self._end.exists()

    def abort(self, code: int) -> None:
        (Path(os.environ[MARK]) / CODE).write_text(str(code))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _exchanged(self, value: np.ndarray | bytes) -> list[Any]:
        """Return the values that the workers give; arrays are read from Ray's shared memory."""
        is_small = len(value) * getattr(value, "itemsize", 1) <= _MOST_INLINE
        item = value if is_small else self._ray.put(value)
        get = functools.partial(self._ray.get, timeout=self._timeout)
        try:
            values = get(self._rendezvous.exchange.remote(self._round, self.rank, [item]))
            items = [get(x) if isinstance(x, self._ray.ObjectRef) else x for x in values]
        except self._ray.exceptions.GetTimeoutError as error:
            raise GraphoptError(
                f"worker {self.rank} of {self.size}: expected an answer of all workers within {self._timeout:g} s, "
                f"found none"
            ) from error
        self._round += 1
        return items


@dataclass(frozen=True)
class RayLauncher(Launcher):
    """Train with workers of Ray Train, on this machine or on a running cluster.

    Ray starts all workers again after a failure, and they continue from the last checkpoint in the run's folder, which
    all machines must see.

    Args:
        workers: the number of workers, each of which has a core.
        restarts: how often Ray starts the workers again.
        address: the address of a running cluster, such as `auto`; None to start Ray on this machine.
        timeout: the seconds after which a worker ends if another one does not answer.
    """

    workers: int = within("[1, inf)", 2, whole=True)
    restarts: int = within("[0, inf)", 3, whole=True)
    address: str | None = None
    timeout: float = within("(0, inf)", 300.0)

    def starts(self) -> bool:
        return IN_WORKER not in os.environ

    def start(self, arguments: Sequence[str], folder: Path, run: RunCommand) -> None:
        ray_trainer()  # raises an error if Ray is missing
        place = folder.absolute()
        named = str(place).replace("'", "\\'")
        mark = place / ".ray" / uuid.uuid4().hex
        config = {
            "run": run,
            "arguments": [*arguments, f"folder='{named}'"],
            "directory": os.getcwd(),
            "path": sys.path,
            "mark": str(mark),
        }

        def end(_: int) -> None:
            mark.mkdir(parents=True, exist_ok=True)
            (mark / END).touch()

        try:
            with (
                self._started(),
                passing_on_signals(end, lambda number: sys.exit(128 + number)) as received,
                ThreadPoolExecutor(1) as thread,
            ):
                # In the main thread, Ray would handle SIGINT.
                thread.submit(self._train, config, mark.parent).result()
        except Exception as error:
            lines = str(error).splitlines()
            raise GraphoptError(
                f"launcher=ray: {lines[0] if lines else type(error).__name__}; resume=true continues from the last "
                f"checkpoint"
            ) from error
        raise SystemExit(128 + received[0] if received else _code(mark))

    def communicator(self) -> Communicator:
        return RayCommunicator(os.environ[IN_WORKER], self.timeout)

    def _train(self, config: Mapping[str, object], folder: Path) -> None:
        """Run `_work` in each worker."""
        from ray.train import FailureConfig, RunConfig, ScalingConfig

        failures = FailureConfig(max_failures=self.restarts)
        ray_trainer()(
            _work,
            train_loop_config=config,
            scaling_config=ScalingConfig(num_workers=self.workers),
            run_config=RunConfig(name="ray", storage_path=str(folder), failure_config=failures),
        ).fit()

    @contextmanager
    def _started(self) -> Iterator[None]:
        """Start Ray, or join a running cluster, in a `with` block."""
        import ray

        os.environ |= {**_SETTINGS, **os.environ}
        options: dict[str, object] = {"logging_config": ray.LoggingConfig(log_level="ERROR")}
        if self.address is None:
            options |= {"num_cpus": max(self.workers, os.cpu_count() or 1), "include_dashboard": False}
        here = os.getcwd()
        # Workers first search Ray's working directory for modules.
        with tempfile.TemporaryDirectory() as empty:
            os.chdir(empty)
            try:
                ray.init(self.address or "local", **options)
            finally:
                os.chdir(here)
            try:
                yield
            finally:
                ray.shutdown()


def ray_trainer() -> type[DataParallelTrainer]:
    """Return the trainer of Ray Train that runs a function in each worker; the public ones bring a framework.

    Raises:
        GraphoptError: Ray Train is not installed.
    """
    try:
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    except ImportError as error:
        raise GraphoptError(
            f"launcher=ray: expected Ray Train, found none ({error}): pip install graphopt[ray]"
        ) from error
    return DataParallelTrainer


def _work(config: dict[str, Any]) -> None:
    """Run the command in a worker; Ray calls this again if a worker is lost, but not after an error of the run."""
    from ray.train.collective import broadcast_from_rank_zero

    mark = Path(config["mark"])
    rendezvous, code, again = broadcast_from_rank_zero((uuid.uuid4().hex, _code(mark), mark.exists()))
    if code:
        return
    mark.mkdir(parents=True, exist_ok=True)
    os.environ |= {IN_WORKER: rendezvous, MARK: str(mark), "TTY_COMPATIBLE": "0"}
    os.chdir(config["directory"])
    sys.path += [path for path in config["path"] if path not in sys.path]
    if code := config["run"]([*config["arguments"], *(["resume=true"] if again else [])]):
        (mark / CODE).write_text(str(code))


def _code(mark: Path) -> int:
    """Return the exit code with which a worker has ended, or 0."""
    ended = mark / CODE
    return int(ended.read_text()) if ended.is_file() else 0
