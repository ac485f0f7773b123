"""Train digits 0 to 4, then 5 to 9, and show what is forgotten: plainly, and by what holds the earlier digits.

python examples/benchmarks/forgetting.py prints accuracies on held-out digits of the first half and of the second, as
means over seeds. The strength of each penalty is the best of those tried, by the mean of both accuracies on rows that
neither train nor test. Where avalanche-lib is installed, it learns the same rows from the same first network, with an
order of batches of its own.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

import graphopt
import passes
from graphopt import data, models

SEEDS = 3
EWC = (1e1, 1e2, 1e3, 1e4)
L2 = (1e-2, 1e-1, 1e0, 1e1)
LWF = (0.1, 0.2, 0.35, 0.5, 0.8, 0.95)
REPLAY = (0.1, 0.5)
AVALANCHE_EWC = (1e0, 1e1, 1e2, 1e3, 1e4, 1e5)
AVALANCHE_LWF = (1e0, 1e1, 1e2, 1e3, 1e4, 1e5)


def accuracy(network: Any, rows: dict[str, np.ndarray], digits: range) -> float:
    """Return the share of right predictions among some digits."""
    own = np.isin(rows["target"], digits)
    found = graphopt.run(network, {"x": rows["x"][own]})["y"].argmax(1)
    return float((found == rows["target"][own]).mean())


def train(network: Any, rows: data.Dataset | dict[str, np.ndarray], seed: int, **steps: Any) -> Any:
    """Return the network after ten epochs."""
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.Adam(1e-3), **steps}
    executor = graphopt.Executor(graphopt.compile(network, **steps), native=False)
    graphopt.fit(executor, rows, epochs=10, batch_size=32, seed=seed, validation=None, verbose=False)
    return executor.trained()


def compare(seed: int) -> dict[str, list[tuple[float, float, float]]]:
    """Return, by method and for each strength, the criterion, and accuracies on the first and the second half."""
    digits = data.digits().arrays
    drawn = np.random.default_rng(seed).permutation(len(digits["x"]))
    parts = drawn[:1000], drawn[1000:1300], drawn[1300:]
    rows, chosen_by, test = ({name: x[part] for name, x in digits.items()} for part in parts)
    halves = range(5), range(5, 10)
    first, second = ({name: x[np.isin(rows["target"], half)] for name, x in rows.items()} for half in halves)
    start = models.mlp((1, 8, 8), 10, hidden=[64], seed=seed)
    before = train(start, first, seed)
    loss = passes.CrossEntropy()
    information = graphopt.fisher(before, first, loss)
    equal = {name: np.ones_like(x) for name, x in information.items()}
    found: dict[str, list[tuple[float, float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        graphopt.save(before, teacher := Path(folder) / "before.onnx")
        runs: list[tuple[str, Any, dict[str, Any]]] = [("plain", second, {})]
        runs += [("EWC", second, {"regularizer": passes.ElasticWeights(information, s)}) for s in EWC]
        runs += [("L2 to the start", second, {"regularizer": passes.ElasticWeights(equal, s)}) for s in L2]
        runs += [("distillation", second, {"loss": passes.Distillation(teacher, alpha=a)}) for a in LWF]
        for share in REPLAY:
            both = data.replay(data.Dataset(second), data.Dataset(first), share=share, seed=seed)
            runs.append((f"replay, {share:g} earlier rows for each", both, {}))
        for name, learnt, steps in runs:
            after = train(before, learnt, seed, **steps)
            criterion = np.mean([accuracy(after, chosen_by, half) for half in halves])
            old, new = (accuracy(after, test, half) for half in halves)
            found.setdefault(name, []).append((float(criterion), old, new))
    if importlib.util.find_spec("avalanche"):
        for name, after in avalanche(start, first, second, seed):
            criterion = np.mean([accuracy(after, chosen_by, half) for half in halves])
            old, new = (accuracy(after, test, half) for half in halves)
            found.setdefault(name, []).append((float(criterion), old, new))
    return found


def avalanche(
    start: Any, first: dict[str, np.ndarray], second: dict[str, np.ndarray], seed: int
) -> Iterator[tuple[str, Any]]:
    """Yield names of avalanche's methods, and the network that each makes of one that has not trained."""
    import torch
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.training import plugins
    from avalanche.training.supervised import Naive

    tensors = [tuple(torch.from_numpy(rows[name]) for name in ("x", "target")) for rows in (first, second)]
    stream = tensors_benchmark(tensors, tensors, task_labels=[0, 0]).train_stream
    runs: list[tuple[str, Any]] = [("naive", None)]
    runs += [("EWC", plugins.EWCPlugin(strength)) for strength in AVALANCHE_EWC]
    runs += [("LwF", plugins.LwFPlugin(strength, temperature=2)) for strength in AVALANCHE_LWF]
    for share in REPLAY:
        memory = plugins.ReplayPlugin(round(share * len(second["x"])))  # as many in a batch as new ones
        runs.append((f"replay, {share:g} earlier rows for each", memory))
    for name, plugin in runs:
        torch.manual_seed(seed)
        network, after = (
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU()),
            start.clone(),
        )
        network.append(torch.nn.Linear(64, 10))
        state = {key.removeprefix("layers."): x.const_value.numpy() for key, x in start.graph.initializers.items()}
        network.load_state_dict({key: torch.from_numpy(x.T.copy()) for key, x in state.items()})
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        used = {"plugins": [plugin] if plugin else [], "evaluator": None}
        strategy = Naive(model=network, optimizer=optimizer, train_mb_size=32, train_epochs=10, **used)
        for experience in stream:
            optimizer.state.clear()
            strategy.train(experience)
        for key, x in network.state_dict().items():
            after.graph.initializers[f"layers.{key}"].const_value = ir.tensor(x.numpy().T.copy())
        yield f"avalanche: {name}", after


def main() -> None:
    """Print a line for each method."""
    seeds = [compare(seed) for seed in range(SEEDS)]
    print(f"{'':36} 0 to 4  5 to 9   mean")
    for name in seeds[0]:
        numbers = np.array([found[name] for found in seeds])  # [seeds, strengths, 3]
        best = numbers.mean(0)[:, 0].argmax()
        old, new = numbers[:, best, 1:].mean(0)
        print(f"{name:36} {old:6.3f}  {new:6.3f} {(old + new) / 2:6.3f}   (of {numbers.shape[1]}: number {best + 1})")


if __name__ == "__main__":
    main()
