"""Estimators of scikit-learn. Imports scikit-learn once one of them is asked for."""

from __future__ import annotations

from typing import Any

import onnx

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
def from_sklearn(fitted: object, **options: Any) -> Any:
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


@checked()
def to_onnx(fitted: object, X: object, dtype: str = "float32", **options: Any) -> onnx.ModelProto:
    """Return a fitted Pipeline, search or estimator of scikit-learn as one model, with the graphopt network in it.

    skl2onnx converts the steps before the network. An array is one input `X`, and a table has an input for each column;
    any number of rows can be fed. A classifier has the outputs `label` and `probabilities`, a regressor has `variable`.

    Args:
        fitted: the estimator.
        X: a few rows, whose columns and types the inputs have.
        dtype: the type of floating-point numbers: `float32` or `float64`.
        options: further arguments of `skl2onnx.to_onnx`, such as `target_opset`, or `options` for maps of
            probabilities: `options={"zipmap": True}`.

    Raises:
        GraphoptError: skl2onnx is not installed, or a type is unknown.

    >>> from sklearn.datasets import load_iris
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = load_iris(return_X_y=True)
    >>> pipeline = make_pipeline(StandardScaler(), graphopt.OnnxClassifier(random_state=0)).fit(X, y)
    >>> model = graphopt.to_onnx(pipeline, X)
    >>> [output.name for output in model.graph.output]
    ['label', 'probabilities']
    """
    return _conversion().converted(fitted, X, dtype, options)


def register_skl2onnx() -> None:
    """Register the converters of OnnxClassifier, OnnxRegressor and Trainer, also in a Pipeline, for `skl2onnx.to_onnx`.

    `graphopt.to_onnx` calls this. Call it yourself if you call skl2onnx.

    Raises:
        GraphoptError: skl2onnx is not installed.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> classifier = graphopt.OnnxClassifier(random_state=0).fit(X, y)
    >>> graphopt.register_skl2onnx()
    >>> import skl2onnx
    >>> model = skl2onnx.to_onnx(classifier, X[:1], options={"zipmap": False})
    >>> [x.name for x in (*model.graph.input, *model.graph.output)]
    ['X', 'label', 'probabilities']
    """
    _conversion().register_converters()


def _conversion() -> Any:
    """Return the module that imports skl2onnx."""
    try:
        from graphopt.training.sklearn import conversion
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("skl2onnx", "sklearn"):
            raise
        raise GraphoptError(
            f"to_onnx: expected skl2onnx and scikit-learn, found no {package}: pip install skl2onnx"
        ) from error
    return conversion


def _needs_scikit_learn(self: object, *_: object, **__: object) -> None:
    raise GraphoptError(
        f"{type(self).__name__}: expected scikit-learn 1.6 or newer, found none: pip install scikit-learn"
    )
