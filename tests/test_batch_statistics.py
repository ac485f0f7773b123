"""Workers that compute batch statistics together train as one process does. The workers are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from builders import model
from workers import FLAT, NORMALIZED

import graphopt
import passes
from graphopt.communicator import Communicator
from graphopt.errors import GraphoptError

RNG = np.random.default_rng(0)
IMAGES = (RNG.standard_normal((24, 2, 6, 6)) + np.arange(24).reshape(24, 1, 1, 1) / 8).astype(np.float32)
LABELS = RNG.integers(0, 3, 24)


class Threads(Communicator):
    """One of several workers that are threads."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, given: list[Any]) -> None:
        self.rank, self.size, self._meeting, self._given = rank, size, meeting, given

    def gather(self, content: Any) -> list[Any]:
        self._meeting.wait()
        self._given[self.rank] = content
        self._meeting.wait()
        return list(self._given)

    def sum(self, array: np.ndarray) -> None:
        array[...] = np.sum(self.gather(array.copy()), axis=0, dtype=array.dtype)


def together(count: int, work: Callable[[Communicator], Any]) -> list[Any]:
    """Return what each of several workers returns."""
    meeting, given = threading.Barrier(count, timeout=60), [None] * count
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda rank: work(Threads(rank, count, meeting, given)), range(count)))


def batches(data: dict[str, np.ndarray], size: int) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(data["target"]), size):
        yield {name: array[start : start + size] for name, array in data.items()}


def largest_difference(
    halves: graphopt.StepHalves, data: dict[str, np.ndarray], shares: list[int], **options: Any
) -> float:
    """Return the largest difference of losses, outputs and states between one process and workers.

    Losses above 1 are compared relative to their size.

    Args:
        shares: the number of rows of each worker in a batch.
    """
    ends = np.cumsum([0, *shares])

    def work(communicator: Communicator) -> tuple[list[Any], dict[str, np.ndarray]]:
        worker = graphopt.DataParallel(halves, communicator=communicator, threads=1, **options)
        own = slice(*ends[communicator.rank : communicator.rank + 2])
        found = [
            worker.step({name: array[own] for name, array in batch.items()})
            for _ in range(2)
            for batch in batches(data, int(ends[-1]))
        ]
        return found, worker.state

    workers = together(len(shares), work)
    alone = graphopt.Executor(halves.step, threads=1, **options)
    expected = [alone.step(batch) for _ in range(2) for batch in batches(data, int(ends[-1]))]
    found = []
    for reported, state in workers:
        pairs = [(a["loss"], b["loss"]) for a, b in zip(expected, reported, strict=True)]
        found += [abs(a - b) / max(1, a) for a, b in pairs]
        found += [np.abs(array - state[name]).max() for name, array in alone.state.items()]
    for i, step in enumerate(expected):
        parts = [reported[i]["y"] for reported, _ in workers if "y" in reported[i]]
        found.append(np.abs(step["y"] - np.concatenate(parts)).max())
    return float(max(found))


def residual() -> Any:
    """Return a network whose third normalization is beside the first two, on a shortcut."""
    rng = np.random.default_rng(1)
    numbers = {"scale": 1.0, "shift": 0.1, "mean": 0.0, "variance": 1.0}
    return model(
        """g (float[N,2,6,6] x) => (float[N,3] y) {
            c0 = Conv<pads=[1,1,1,1]>(x, k0)
            n0 = BatchNormalization(c0, scale0, shift0, mean0, variance0)
            r0 = Relu(n0)
            c1 = Conv(r0, k1)
            n1 = BatchNormalization<momentum=0.8, epsilon=0.01>(c1, scale1, shift1, mean1, variance1)
            c2 = Conv(x, k2)
            n2 = BatchNormalization(c2, scale2, shift2, mean2, variance2)
            s = Add(n1, n2)
            r1 = Relu(s)
            d = Dropout(r1, ratio)
            p = GlobalAveragePool(d)
            f = Flatten(p)
            y = Gemm(f, head)
        }""",
        k0=rng.standard_normal((4, 2, 3, 3)) / 4,
        k1=rng.standard_normal((4, 4, 3, 3)) / 6,
        k2=rng.standard_normal((4, 2, 3, 3)) / 4,
        head=rng.standard_normal((4, 3)),
        ratio=np.array(0.2),
        **{f"{name}{i}": np.full(4, number) for name, number in numbers.items() for i in range(3)},
    )


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "Bessel's correction": {"training": passes.TrainingMode(unbiased_variance=True, seed=1)},
    "recomputed": {"recompute": passes.Recompute()},
    "loss scale": {
        "gradient": passes.Gradient(loss_scale=256.0),
        "loss_scale": passes.DynamicLossScale(),
    },
    "clipped": {"clip": passes.ClipGlobalNorm(0.1), "regularizer": passes.L2(1e-3)},
    "sum": {"loss": passes.CrossEntropy(reduction="sum"), "optimizer": passes.SGD(1e-3)},
    "ignored labels": {"loss": passes.CrossEntropy(ignore_index=2)},
    "not simplified": {"simplify": None, "fuse": None},
}


