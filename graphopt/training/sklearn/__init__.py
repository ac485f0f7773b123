"""Estimators of scikit-learn. Imports scikit-learn once one of them is asked for."""

from __future__ import annotations

from typing import Any

from graphopt.arguments import checked
from graphopt.errors import GraphoptError

ESTIMATORS = ("OnnxClassifier", "OnnxRegressor")


def estimator(name: str) -> Any:
    """Return a class of `ESTIMATORS`; without scikit-learn, a stand-in that says what to install when it is created."""
    try:
        from graphopt.training.sklearn import estimators
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "sklearn":
            raise
        return type(name, (), {"__init__": _needs_scikit_learn})
    return getattr(estimators, name)


@checked()
def from_sklearn(fitted: Any, **options: Any) -> Any:
    """Return an estimator that continues a fitted MLPClassifier or MLPRegressor, with its weights and optimizer.

    `partial_fit` continues the training. `fit` starts again, unless `warm_start` is set.

    Args:
        fitted: the estimator of scikit-learn.
        options: options to change.

    Raises:
        GraphoptError: `fitted` is another estimator.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.neural_network import MLPClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = graphopt.from_sklearn(MLPClassifier(max_iter=500, random_state=0).fit(X, y))
    >>> classifier.partial_fit(X, y).score(X, y) > 0.9
    True
    """
    kind = ESTIMATORS[type(fitted).__name__.endswith("Regressor")]
    return estimator(kind).from_sklearn(fitted, **options)


def _needs_scikit_learn(self: Any, *_: Any, **__: Any) -> None:
    raise GraphoptError(
        f"{type(self).__name__}: expected scikit-learn 1.6 or newer, found none: pip install scikit-learn"
    )
