"""Convert estimators that wrap another one for skl2onnx: calibrated classifiers, and regressors of transformed targets.

skl2onnx converts the estimator inside, also a Pipeline of a table's columns. It has no converter of
TransformedTargetRegressor, and its converter of CalibratedClassifierCV takes one input only, and the nearest threshold
of an isotonic regression in place of the line between two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import skl2onnx
from skl2onnx._parse import _parse_sklearn
from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType, Int64TensorType, StringTensorType
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.pipeline import Pipeline

from graphopt.errors import GraphoptError, some

if TYPE_CHECKING:
    from skl2onnx.common._container import ModelComponentContainer
    from skl2onnx.common._topology import Operator, Scope, Variable

_LEAST_PROBABILITY = 1e-12  # that scikit-learn adds before it takes a logarithm (_convert_to_logits)
# The operators that compute functions of NumPy, which FunctionTransformer may have.
_FUNCTIONS: dict[Any, tuple[str, ...]] = {
    np.exp: ("Exp",),
    np.log: ("Log",),
    np.sqrt: ("Sqrt",),
    np.square: ("Square",),
    np.expm1: ("Exp", "Decrement"),
    np.log1p: ("Increment", "Log"),
    np.negative: ("Neg",),
    np.reciprocal: ("Reciprocal",),
    np.sinh: ("Sinh",),
    np.arcsinh: ("Asinh",),
    np.tanh: ("Tanh",),
    np.arctanh: ("Atanh",),
}


@dataclass(frozen=True)
class _Nodes:
    """Add nodes in float64 to the graph of a conversion."""

    scope: Scope
    container: ModelComponentContainer

    def add(self, op_type: str, *inputs: str | np.ndarray, output: str | None = None, **fields: object) -> str:
        """Add a node, whose inputs are names or numbers, and return the name of its output."""
        output = output or self.scope.get_unique_variable_name(op_type.lower())
        names = [x if isinstance(x, str) else self.constant(x) for x in inputs]
        name = self.scope.get_unique_operator_name(op_type)
        self.container.add_node(op_type, names, [output], name=name, **fields)
        return output

    def constant(self, numbers: np.ndarray) -> str:
        """Add numbers or texts, and return their name."""
        name = self.scope.get_unique_variable_name("constant")
        kinds = {"i": onnx.TensorProto.INT64, "O": onnx.TensorProto.STRING}
        kind = kinds.get(numbers.dtype.kind, onnx.TensorProto.DOUBLE)
        values = [str(x).encode() if kind == onnx.TensorProto.STRING else x.item() for x in numbers.reshape(-1)]
        self.container.add_initializer(name, kind, list(numbers.shape), values)
        return name


def register_wrappers() -> None:
    """Register the converters of estimators that wrap another one."""
    of_classifiers = {
        "zipmap": [True, False, "columns"],
        "nocl": [True, False],
        "output_class_labels": [False, True],
        "raw_scores": [True, False],
    }
    skl2onnx.update_registered_converter(
        CalibratedClassifierCV,
        "GraphoptCalibratedClassifierCV",
        _set_classifier_types,
        _convert_calibrated,
        options=of_classifiers,
    )
    skl2onnx.update_registered_converter(
        TransformedTargetRegressor,
        "GraphoptTransformedTargetRegressor",
        _set_regressor_types,
        _convert_transformed,
    )


def _numbers(operator: Operator) -> type[FloatTensorType | DoubleTensorType]:
    wide = any(isinstance(x.type, DoubleTensorType) for x in operator.inputs)
    return DoubleTensorType if wide else FloatTensorType


def _set_classifier_types(operator: Operator) -> None:
    classes, rows = operator.raw_operator.classes_, operator.inputs[0].get_first_dimension()
    labels = StringTensorType if classes.dtype.kind in "OUS" else Int64TensorType
    operator.outputs[0].set_type(labels([rows]))
    operator.outputs[1].set_type(_numbers(operator)([rows, len(classes)]))


def _set_regressor_types(operator: Operator) -> None:
    model = operator.raw_operator
    columns = 1 if model._training_dim == 1 else getattr(model.transformer_, "n_features_in_", None)
    operator.outputs[0].set_type(_numbers(operator)([operator.inputs[0].get_first_dimension(), columns]))


def _inner(
    scope: Scope, container: ModelComponentContainer, model: Any, inputs: list[Variable], **options: object
) -> list[Variable]:
    """Convert the estimator inside, which may be frozen; return its outputs."""
    model = _thawed(model)
    for part in (model, *(model.steps[-1][1:] if isinstance(model, Pipeline) else ())):
        scope.add_options(id(part), options=dict(options))
        container.add_options(id(part), options=dict(options))
    return list(_parse_sklearn(scope, model, inputs, custom_parsers=None))


def _thawed(estimator: Any) -> Any:
    return estimator.estimator if type(estimator).__name__ == "FrozenEstimator" else estimator


def _convert_calibrated(scope: Scope, operator: Operator, container: ModelComponentContainer) -> None:
    """Average the calibrated probabilities of all folds, as `CalibratedClassifierCV.predict_proba` does."""
    model, nodes = operator.raw_operator, _Nodes(scope, container)
    if scope.get_options(model, {"nocl": False})["nocl"]:
        raise GraphoptError("nocl: expected labels of CalibratedClassifierCV, found nocl=True: leave it out")
    folds = [_calibrated(scope, container, nodes, fold, operator.inputs) for fold in model.calibrated_classifiers_]
    mean = nodes.add("Div", nodes.add("Sum", *folds), np.array(float(len(folds))))
    labels = operator.outputs[0]
    classes = model.classes_.astype(object if isinstance(labels.type, StringTensorType) else np.int64)
    code = nodes.add("ArgMax", mean, axis=1, keepdims=0)
    nodes.add("Gather", classes, code, output=labels.full_name)
    _cast(nodes, mean, operator.outputs[1])


def _calibrated(
    scope: Scope, container: ModelComponentContainer, nodes: _Nodes, fold: Any, inputs: list[Variable]
) -> str:
    """Emit the calibrated probabilities of a fold, as `_CalibratedClassifier.predict_proba` computes them."""
    estimator = _thawed(fold.estimator)
    last = estimator.steps[-1][1] if isinstance(estimator, Pipeline) else estimator
    scores = {"raw_scores": True} if hasattr(last, "decision_function") else {}
    outputs = _inner(scope, container, estimator, inputs, zipmap=False, **scores)
    predicted = nodes.add("Cast", outputs[1].full_name, to=onnx.TensorProto.DOUBLE)
    own, classes = estimator.classes_, fold.classes
    if fold.method == "temperature":
        if not scores:
            predicted = nodes.add("Log", nodes.add("Add", predicted, np.array(_LEAST_PROBABILITY)))
        return nodes.add("Softmax", nodes.add("Mul", predicted, np.array(float(fold.calibrators[0].beta_))), axis=1)
    if len(classes) == 2:
        second = _calibration(nodes, _column(nodes, predicted, 1), fold.calibrators[0])
        return nodes.add("Concat", nodes.add("Sub", np.array(1.0), second), second, axis=1)
    columns = [_calibration(nodes, _column(nodes, predicted, i), x) for i, x in enumerate(fold.calibrators)]
    none = nodes.add("Mul", columns[0], np.array(0.0))  # of a class that the fold has not seen
    known = dict(zip(own.tolist(), columns, strict=True))
    joined = nodes.add("Concat", *(known.get(label, none) for label in classes.tolist()), axis=1)
    total = nodes.add("ReduceSum", joined, np.array([1]), keepdims=1)
    is_zero = nodes.add("Equal", total, np.array(0.0))
    shares = nodes.add("Div", joined, nodes.add("Where", is_zero, np.array(1.0), total))
    return nodes.add("Where", is_zero, np.full(len(classes), 1 / len(classes)), shares)


def _column(nodes: _Nodes, x: str, place: int) -> str:
    return nodes.add("Gather", x, np.array([place]), axis=1)


def _calibration(nodes: _Nodes, x: str, calibrator: Any) -> str:
    """Emit what a calibrator makes of scores [rows, 1]: a sigmoid, or lines between the thresholds of steps."""
    if hasattr(calibrator, "a_"):
        line = nodes.add("Add", nodes.add("Mul", x, np.array(-float(calibrator.a_))), np.array(-float(calibrator.b_)))
        return nodes.add("Sigmoid", line)
    steps, values = (
        np.asarray(numbers, np.float64) for numbers in (calibrator.X_thresholds_, calibrator.y_thresholds_)
    )
    if len(steps) == 1:
        return nodes.add("Add", nodes.add("Mul", x, np.array(0.0)), values[:1])
    slopes = np.diff(values) / np.diff(steps)
    clipped = nodes.add("Max", nodes.add("Min", x, np.array(steps[-1])), np.array(steps[0]))
    if len(steps) == 2:
        place: str | np.ndarray = np.array([[0]])
    else:
        above = nodes.add("GreaterOrEqual", clipped, steps[None, 1:-1])
        counted = nodes.add("Cast", above, to=onnx.TensorProto.INT64)
        place = nodes.add("ReduceSum", counted, np.array([1]), keepdims=1)
    begin, start, slope = (nodes.add("Gather", numbers, place) for numbers in (steps[:-1], values[:-1], slopes))
    return nodes.add("Add", start, nodes.add("Mul", nodes.add("Sub", clipped, begin), slope))


def _convert_transformed(scope: Scope, operator: Operator, container: ModelComponentContainer) -> None:
    """Emit the inverse of the transformation of the target after the regressor."""
    model, nodes = operator.raw_operator, _Nodes(scope, container)
    (y,) = _inner(scope, container, model.regressor_, operator.inputs)
    numbers = nodes.add("Cast", y.full_name, to=onnx.TensorProto.DOUBLE)
    numbers = nodes.add("Reshape", numbers, np.array([-1, operator.outputs[0].type.shape[1]]))
    _cast(nodes, _inverse(nodes, numbers, model.transformer_), operator.outputs[0])


def _cast(nodes: _Nodes, x: str, variable: Variable) -> None:
    wide = isinstance(variable.type, DoubleTensorType)
    kind = onnx.TensorProto.DOUBLE if wide else onnx.TensorProto.FLOAT
    nodes.add("Cast", x, to=kind, output=variable.full_name)


def _inverse(nodes: _Nodes, y: str, transformer: Any) -> str:
    """Emit `transformer.inverse_transform`."""
    kind = type(transformer)
    emit = _INVERSES.get(kind.__name__) if kind.__module__.startswith("sklearn.") else None
    if emit is None:
        raise GraphoptError(
            f"TransformedTargetRegressor: expected a transformer of {some([*_INVERSES])} of scikit-learn, found "
            f"{kind.__module__}.{kind.__name__}: export the regressor, to_onnx(estimator.regressor_, X), and invert "
            "outside"
        )
    return emit(nodes, y, transformer)


def _affine(factor: str, summand: str) -> Callable[[_Nodes, str, Any], str]:
    """Return the emission of y * factor + summand, for the names of a scaler's attributes, which may be None."""

    def emit(nodes: _Nodes, y: str, scaler: Any) -> str:
        scale, offset = getattr(scaler, factor, None), getattr(scaler, summand, None) if summand else None
        y = y if scale is None else nodes.add("Mul", y, np.asarray(scale, np.float64))
        return y if offset is None else nodes.add("Add", y, np.asarray(offset, np.float64))

    return emit


