"""Continue to train scikit-learn's MLPClassifier and MLPRegressor from the ONNX models that skl2onnx writes.

Run it: python examples/scikit_learn_mlp.py
"""

from __future__ import annotations

import warnings

import numpy as np
from onnx.reference import ReferenceEvaluator
from skl2onnx import to_onnx
from sklearn.datasets import load_diabetes, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import scale

import graphopt
import passes


def classifier() -> tuple[float, float]:
    """Return the accuracy on held-out data before and after training."""
    x, y = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split((x / 16).astype(np.float32), y, random_state=0)
    fitted = MLPClassifier((32,), max_iter=5, random_state=0).fit(x_train, y_train)
    model = to_onnx(fitted, x_train[:1], options={id(fitted): {"zipmap": False}})

    step = graphopt.compile(
        model, loss=passes.CrossEntropy(from_logits=False), optimizer=passes.AdamW(learning_rate=3e-3)
    )
    executor = graphopt.Executor(step)
    random = np.random.default_rng(0)
    for _ in range(20):
        for rows in np.array_split(random.permutation(len(x_train)), 20):
            executor.step(X=x_train[rows], target=y_train[rows])

    def accuracy(candidate: object) -> float:
        labels = ReferenceEvaluator(candidate).run(["label"], {"X": x_test})[0]
        return float(np.mean(labels == y_test))

    return accuracy(model), accuracy(executor.trained())


def regressor() -> tuple[float, float]:
    """Return the R2 on held-out data before and after training."""
    x, y = load_diabetes(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(scale(x).astype(np.float32), scale(y), random_state=0)
    fitted = MLPRegressor(hidden_layer_sizes=(16,), max_iter=10, random_state=0).fit(x_train, y_train)
    model = to_onnx(fitted, x_train[:1])

    step = graphopt.compile(
        model,
        loss=passes.MeanSquaredError(),
        regularizer=passes.L2(1e-3, parameters="coefficient*"),
        optimizer=passes.SGD(learning_rate=0.02, momentum=0.9, nesterov=True),
    )
    executor = graphopt.Executor(step)
    target = y_train.astype(np.float32)[:, None]
    for _ in range(60):
        executor.step(X=x_train, target=target)

    def r2(candidate: object) -> float:
        prediction = ReferenceEvaluator(candidate).run(None, {"X": x_test})[0][:, 0]
        return float(1 - np.sum((prediction - y_test) ** 2) / np.sum((y_test - y_test.mean()) ** 2))

    return r2(model), r2(executor.trained())


def main() -> dict[str, tuple[float, float]]:
    warnings.simplefilter("ignore", ConvergenceWarning)  # scikit-learn stops early on purpose
    results = {"accuracy": classifier(), "R2": regressor()}
    for name, (before, after) in results.items():
        print(f"{name} on held-out data: {before:.3f} after scikit-learn, {after:.3f} after graphopt")
    return results


if __name__ == "__main__":
    main()
