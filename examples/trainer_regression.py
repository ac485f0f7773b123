"""Train a neural network of scikit-learn by graphopt.Trainer, from its initial weights in ONNX.

The program uses SGD with Nesterov momentum, an elastic penalty and a validation every fifth epoch. It compares the
network with the same one trained by scikit-learn, on synthetic and on real data.

Run it: python examples/trainer_regression.py
"""

from __future__ import annotations

import warnings

import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import load_diabetes, make_regression
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import scale

import graphopt
import passes

DATA = {
    "synthetic": lambda: make_regression(1000, 10, bias=2, noise=5, random_state=0),
    "diabetes": lambda: load_diabetes(return_X_y=True),
}


def train(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the R2 on held-out data of the untrained network, graphopt's and scikit-learn's."""
    x_train, x_test, y_train, y_test = train_test_split(scale(x), scale(y), random_state=0)
    network = MLPRegressor(
        hidden_layer_sizes=(10,), solver="sgd", batch_size=15, learning_rate_init=5e-3, random_state=0
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        start = to_onnx(network.set_params(max_iter=1).fit(x_train, y_train), x_train[:1].astype(np.float32))
        expected = network.set_params(max_iter=50).fit(x_train, y_train).score(x_test, y_test)
    trainer = graphopt.Trainer(
        start,
        optimizer=passes.SGD(learning_rate=5e-3, momentum=0.9, nesterov=True),
        regularizer=passes.ElasticPenalty(l1=1e-5, l2=1e-5, parameters="coefficient*"),
        max_iter=50,
        batch_size=15,
        validation_every=5,
    )
    before = trainer.score(x_test, y_test)
    trainer.fit(x_train, y_train, X_val=x_test, y_val=y_test)
    print("  training losses  ", " ".join(f"{loss:.3f}" for loss in trainer.train_losses_[::5]))
    print("  validation losses", " ".join(f"{loss:.3f}" for loss in trainer.validation_losses_))
    return {"before": before, "after": trainer.score(x_test, y_test), "scikit-learn": float(expected)}


def main() -> dict[str, dict[str, float]]:
    results = {}
    for name, load in DATA.items():
        print(name)
        results[name] = train(*load())
        print("  R2", ", ".join(f"{who}: {r2:.3f}" for who, r2 in results[name].items()))
    return results


if __name__ == "__main__":
    main()