def _of_standard(nodes: _Nodes, y: str, scaler: Any) -> str:
    return _affine("scale_", "mean_" if scaler.with_mean else "")(nodes, y, scaler)


def _of_minmax(nodes: _Nodes, y: str, scaler: Any) -> str:
    moved = nodes.add("Sub", y, np.asarray(scaler.min_, np.float64))
    return nodes.add("Div", moved, np.asarray(scaler.scale_, np.float64))


def _of_function(nodes: _Nodes, y: str, transformer: Any) -> str:
    function = transformer.inverse_func
    if function is None:
        return y
    steps = _FUNCTIONS.get(function) if callable(function) and not transformer.inv_kw_args else None
    if steps is None:
        known = ", ".join(f"numpy.{known.__name__}" for known in _FUNCTIONS)
        name = getattr(function, "__name__", str(function))
        raise GraphoptError(
            f"TransformedTargetRegressor(inverse_func=...): expected one of {known}, found {name!r}, which no operator "
            "computes: take one of these, or a scaler as transformer"
        )
    one = np.array(1.0)
    for step in steps:
        if step == "Square":
            y = nodes.add("Mul", y, y)
        elif step in ("Increment", "Decrement"):
            y = nodes.add("Add" if step == "Increment" else "Sub", y, one)
        else:
            y = nodes.add(step, y)
    return y


