"""Compare the times and loss curves of one network trained by graphopt, scikit-learn and PyTorch.

The network has hidden layers of 50 and 10 units, and trains on make_regression(1000 x 100) by SGD with momentum in
batches of 15, in float32. All start from the same weights and read the same rows in the same order, so that the losses
agree. Times are medians of rounds in which all take turns.

Run it: python examples/benchmarks/scikit_learn.py [--threads 1] [--epochs 20] [--rounds 5]
It prints a table and writes the curves to scikit_learn.svg.

With --estimators, it compares OnnxClassifier with MLPClassifier, by wall clock and by processor time, on an idle
machine and beside a program that computes. Both train the same epochs on the same batches. Options are the defaults
except those that the table names.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from skl2onnx import to_onnx
from sklearn.base import clone
from sklearn.datasets import load_digits, make_classification, make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import scale

import graphopt
import passes

BATCH, RATE, MOMENTUM, HIDDEN = 15, 1e-3, 0.9, (50, 10)


def data() -> tuple[np.ndarray, np.ndarray]:
    x, y = make_regression(1000, 100, bias=2, random_state=0)
    return scale(x).astype(np.float32), scale(y).astype(np.float32)


def by_scikit_learn(x: np.ndarray, y: np.ndarray, epochs: int) -> tuple[MLPRegressor, Callable[[], list[float]]]:
    def network() -> MLPRegressor:
        return MLPRegressor(
            hidden_layer_sizes=HIDDEN,
            solver="sgd",
            alpha=0,
            batch_size=BATCH,
            learning_rate_init=RATE,
            momentum=MOMENTUM,
            nesterovs_momentum=False,
            shuffle=False,
            max_iter=epochs,
            tol=0,
            n_iter_no_change=epochs + 1,
            random_state=0,
        )

    def run() -> list[float]:
        fresh = network()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return [2 * loss for loss in fresh.fit(x, y).loss_curve_]  # scikit-learn's loss is half the square

    first = network()
    first.set_params(max_iter=1, learning_rate_init=1e-30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        first.fit(x, y)
    return first, run


def by_graphopt(
    first: MLPRegressor, x: np.ndarray, y: np.ndarray, epochs: int, threads: int
) -> Callable[[], list[float]]:
    trainer = graphopt.Trainer(
        to_onnx(first, x[:1]),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(learning_rate=RATE / 2, momentum=MOMENTUM),  # for the whole square
        batch_size=BATCH,
        shuffle=False,
        max_iter=epochs,
        threads=threads,
    )
    trainer.get_state()  # compiles
    return lambda: trainer.fit(x, y).train_losses_


def by_pytorch(
    first: MLPRegressor, x: np.ndarray, y: np.ndarray, epochs: int, threads: int
) -> Callable[[], list[float]]:
    import torch

    torch.set_num_threads(threads)

    def run() -> list[float]:
        sizes = (x.shape[1], *HIDDEN, 1)
        layers: list[torch.nn.Module] = []
        for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            layer = torch.nn.Linear(fan_in, fan_out)
            layer.weight.data = torch.from_numpy(first.coefs_[i].T.astype(np.float32).copy())
            layer.bias.data = torch.from_numpy(first.intercepts_[i].astype(np.float32))
            layers += [layer, torch.nn.ReLU()]
        network = torch.nn.Sequential(*layers[:-1])
        optimizer = torch.optim.SGD(network.parameters(), RATE / 2, MOMENTUM)
        inputs, targets = torch.from_numpy(x), torch.from_numpy(y)[:, None]
        curve = []
        for _ in range(epochs):
            total = 0.0
            for start in range(0, len(x), BATCH):
                batch, wanted = inputs[start : start + BATCH], targets[start : start + BATCH]
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(network(batch), wanted)
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * len(batch)
            curve.append(total / len(x))
        return curve

    return run


def picture(curves: dict[str, list[float]], path: str) -> None:
    import matplotlib.pyplot as plt

    styles = iter(("-", "--", ":"))
    figure, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for name, curve in curves.items():
        axes.semilogy(range(1, len(curve) + 1), curve, next(styles), label=name, linewidth=2)
    axes.set(xlabel="epoch", ylabel="mean squared error", title="make_regression(1000, 100)")
    axes.legend()
    figure.savefig(path)


def main(
    epochs: int = 20, rounds: int = 5, threads: int = 1, path: str | None = None
) -> dict[str, tuple[float, list[float]]]:
    """Return the median seconds and the losses of each program."""
    x, y = data()
    first, scikit_learn = by_scikit_learn(x, y, epochs)
    runs = {"graphopt": by_graphopt(first, x, y, epochs, threads), "scikit-learn": scikit_learn}
    if importlib.util.find_spec("torch"):
        runs["PyTorch"] = by_pytorch(first, x, y, epochs, threads)
    times: dict[str, list[float]] = {name: [] for name in runs}
    curves: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            curves[name] = run()
            times[name].append(time.perf_counter() - start)
    steps = epochs * -(-len(x) // BATCH)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{epochs} epochs of {len(x)} rows in batches of {BATCH}, {threads} thread(s), median of {rounds} rounds")
    print(f"{'':<14}{'seconds':>9}{'us a step':>11}{'times graphopt':>16}{'last loss':>12}")
    for name, seconds in medians.items():
        ratio = seconds / medians["graphopt"]
        print(f"{name:<14}{seconds:>9.3f}{1e6 * seconds / steps:>11.0f}{ratio:>16.2f}{curves[name][-1]:>12.5f}")
    if path:
        picture(curves, path)
        print(f"loss curves: {path}")
    return {name: (medians[name], curves[name]) for name in runs}


def fitted(estimator: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
    """Fit a clone; return the seconds of processor time and the number of epochs."""
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        epochs = clone(estimator).fit(x, y).n_iter_
    return time.process_time() - start, epochs


def folds(estimator: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, int]:
    """Fit ten folds on all processors, as cross_val_score with n_jobs=-1 does."""
    rows = [train for train, _ in StratifiedKFold(10).split(x, y)]
    parts = Parallel(n_jobs=-1)(delayed(fitted)(estimator, x[part], y[part]) for part in rows)
    return sum(seconds for seconds, _ in parts), sum(epochs for _, epochs in parts)


@contextlib.contextmanager
def beside(*, busy: bool) -> Iterator[None]:
    """Run a program that computes meanwhile, if `busy`."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def estimators(rounds: int = 5, most: int = 200) -> list[list[str]]:
    """Print, and return, the times of MLPClassifier and OnnxClassifier for at most so many epochs."""
    digits = load_digits(return_X_y=True)
    large = make_classification(20_000, 40, n_informative=20, random_state=0)
    cases: dict[str, tuple[Callable[..., tuple[float, int]], tuple[np.ndarray, np.ndarray], int]] = {
        "digits, 1,797 x 64": (fitted, digits, 200),
        "20,000 x 40, 20 epochs": (fitted, large, 20),
        "digits, 10 folds, n_jobs=-1": (folds, digits, 200),
    }
    header = ["data", "machine", "epochs"]
    header += [f"{kind}: {who}" for kind in ("wall, s", "processor, s") for who in ("MLP", "Onnx", "Onnx, float32")]
    for texts in (header, ["---"] * 3 + ["---:"] * 6):
        print(f"| {' | '.join(texts)} |")
    rows = []
    for (name, (run, (x, y), epochs)), busy in itertools.product(cases.items(), (False, True)):
        options: dict[str, Any] = {"max_iter": min(epochs, most), "random_state": 0}
        contenders = [
            MLPClassifier(**options),
            graphopt.OnnxClassifier(**options),
            graphopt.OnnxClassifier(dtype="float32", **options),
        ]
        walls: list[list[float]] = [[] for _ in contenders]
        processors: list[list[float]] = [[] for _ in contenders]
        found = [run(contender, x, y)[1] for contender in contenders]  # starts the workers, and compiles
        with beside(busy=busy):
            for _, (i, contender) in itertools.product(range(rounds), enumerate(contenders)):
                start = time.perf_counter()
                processors[i].append(run(contender, x, y)[0])
                walls[i].append(time.perf_counter() - start)
        texts = [name, "busy" if busy else "idle", str(found[0])]
        for times in (walls, processors):
            theirs, *ours = map(statistics.median, times)
            texts += [f"{theirs:.2f}", *(f"{mine:.2f} ({mine / theirs:.2f})" for mine in ours)]
        rows.append(texts)
        print(f"| {' | '.join(texts)} |", flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for option, default in (("--epochs", 20), ("--rounds", 5), ("--threads", 1)):
        parser.add_argument(option, type=int, default=default)
    parser.add_argument("--path", default="scikit_learn.svg")
    parser.add_argument("--estimators", action="store_true")
    arguments = vars(parser.parse_args())
    if arguments.pop("estimators"):
        estimators(arguments["rounds"])
    else:
        main(**arguments)
