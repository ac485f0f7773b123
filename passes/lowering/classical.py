"""Lower operators of ai.onnx.ml, which scikit-learn's converter writes.

See https://onnx.ai/onnx/operators/index_ai_onnx_ml.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Value
from onnxscript.rewriter.pattern import RewriteRule

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import MATRIX_PRODUCTS
from graphopt.graph.origins import Evidence, Kind, Origin
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import constant_number, dtype_of, is_floating, name_of, rank
from passes.gradients.registry import no_gradient
from passes.lowering.registry import freeze, lowers, weight

_DOMAIN = "ai.onnx.ml"

SCALING = {"Add", "Cast", "Clip", "Div", "Identity", "Max", "Min", "Mul", "Sub", "Where"}
TREES = ("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor")

# Names of a predictor's weights, and of what transformers and naive Bayes measure, in files of skl2onnx.
_PREDICTOR = re.compile(r"(^|\.)(coef|coefficients?|intercepts?)\d*$")
_STATISTICS = re.compile(
    r"(transform_matrix|mean|explained_variance|quantiles(_neg_rev)?|references(_neg_rev)?|zero_tensor)\d*"
)

no_gradient(*TREES, domain=_DOMAIN)


def is_tree(node: ir.Node) -> bool:
    """Return whether a node is an ensemble of trees. It is piecewise constant, so that it stays and stops gradients."""
    return node.domain == _DOMAIN and node.op_type in TREES


def type_tree(node: ir.Node) -> None:
    """Set the ranks of the outputs of an ensemble of trees, which ONNX does not infer: labels [N], scores [N,C]."""
    for output in node.outputs:
        output.shape = output.shape or ir.Shape([None, None] if output is node.outputs[-1] else [None])


def is_classical(model: ir.Model) -> bool:
    """Return whether a model comes from a library of classical machine learning."""
    return model.producer_name == "skl2onnx" or any(n.domain == _DOMAIN for n in model.graph.all_nodes())


def freeze_scaling(model: ir.Model) -> None:
    """Freeze the statistics with which a classical model scales its data first."""
    data = set(model.graph.inputs)
    for node in model.graph:
        if node.op_type in SCALING and node.domain == "" and data.intersection(node.inputs):
            data.update(node.outputs)
            for x in node.inputs:
                if x is not None and x not in data:
                    freeze(x)


def freeze_preprocessing(model: ir.Model) -> None:
    """Freeze what scikit-learn's transformers learned before the predictor, such as mean and matrix of a PCA.

    The predictor begins at the first initializers with the names that its weights have, or else at the last product.
    """
    weights = [x for x in model.graph.initializers.values() if is_floating(x)]
    predicting = [x for x in weights if _PREDICTOR.search(name_of(x))]
    if not predicting:
        read = {node for x in model.graph.initializers.values() for node in x.consumers()}
        products = {node for node in read if node.op_type in MATRIX_PRODUCTS and node.graph is model.graph}
        last = products - _before(products)
        predicting = [x for node in last for x in node.inputs if x is not None and x.is_initializer()]
    before = _before({node for x in predicting for node in x.consumers()})
    for x in weights:
        used = not before.isdisjoint(x.consumers())
        if _STATISTICS.fullmatch(name_of(x)) or (used and x not in predicting):
            freeze(x)


def _before(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    return ancestors(x for node in nodes for x in values_read(node))


@lowers("SVMClassifier", "SVMRegressor", domain=_DOMAIN)
def support_vector_machine(op: Emitter, x: Value, **attributes: object) -> Value:
    raise GraphoptError(
        "a kernel machine stores all its support vectors as attributes: train a linear model or a network instead"
    )


def _array(numbers: Sequence[float]) -> np.ndarray:
    return np.array(numbers, np.float32)


@lowers("LinearRegressor", domain=_DOMAIN)
def linear_regressor(
    op: Emitter,
    x: Value,
    *,
    coefficients: Sequence[float],
    intercepts: Sequence[float] = (),
    targets: int = 1,
    post_transform: str = "NONE",
    node: ir.Node,
) -> Value:
    if targets == 1 and post_transform != "NONE":
        raise GraphoptError(
            f"its attribute post_transform={post_transform!r} of one target, which runtimes ignore, is not covered: "
            f"expected NONE"
        )
    scores = _scores(op, x, node, _array(coefficients).reshape(targets, -1), _array(intercepts))
    return _transformed(op, scores, post_transform)


@lowers("LinearClassifier", domain=_DOMAIN)
def linear_classifier(
    op: Emitter,
    x: Value,
    *,
    coefficients: Sequence[float],
    intercepts: Sequence[float] = (),
    classlabels_ints: Sequence[int] = (),
    classlabels_strings: Sequence[str] = (),
    multi_class: int = 0,
    post_transform: str = "NONE",
    node: ir.Node,
) -> Sequence[Value]:
    """Return label and scores. `multi_class` changes nothing, here or in runtimes.

    If the rows of coefficients of two classes are each other's negatives, one row s is kept: the scores are -s and s,
    and logistic scores are softmax(-s/2, s/2). They remain probabilities that sum to 1 during training, and a loss can
    read their logits. One row for two labels yields 1 - s and s, whether logistic or not.
    """
    names = ir.tensor(list(classlabels_ints) or list(classlabels_strings))
    labels, classes = op.initializer(names, f"{node.name}.labels"), names.size
    rows = len(intercepts) or classes
    w, b = _array(coefficients).reshape(rows, -1), _array(intercepts)
    if rows == 1 and classes != 2:
        raise GraphoptError(f"one row of coefficients and {classes} labels are not covered: expected 2 labels")
    mirrored = rows == 2 and np.array_equal(w[0], -w[1]) and np.array_equal(b[:1], -b[1:])
    if rows == 1 or mirrored:
        s = _scores(op, x, node, w[-1:], b[-1:])
        label = op.Gather(labels, op.Cast(op.Greater(op.Squeeze(s, [1]), 0.0), to=ir.DataType.INT64))
        if post_transform == "LOGISTIC":
            half = 0.5 * s
            return label, op.Softmax(op.Concat(-half, half, axis=1), axis=1)
        scores = op.Concat(1.0 - s if rows == 1 else -s, s, axis=1)
        if rows == 1 and post_transform in ("SOFTMAX", "SOFTMAX_ZERO"):
            return label, scores
    else:
        scores = _scores(op, x, node, w, b)
        label = op.Gather(labels, op.ArgMax(scores, axis=1, keepdims=0))
    return label, _transformed(op, scores, post_transform)


def _scores(op: Emitter, x: Value, node: ir.Node, w: np.ndarray, b: np.ndarray) -> Value:
    x = op.cast(x, ir.DataType.FLOAT)
    if rank(x) == 1:
        x = op.Unsqueeze(x, [0])
    numbers = {"coefficients": w, "intercepts": b}
    weights = {label: weight(op, node, label, array) for label, array in numbers.items() if array.size}
    for label, value in weights.items():  # zeros among them are a solver's
        why = f"the {label} of {node.op_type}"
        Origin(Kind.PARAMETER, why, Evidence.RECORD, named=True).write(value)
    return op.Gemm(x, weights["coefficients"], weights.get("intercepts"), transB=1)


def _transformed(op: Emitter, scores: Value, post_transform: str) -> Value:
    match post_transform:
        case "NONE":
            return scores
        case "SOFTMAX":
            return op.Softmax(scores, axis=1)
        case "LOGISTIC":
            return op.Sigmoid(scores)
        case "SOFTMAX_ZERO":  # a softmax of the nonzero scores; zeros stay 0
            counted = op.CastLike(op.Greater(op.Abs(scores), 1e-7), scores)
            shares = counted * op.Exp(scores - op.ReduceMax(scores, [1]))
            return shares / op.ReduceSum(shares, [1])
    raise GraphoptError(f"its attribute post_transform={post_transform!r} is not covered")


@lowers("Scaler", domain=_DOMAIN)
def scaler(op: Emitter, x: Value, *, offset: Sequence[float] = (), scale: Sequence[float] = (), node: ir.Node) -> Value:
    y = op.cast(x, ir.DataType.FLOAT)
    if offset:
        y = y - freeze(weight(op, node, "offset", _array(offset)))
    if scale:
        y = y * freeze(weight(op, node, "scale", _array(scale)))
    return y


@lowers("Imputer", domain=_DOMAIN)
def imputer(
    op: Emitter,
    x: Value,
    *,
    imputed_value_floats: Sequence[float] = (),
    imputed_value_int64s: Sequence[int] = (),
    replaced_value_float: float = 0.0,
    replaced_value_int64: int = 0,
    node: ir.Node,
) -> Value:
    floating = is_floating(x)
    values = np.array(imputed_value_floats if floating else imputed_value_int64s, dtype_of(x).numpy())
    replaced = replaced_value_float if floating else replaced_value_int64
    is_missing = op.IsNaN(x) if np.isnan(replaced) else op.Equal(x, op.constant(replaced, like=x))
    return op.Where(is_missing, freeze(weight(op, node, "values", values)), x)


@lowers("Normalizer", domain=_DOMAIN)
def normalizer(op: Emitter, x: Value, *, norm: str = "MAX") -> Value:
    """Divide rows by their maximum, sum of magnitudes or Euclidean norm, and keep rows where it is 0."""
    made_by = x.producer()
    if norm == "L1" and made_by is not None and made_by.op_type == "Softmax" and rank(x) == 2:
        return x  # its rows sum to 1 already, and a loss can read the logits
    x = op.cast(x, ir.DataType.FLOAT)
    sizes = {"MAX": op.ReduceMax, "L1": op.ReduceL1, "L2": op.ReduceL2}
    if norm not in sizes:
        raise GraphoptError(f"its attribute norm={norm!r} is not covered")
    size = sizes[norm](x, [-1])
    return x / op.Where(op.Equal(size, 0.0), op.CastLike(1.0, size), size)


@lowers("ArrayFeatureExtractor", domain=_DOMAIN)
def array_feature_extractor(op: Emitter, x: Value, indices: Value) -> Value:
    """Select the columns of `x` that `indices` names. A vector counts as one row."""
    columns = op.Gather(x, op.Reshape(indices, [-1]), axis=-1)
    return op.Unsqueeze(columns, [0]) if rank(x) == 1 else columns


@lowers("Binarizer", domain=_DOMAIN)
def binarizer(op: Emitter, x: Value, *, threshold: float = 0.0) -> Value:
    return op.CastLike(op.Greater(x, op.constant(threshold, like=x)), x)


# scikit-learn's converter writes 1 / (1 + exp(-x)), whose gradient is NaN if exp(-x) overflows. A Sigmoid does not suit
# runtimes that compute it with absolute precision, because here small values are added and divided by their sum.
LOGISTIC = RewriteRule(
    lambda op, x, minus, one: op.Reciprocal(op.Add(op.Exp(op.Mul(x, minus)), one)),
    lambda op, x, minus, one: op.Exp(op.Neg(op.Softplus(op.Neg(x)))),
    lambda context, x, minus, one: (
        (x.dtype, constant_number(minus), constant_number(one)) == (ir.DataType.FLOAT, -1, 1)
    ),
)
