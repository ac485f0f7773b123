"""Convert fitted estimators, and the pipelines that end in one, with skl2onnx, which this file imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.compose
import onnx_ir as ir
import skl2onnx
from onnx.inliner import inline_local_functions
from skl2onnx.algebra.type_helper import guess_initial_types
from skl2onnx.common.data_types import DoubleTensorType, FloatTensorType, Int64TensorType, StringTensorType
from sklearn.base import BaseEstimator, is_classifier
from sklearn.utils.validation import check_is_fitted

from graphopt.errors import GraphoptError, line, unknown
from graphopt.graph.loading import load
from graphopt.graph.opsets import OPSET, rewrite_in
from graphopt.training.estimator import PREDICTOR_TYPES, Trainer
from graphopt.training.sklearn.estimators import OnnxClassifier, OnnxRegressor
from graphopt.training.sklearn.wrappers import register_wrappers

if TYPE_CHECKING:
    from skl2onnx.common._container import ModelComponentContainer
    from skl2onnx.common._topology import Operator, Scope, Variable

_FLOATS = {"float32": FloatTensorType, "float64": DoubleTensorType}
_OF_CLASSIFIERS = {
    "zipmap": [True, False, "columns"],
    "output_class_labels": [False, True],
    "nocl": [True, False],
}


def register_converters() -> None:
    for estimator, parser in ((OnnxClassifier, None), (OnnxRegressor, None), (Trainer, _parse_trainer)):
        skl2onnx.update_registered_converter(
            estimator,
            f"Graphopt{estimator.__name__}",
            _set_types,
            _convert,
            parser=parser,
            options=None if estimator is OnnxRegressor else _OF_CLASSIFIERS,
        )
    register_wrappers()


def converted(fitted: object, X: object, dtype: str, options: dict[str, object]) -> onnx.ModelProto:
    """Return a fitted estimator as a model whose inputs have the names, columns and types of `X`."""
    if dtype not in PREDICTOR_TYPES:
        raise GraphoptError(unknown("dtype", dtype, PREDICTOR_TYPES))
    if not isinstance(fitted, BaseEstimator | Trainer):
        raise GraphoptError(
            f"to_onnx: expected a fitted estimator, such as a Pipeline, found {type(fitted).__name__}: "
            f"graphopt.save writes models"
        )
    register_converters()
    check_is_fitted(fitted)
    try:
        X = X if hasattr(X, "shape") else np.asarray(X)
        types = guess_initial_types(X, None)
    except (NotImplementedError, TypeError) as error:
        raise GraphoptError(
            f"to_onnx: expected an array or a table of numbers and text, found {type(X).__name__}: {line(error)}"
        ) from error
    floats = tuple(_FLOATS.values())
    types = [(name, _FLOATS[dtype](x.shape) if isinstance(x, floats) else x) for name, x in types]
    chosen: dict[str, object] = {"target_opset": OPSET, "initial_types": types}
    if is_classifier(fitted):
        chosen["options"] = {id(fitted): {"zipmap": False}}
    model: onnx.ModelProto = skl2onnx.to_onnx(fitted, **{**chosen, **options})
    return model


def _parse_trainer(scope: Scope, model: Trainer, inputs: list[Variable], custom_parsers: object = None) -> list[object]:
    """Declare the outputs of a Trainer, which are tensors."""
    operator = scope.declare_local_operator("GraphoptTrainer", model)
    operator.inputs = inputs
    for name in ("label", "probabilities") if is_classifier(model) else ("variable",):
        operator.outputs.append(scope.declare_local_variable(name, FloatTensorType()))
    return list(operator.outputs)


def _dtype(operator: Operator) -> str:
    """Return the type in which a converted estimator computes."""
    texts = [x.raw_name for x in operator.inputs if isinstance(x.type, StringTensorType)]
    if texts:
        raise GraphoptError(
            f"{type(operator.raw_operator).__name__}: expected numbers, found text in input {texts[0]!r}: encode it in "
            f"a step before, such as a ColumnTransformer with OneHotEncoder"
        )
    return "float64" if any(isinstance(x.type, DoubleTensorType) for x in operator.inputs) else "float32"


def _predictor(scope: Scope, operator: Operator) -> onnx.ModelProto:
    """Return the network with the outputs of the operator."""
    model = operator.raw_operator
    check_is_fitted(model)
    numbered = is_classifier(model) and scope.get_options(model, {"nocl": False})["nocl"]
    proto: onnx.ModelProto = model._predictor(_dtype(operator), None if numbered else model._labels())
    if len(proto.graph.input) != 1:
        raise GraphoptError(
            f"{type(model).__name__}: expected a model with one input, found "
            f"{[x.name for x in proto.graph.input]}: export it alone, by its method to_onnx"
        )
    return proto


def _set_types(operator: Operator) -> None:
    """Set the types of a converted estimator's outputs."""
    rows, numbers = operator.inputs[0].get_first_dimension(), _FLOATS[_dtype(operator)]
    chosen = {onnx.TensorProto.STRING: StringTensorType, onnx.TensorProto.INT64: Int64TensorType}
    for variable, y in zip(operator.outputs, _predictor(operator.scope_inst, operator).graph.output, strict=True):
        kind = y.type.tensor_type.elem_type
        sizes = [dim.dim_value or None for dim in y.type.tensor_type.shape.dim[1:]]
        variable.set_type(chosen.get(kind, numbers)([rows, *sizes]))


def _convert(scope: Scope, operator: Operator, container: ModelComponentContainer) -> None:
    """Copy the network into the graph, after its inputs in one tensor."""
    kind = onnx.TensorProto.DOUBLE if _dtype(operator) == "float64" else onnx.TensorProto.FLOAT
    loaded, target = load(inline_local_functions(_predictor(scope, operator))), container.target_opset
    if rewrite_in([loaded], target) > target:
        raise GraphoptError(
            f"target_opset: expected an opset that has the operators of the network, found {target}: take a newer one"
        )
    prefix = scope.get_unique_variable_name("network")
    proto = onnx.compose.add_prefix(ir.to_proto(loaded), f"{prefix}.")
    (x,) = proto.graph.input

    def add(op_type: str, inputs: list[str], output: str | None = None, **attributes: object) -> str:
        output = output or scope.get_unique_variable_name(f"{prefix}.features")
        container.add_node(op_type, inputs, [output], name=scope.get_unique_operator_name(op_type), **attributes)
        return output

    columns = [add("Cast", [x.full_name], to=kind) for x in operator.inputs]
    features = columns[0] if len(columns) == 1 else add("Concat", columns, axis=1)
    row = [dim.dim_value for dim in x.type.tensor_type.shape.dim[1:]]
    if len(row) != 1 and all(row):
        shape = scope.get_unique_variable_name(f"{prefix}.shape")
        container.add_initializer(shape, onnx.TensorProto.INT64, [len(row) + 1], [-1, *row])
        features = add("Reshape", [features, shape])
    add("Cast", [features], x.name, to=x.type.tensor_type.elem_type)
    container.nodes.extend(proto.graph.node)
    container.initializers.extend(proto.graph.initializer)
    for opset in proto.opset_import:
        container.node_domain_version_pair_sets.add((opset.domain, opset.version))
    for variable, y in zip(operator.outputs, proto.graph.output, strict=True):
        add("Identity", [y.name], variable.full_name)
