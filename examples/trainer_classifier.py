"""Train scikit-learn's logistic regression, with log loss and L2, by gradient descent from its ONNX model.

scikit-learn's GridSearchCV searches the options, because graphopt.Trainer is an estimator.

Run it: python examples/trainer_classifier.py
"""

from __future__ import annotations

import warnings

import numpy as np
from skl2onnx import to_onnx
from sklearn.datasets import load_breast_cancer, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.preprocessing import scale

import graphopt
import passes

DATA = {
    "synthetic": lambda: make_classification(600, 10, n_informative=5, random_state=0),
    "breast cancer": lambda: load_breast_cancer(return_X_y=True),
}


def train(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the accuracy on held-out data of the untrained model, graphopt's and scikit-learn's."""
    x_train, x_test, y_train, y_test = train_test_split(scale(x), y, random_state=0)
    model = LogisticRegression(C=1.0, max_iter=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        start = to_onnx(model.fit(x_train, y_train), x_train[:1].astype(np.float32))
    expected = LogisticRegression(C=1.0, max_iter=1000).fit(x_train, y_train).score(x_test, y_test)
    trainer = graphopt.Trainer(
        start,
        loss=passes.CrossEntropy(from_logits=False),
        regularizer=passes.L2(0.5 / len(x_train), parameters="*coef*"),  # scikit-learn's penalty, 1 / 2C of the sum
        optimizer=passes.SGD(learning_rate=0.1),
        schedule="invscaling",
        max_iter=30,
    )
    before = trainer.score(x_test, y_test)
    search = GridSearchCV(trainer, {"optimizer__learning_rate": [0.01, 0.1]}, cv=3).fit(x_train, y_train)
    print("  best options", search.best_params_, f"of accuracy {search.best_score_:.3f}")
    best = search.best_estimator_
    hardest = np.argsort(best.losses(x_test, y_test))[-3:]
    print("  rows of the largest loss", hardest, "losses", best.losses(x_test, y_test)[hardest].round(2))
    return {"before": before, "after": best.score(x_test, y_test), "scikit-learn": float(expected)}


def main() -> dict[str, dict[str, float]]:
    results = {}
    for name, load in DATA.items():
        print(name)
        results[name] = train(*load())
        print("  accuracy", ", ".join(f"{who}: {value:.3f}" for who, value in results[name].items()))
    return results


if __name__ == "__main__":
    main()