def _of_pipeline(nodes: _Nodes, y: str, pipeline: Pipeline) -> str:
    for _, step in reversed(pipeline.steps):
        y = y if step in (None, "passthrough") else _inverse(nodes, y, step)
    return y


def _of_power(nodes: _Nodes, y: str, transformer: Any) -> str:
    """Emit the inverse of Yeo and Johnson's transformation, or of Box and Cox's, after that of the standardization."""
    if transformer.standardize:
        y = _inverse(nodes, y, transformer._scaler)
    lambdas = np.asarray(transformer.lambdas_, np.float64)
    columns = [_of_lambda(nodes, _column(nodes, y, i), x, transformer.method) for i, x in enumerate(lambdas)]
    return nodes.add("Concat", *columns, axis=1)


def _of_lambda(nodes: _Nodes, y: str, power: float, method: str) -> str:
    one = np.array(1.0)

    def root(x: str, exponent: float) -> str:
        """Emit (exponent x + 1)^(1 / exponent), which is exp x for an exponent of 0."""
        if abs(exponent) < np.spacing(1.0):
            return nodes.add("Exp", x)
        base = nodes.add("Add", nodes.add("Mul", x, np.array(exponent)), one)
        return nodes.add("Pow", base, np.array(1 / exponent))

    if method == "box-cox":
        return root(y, float(power))
    positive, negative = nodes.add("Max", y, np.array(0.0)), nodes.add("Min", y, np.array(0.0))
    above = nodes.add("Sub", root(positive, float(power)), one)
    below = nodes.add("Sub", one, root(nodes.add("Neg", negative), 2 - float(power)))
    return nodes.add("Where", nodes.add("GreaterOrEqual", y, np.array(0.0)), above, below)


_INVERSES: dict[str, Callable[[_Nodes, str, Any], str]] = {
    "StandardScaler": _of_standard,
    "RobustScaler": _affine("scale_", "center_"),
    "MaxAbsScaler": _affine("scale_", ""),
    "MinMaxScaler": _of_minmax,
    "PowerTransformer": _of_power,
    "FunctionTransformer": _of_function,
    "Pipeline": _of_pipeline,
}
