"""Models that scikit-learn's converter writes with its default options train, and keep their labels and maps."""

from __future__ import annotations

import warnings
from typing import Any

import messages
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from skl2onnx import to_onnx
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA, IncrementalPCA, KernelPCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import StackingClassifier
from sklearn.feature_selection import SelectKBest, f_regression
from sklearn.impute import SimpleImputer
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    Perceptron,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import (
    KBinsDiscretizer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    PolynomialFeatures,
    PowerTransformer,
    RobustScaler,
    StandardScaler,
    scale,
)
from sklearn.random_projection import GaussianRandomProjection
from sklearn.svm import LinearSVC, LinearSVR
from sklearn.tree import DecisionTreeClassifier
from steps import outputs

import graphopt
import passes
from graphopt.graph.roles import Role, with_role
from graphopt.inspection.report import report

IRIS, SPECIES = load_iris(return_X_y=True)
X = scale(IRIS).astype(np.float32)
BINARY = (SPECIES == 2).astype(np.int64)
NAMES = np.array(["setosa", "versicolor", "virginica"])[SPECIES]
NUMBER = scale(IRIS[:, 3] ** 2)
PROBABILITIES, SCORES = passes.CrossEntropy(from_logits=False), passes.CrossEntropy()
SQUARES = passes.MeanSquaredError()

CLASSIFIERS = {
    "logistic, binary": (LogisticRegression(C=0.01), BINARY, PROBABILITIES),
    "logistic, multinomial": (LogisticRegression(C=0.01), SPECIES, PROBABILITIES),
    "logistic, strings": (LogisticRegression(C=0.01), NAMES, PROBABILITIES),
    "logistic, two strings": (LogisticRegression(C=0.01), np.where(BINARY, "yes", "no"), PROBABILITIES),
    "logistic, other integers": (LogisticRegression(C=0.01), SPECIES * 2 + 1, PROBABILITIES),
    "one versus rest": (OneVsRestClassifier(LogisticRegression(C=0.01)), SPECIES, PROBABILITIES),
    "stochastic, hinge": (SGDClassifier(max_iter=5, random_state=0), BINARY, SCORES),
    "stochastic, logistic": (SGDClassifier("log_loss", max_iter=5, random_state=0), SPECIES, PROBABILITIES),
    "perceptron": (Perceptron(random_state=0), SPECIES, SCORES),
    "support vectors, linear": (LinearSVC(C=0.001, random_state=0), SPECIES, SCORES),
    "ridge classifier": (RidgeClassifier(), SPECIES, SCORES),
    "discriminant": (LinearDiscriminantAnalysis(shrinkage=0.9, solver="lsqr"), SPECIES, PROBABILITIES),
    "network": (MLPClassifier(max_iter=5, random_state=0), SPECIES, PROBABILITIES),
    "network, binary": (MLPClassifier(max_iter=5, random_state=0), BINARY, PROBABILITIES),
    "network, strings": (MLPClassifier(max_iter=5, random_state=0), NAMES, PROBABILITIES),
    "naive Bayes": (GaussianNB(), SPECIES, PROBABILITIES),
    "pipeline": (
        make_pipeline(SimpleImputer(), StandardScaler(), MinMaxScaler(), Normalizer(), LogisticRegression()),
        SPECIES,
        PROBABILITIES,
    ),
    "stacked on a tree": (
        StackingClassifier(
            [("tree", DecisionTreeClassifier(max_depth=2, random_state=0)), ("linear", LogisticRegression())]
        ),
        SPECIES,
        PROBABILITIES,
    ),
}
REGRESSORS = {
    "linear": LinearRegression(positive=True),
    "ridge": Ridge(100.0),
    "stochastic": SGDRegressor(max_iter=2, random_state=0),
    "support vectors, linear": LinearSVR(max_iter=5, random_state=0),
    "network": MLPRegressor(max_iter=5, random_state=0),
    "network, scaled": make_pipeline(MinMaxScaler(), MLPRegressor(max_iter=5, random_state=0)),
    "pipeline": make_pipeline(RobustScaler(), MaxAbsScaler(), Ridge(100.0)),
}


# onnxruntime 1.19 loads no newer one.
OPSET = 21 if onnxruntime.__version__.startswith("1.19") else None


def converted(estimator: Any, target: np.ndarray) -> onnx.ModelProto:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return to_onnx(estimator.fit(X, target), X[:1], target_opset=OPSET)


def run(proto: onnx.ModelProto) -> dict[str, Any]:
    return outputs(proto, {proto.graph.input[0].name: X})


def scores(value: Any) -> np.ndarray:
    """Return a map for each row as a table."""
    return np.array([list(row.values()) for row in value]) if isinstance(value, list) else value