def split(source: Any, **steps: Any) -> graphopt.StepHalves:
    given = {
        "loss": passes.CrossEntropy(),
        "training": passes.TrainingMode(seed=1),
        "optimizer": passes.SGD(0.1, momentum=0.9),
        **steps,
    }
    return graphopt.split_step(graphopt.standard(**given), source)


@pytest.mark.parametrize("native", [False, True], ids=["runtime", "native"])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.sample(2)
@pytest.mark.slow
def test_workers_with_unequal_rows_equal_one_process(name: str, native: bool) -> None:
    halves = split(residual(), **VARIANTS[name])
    assert len(halves.grad) == 5 + (name == "recomputed")  # segments follow each other
    data = {"x": IMAGES, "target": LABELS}
    assert largest_difference(halves, data, [5, 2, 0, 1], native=native) < 2e-6


@pytest.mark.slow
def test_workers_in_mixed_precision_nearly_equal_one_process() -> None:
    """Rounding to 16 bits is that of other sums."""
    halves = split(residual(), precision=passes.MixedPrecision())
    assert len(halves.grad) == 5
    assert largest_difference(halves, {"x": IMAGES, "target": LABELS}, [5, 3]) < 1e-3


@pytest.mark.slow
def test_workers_train_as_pytorch_does_on_the_whole_batch() -> None:
    torch = pytest.importorskip("torch")
    import torch_models

    torch.manual_seed(0)
    network = torch_models.ResNet()
    x, target = torch.randn(12, 3, 12, 12) * 2 + 1, torch.randint(0, 4, (12,))
    halves = split(torch_models.export(network, x, "dynamo"))

    def work(communicator: Communicator) -> list[Any]:
        worker = graphopt.DataParallel(halves, communicator=communicator, threads=1)
        own = slice(0, 7) if communicator.leads else slice(7, 12)
        losses = [worker.step(x=x[own].numpy(), target=target[own].numpy())["loss"] for _ in range(6)]
        return [losses, worker.state]

    losses, state = together(2, work)[0]
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    for found in losses:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x), target)
        loss.backward()
        optimizer.step()
        assert found == pytest.approx(loss.item(), rel=2e-5)
    expected = {name: array.numpy() for name, array in network.state_dict().items()}
    assert sum(".running_" in name for name in state) == 8
    for name, array in state.items():
        if name in expected:
            np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=2e-5, err_msg=name)


def normalized(x: str, **attributes: int) -> Any:
    """Return a linear layer whose input or weight is normalized by the mean and variance of the batch."""
    text = ", ".join(f"{name}={number}" for name, number in attributes.items())
    batch = f"BatchNormalization<{text}>({x}, s, b, m, v)"
    layer = f"n, m2, v2 = {batch} y = MatMul({'n, w' if x == 'x' else 'x, n'})"
    ones, zeros = np.ones(3), np.zeros(3)
    return model(f"g (float[N,3] x) => (float[N,3] y) {{ {layer} }}", w=np.eye(3), s=ones, b=zeros, m=zeros, v=ones)


def test_statistics_of_the_batch_without_running_ones_are_refused() -> None:
    steps = {"training": None}
    assert len(split(normalized("w", training_mode=1), **steps).grad) == 1
    with pytest.raises(GraphoptError, match="expected running statistics that train"):
        split(normalized("x", training_mode=1), **steps)
    assert len(split(normalized("x", training_mode=1)).grad) == 2  # x needs no gradient


def test_statistics_may_be_those_of_each_worker() -> None:
    """Then a step is the mean of the workers' own steps, as the update by plain SGD is linear."""
    pipeline = graphopt.standard(loss=passes.CrossEntropy(), training=passes.TrainingMode(), optimizer=passes.SGD(0.1))
    halves = graphopt.split_step(pipeline, NORMALIZED, statistics="local")
    assert len(halves.grad) == 1
    rows = [slice(0, 16), slice(16, 32)]

    def work(communicator: Communicator) -> dict[str, np.ndarray]:
        worker = graphopt.DataParallel(halves, communicator=communicator, threads=1)
        worker.step({name: array[rows[communicator.rank]] for name, array in FLAT.items()})
        return worker.state

    one, other = together(2, work)
    own = []
    for part in rows:
        executor = graphopt.Executor(halves.step, threads=1)
        executor.step({name: array[part] for name, array in FLAT.items()})
        own.append(executor.state)
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name])
        np.testing.assert_allclose(array, (own[0][name] + own[1][name]) / 2, atol=1e-6)


def test_unknown_statistics_are_an_error() -> None:
    with pytest.raises(GraphoptError, match="expected 'synchronized' or 'local', found 'mean'"):
        graphopt.split_step(graphopt.standard(), NORMALIZED, statistics="mean")  # type: ignore[arg-type]