def kinds(proto: onnx.ModelProto) -> list[tuple[str, str]]:
    return [(o.name, str(o.type.WhichOneof("value"))) for o in proto.graph.output]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_trains_and_keeps_its_labels(name, tmp_path):
    estimator, target, loss = CLASSIFIERS[name]
    proto = converted(estimator, target)
    step = graphopt.compile(proto, loss=loss, optimizer=passes.Adam(1e-3))
    assert not [
        output for output in step.graph.outputs if output.dtype != ir.DataType.FLOAT and output.name != "step.next"
    ]
    graphopt.save(step, tmp_path / "step.onnx")
    executor = graphopt.Executor(tmp_path / "step.onnx")
    start = executor.trained()
    onnx.checker.check_model(start, full_check=True)
    assert kinds(start) == kinds(proto)
    (label, table), (expected_label, expected) = run(start).values(), run(proto).values()
    np.testing.assert_allclose(scores(table), scores(expected), rtol=1e-4, atol=1e-5)
    ranked = np.sort(scores(expected), axis=1)
    decided = ranked[:, -1] - ranked[:, -2] > 1e-5
    np.testing.assert_array_equal(label[decided], expected_label[decided])
    classes, numbers = np.unique(target, return_inverse=True)
    losses = [executor.step({proto.graph.input[0].name: X, "target": numbers})["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    label, table = run(executor.trained()).values()
    np.testing.assert_array_equal(label, classes[np.argmax(scores(table), axis=1)])
    assert list(executor.predict({proto.graph.input[0].name: X})) == list(executor.outputs[1:])


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_regressor_trains(name):
    proto = converted(REGRESSORS[name], NUMBER)
    step = graphopt.compile(proto, loss=SQUARES, optimizer=passes.Adam(1e-3))
    executor = graphopt.Executor(step)
    assert kinds(executor.trained()) == kinds(proto)
    np.testing.assert_allclose(run(executor.trained())["variable"], run(proto)["variable"], rtol=1e-4, atol=1e-5)
    target = NUMBER[:, None].astype(np.float32)
    losses = [executor.step(X=X, target=target)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]


def test_several_targets_train_to_the_least_squares():
    target = np.stack([NUMBER, IRIS[:, 0] - IRIS[:, 1]], axis=1)
    best = LinearRegression().fit(X, target)
    proto = converted(Ridge(1000.0), target)
    executor = graphopt.Executor(graphopt.compile(proto, loss=SQUARES, optimizer=passes.SGD(0.3, momentum=0.9)))
    for _ in range(1500):
        executor.step(X=X, target=target.astype(np.float32))
    np.testing.assert_allclose(executor.state["LinearRegressor.coefficients"], best.coef_, atol=1e-3)
    np.testing.assert_allclose(executor.state["LinearRegressor.intercepts"], best.intercept_, atol=1e-3)


@pytest.mark.parametrize("target", [BINARY, SPECIES], ids=["binary", "multinomial"])
def test_a_logistic_regression_trains_to_scikit_learns_optimum(target):
    """Its objective: C sum of losses + |w|^2 / 2, which is the mean of the losses + |w|^2 / (2 C n)."""
    best = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(X, target)
    step = graphopt.compile(
        converted(LogisticRegression(C=0.01), target),
        loss=PROBABILITIES,
        regularizer=passes.L2(0.5 / len(X), parameters="*.coefficients"),
        optimizer=passes.SGD(1.0, momentum=0.9),
    )
    executor = graphopt.Executor(step)
    for _ in range(1500):
        executor.step(X=X, target=target)
    found = executor.state["LinearClassifier.coefficients"], executor.state["LinearClassifier.intercepts"]
    np.testing.assert_allclose(found[0], best.coef_, atol=2e-3)
    np.testing.assert_allclose(found[1] - found[1].mean() * (len(found[1]) > 1), best.intercept_, atol=2e-3)
    label, table = run(executor.trained()).values()
    np.testing.assert_allclose(scores(table), best.predict_proba(X), atol=1e-3)
    np.testing.assert_array_equal(label, best.predict(X))


def parameters(source: onnx.ModelProto) -> set[str]:
    model = graphopt.load(source)
    passes.Normalize()(model)
    passes.Parameters()(model)
    return {str(value.name) for value in with_role(model, Role.PARAMETER)}


@pytest.mark.parametrize("name", ["pipeline", "logistic, strings", "network"])
def test_a_trained_model_trains_again(name):
    """Statistics of scalers and imputers stay frozen, and the outputs that were set aside are set aside again."""
    estimator, target, loss = CLASSIFIERS[name]
    proto = converted(estimator, target)
    executor = graphopt.Executor(graphopt.compile(proto, loss=loss, optimizer=passes.SGD()))
    again = graphopt.compile(executor.trained(), loss=loss, optimizer=passes.SGD())
    assert parameters(executor.trained()) == parameters(proto)
    assert kinds(graphopt.Executor(again).trained()) == kinds(proto)


def test_statistics_train_when_they_are_asked_for():
    proto = converted(make_pipeline(StandardScaler(), LogisticRegression()), SPECIES)
    assert parameters(proto) == {"LinearClassifier.coefficients", "LinearClassifier.intercepts"}
    model = graphopt.load(proto)
    passes.Normalize()(model)
    passes.Parameters("*.scale")(model)
    assert [value.name for value in with_role(model, Role.PARAMETER)] == ["Scaler.scale"]


PREPROCESSING = {
    "principal components": PCA(2),
    "whitened components": PCA(2, whiten=True),
    "incremental components": IncrementalPCA(2),
    "singular vectors": TruncatedSVD(2),
    "components of a kernel": KernelPCA(2),
    "a random projection": GaussianRandomProjection(2, random_state=0),
    "powers": PowerTransformer(),
    "bins": KBinsDiscretizer(3, encode="onehot-dense", quantile_method="averaged_inverted_cdf"),
    "polynomials": PolynomialFeatures(2),
    "selection": SelectKBest(f_regression, k=2),
    "scaled components": make_pipeline(StandardScaler(), PCA(2), MaxAbsScaler()),
    "a union": make_union(PCA(2), TruncatedSVD(2), StandardScaler()),
    "columns": ColumnTransformer([("a", PCA(2), [0, 1, 2]), ("b", StandardScaler(), [3])]),
}


@pytest.mark.parametrize("name", PREPROCESSING)
def test_what_a_transformer_learned_is_frozen_and_the_predictor_trains(name):
    proto = converted(make_pipeline(PREPROCESSING[name], Ridge()), NUMBER)
    assert parameters(proto) == {"LinearRegressor.coefficients", "LinearRegressor.intercepts"}
    network = MLPRegressor(hidden_layer_sizes=(3,), max_iter=2, random_state=0)
    proto = converted(make_pipeline(PREPROCESSING[name], network), NUMBER)
    assert parameters(proto) == {"coefficient", "coefficient1", "intercepts", "intercepts1"}


def test_the_report_says_that_components_are_frozen_and_unfreeze_trains_them():
    proto = converted(make_pipeline(PCA(2), PoissonRegressor()), np.exp(NUMBER))
    found = report(proto, graphopt.standard(loss=passes.MeanSquaredError())).summary()
    lines = [line for line in found.splitlines() if "transform_matrix" in line or line.startswith("  mean")]
    assert len(lines) == 2 and all("statistics of the data" in line and "unfreeze" in line for line in lines)
    model = graphopt.load(proto)
    passes.Normalize()(model)
    passes.Parameters(unfreeze="transform_matrix")(model)
    assert "transform_matrix" in {value.name for value in with_role(model, Role.PARAMETER)}


def test_loading_leaves_the_callers_model_as_it_is():
    proto = converted(*CLASSIFIERS["logistic, binary"][:2])
    before = proto.SerializeToString()
    graphopt.load(proto)
    assert proto.SerializeToString() == before


SEQUENCE = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,2] x) => (float[N,2] y, seq(float[N,2]) s) <float[2,2] w = {1, 2, 3, 4}> {
    y = MatMul(x, w)
    z = Tanh(y)
    e = SequenceConstruct(y)
    s = SequenceInsert(e, z)
}"""


def test_a_sequence_is_set_aside_and_restored():
    proto = onnx.parser.parse_model(SEQUENCE)
    step = graphopt.compile(
        proto,
        loss=passes.Losses({"y": passes.MeanSquaredError()}),
        optimizer=passes.SGD(0.1),
    )
    assert {"y", "z"} <= {output.name for output in step.graph.outputs}
    trained = graphopt.Executor(step).trained()
    onnx.checker.check_model(trained, full_check=True)
    assert kinds(trained) == kinds(proto)


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        (
            "(float[2] x) => (optional(float[2]) y) { y = Optional(x) }",
            "output 'y': expected a tensor, or a sequence",
        ),
        (
            "(map(int64, float[2]) x, float[2] z) => (float[2] y) { y = Abs(z) }",
            "input 'x': expected a tensor, found a map",
        ),
    ],
)
def test_other_kinds_are_refused(signature, message):
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> g {signature}')
    with pytest.raises(graphopt.GraphoptError, match=message):
        graphopt.load(proto)


def test_an_output_that_is_an_input_passes_through_the_trained_model():
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
        g (float[N,2] x, int64[N] id) => (int64[N] label, float[N,2] y, int64[N] id) {
            label, y = ai.onnx.ml.LinearClassifier<classlabels_ints = [3, 5], coefficients = [1.0, 2.0, 3.0, 4.0],
                intercepts = [0.0, 0.0], post_transform = "SOFTMAX">(x) }"""
    )
    step = graphopt.compile(proto, loss=passes.CrossEntropy(from_logits=False), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1)
    given = {"x": X[:4, :2], "id": np.arange(4)}
    executor.step(given, target=np.array([0, 1, 0, 1]))
    found = graphopt.run(executor.trained(), given)
    assert (list(found), found["id"].tolist()) == (["label", "y", "id"], [0, 1, 2, 3])


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("scikit_learn_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("scikit_learn_mistakes", call, globals())
