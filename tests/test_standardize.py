"""Standardization and class weights from training rows: against scikit-learn, Keras and ONNX's reference evaluator."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import yaml
from builders import mlp, model
from onnx.reference import ReferenceEvaluator
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_class_weight

import graphopt
import passes
from graphopt import cli, models, moments
from graphopt.data import balanced_class_weights, hold_out, mean_and_scale

RNG = np.random.default_rng(0)
X = (RNG.standard_normal((103, 4)) * [1, 50, 0.01, 3] + [0, 200, 0.05, -2]).astype(np.float32)
Y = np.digitize(X[:, 0] + (X[:, 1] - 200) / 50, [-0.5, 0.7])
IMAGES = (RNG.standard_normal((30, 3, 4, 4)) * [[[1]], [[20]], [[0.1]]] + [[[5]], [[-9]], [[0]]]).astype(np.float32)
SGD = passes.SGD(0.1)


def trained(step: Any, arrays: Any, **options: Any) -> tuple[onnx.ModelProto, list[dict[str, Any]]]:
    executor = graphopt.Executor(step, threads=1)
    records = graphopt.fit(executor, arrays, batch_size=16, **options)
    return executor.trained(), records


def outputs(proto: onnx.ModelProto, **feeds: np.ndarray) -> np.ndarray:
    return ReferenceEvaluator(proto).run(None, feeds)[0]


def adapted(proto: Any, arrays: Any, loss: Any = None, standardize: Any = None, **options: Any) -> Any:
    pipeline = graphopt.standard(
        standardize=standardize or passes.Standardize(), loss=loss or passes.CrossEntropy(), optimizer=SGD
    )
    return graphopt.adapt(pipeline, proto, arrays, **options)(proto)


def without_seconds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in one.items() if k not in ("seconds", "samples_per_second")} for one in records]


@pytest.mark.parametrize("size", [1, 64, 2**20])
@pytest.mark.parametrize(
    "x",
    [
        X,
        X.astype(np.float64) + 1e8,
        np.asfortranarray(X),
        np.arange(60).reshape(20, 3),
        np.full((50, 2), 0.1),
        np.concatenate([np.full((99, 1), 1e9), X[:99]], axis=1),
        X > 0,
        X[:1],
    ],
    ids=["floats", "far", "fortran", "integers", "constant", "one_constant", "bools", "one_row"],
)
def test_means_and_scales_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch, x: np.ndarray, size: int) -> None:
    monkeypatch.setattr(moments, "ELEMENTS", size)
    theirs = StandardScaler().fit(x.astype(np.float64))
    mean, scale = mean_and_scale(x)
    np.testing.assert_allclose(mean, theirs.mean_, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(scale, theirs.scale_, rtol=1e-9)


def test_means_and_scales_of_rows_of_a_file_are_those_of_the_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    rows, _ = hold_out(len(X), 0.3, seed=5)
    theirs = StandardScaler().fit(X[rows].astype(np.float64))
    mean, scale = mean_and_scale(np.load(tmp_path / "x.npy", mmap_mode="r"), rows)
    np.testing.assert_allclose([mean, scale], [theirs.mean_, theirs.scale_], rtol=1e-12)


def test_the_features_of_images_are_channels_and_those_of_sequences_are_chosen() -> None:
    np.testing.assert_allclose(mean_and_scale(IMAGES)[0], IMAGES.mean((0, 2, 3), np.float64), rtol=1e-12)
    np.testing.assert_allclose(mean_and_scale(IMAGES, axis=-1)[1], IMAGES.std((0, 1, 2), np.float64), rtol=1e-12)
    np.testing.assert_allclose(mean_and_scale(X[:, 1]), [[X[:, 1].mean(dtype=float)], [X[:, 1].std(dtype=float)]])
    for axis in (0, 4, -4):
        with pytest.raises(graphopt.GraphoptError, match=f"axis={axis}: expected an axis of the features, from 1 to 3"):
            mean_and_scale(IMAGES, axis=axis)


@pytest.mark.parametrize("shuffle", [True, False, "consecutive"])
@pytest.mark.parametrize("share", [0, 0.2, 0.5])
def test_the_rows_held_out_are_those_of_fit(shuffle: Any, share: float) -> None:
    rows, held = hold_out(len(X), share, shuffle=shuffle, seed=3)
    assert sorted([*rows, *held]) == list(range(len(X)))
    step = graphopt.compile(mlp(), loss=passes.CrossEntropy(), optimizer=SGD)
    options = {"epochs": 2, "shuffle": shuffle, "seed": 3}
    whole, records = trained(step, {"x": X, "target": Y}, validation=share, **options)
    other = {"x": X[held], "target": Y[held]} if len(held) else None
    parts, expected = trained(step, {"x": X[rows], "target": Y[rows]}, validation=other, **options)
    assert whole == parts
    assert without_seconds(records) == without_seconds(expected)


def test_a_trained_model_on_raw_input_equals_the_one_on_scaled_input() -> None:
    arrays = {"x": X, "target": Y}
    rows, _ = hold_out(len(X), 0.2)
    scaler = StandardScaler().fit(X[rows].astype(np.float64))
    scaled = scaler.transform(X.astype(np.float64)).astype(np.float32)
    ours, records = trained(adapted(mlp(), arrays), arrays, epochs=5)
    plain = graphopt.compile(mlp(), loss=passes.CrossEntropy(), optimizer=SGD)
    theirs, expected = trained(plain, {"x": scaled, "target": Y}, epochs=5)
    assert records[-1]["validation_loss"] == pytest.approx(expected[-1]["validation_loss"], rel=1e-5)
    difference = onnxruntime.InferenceSession(ours.SerializeToString()).run(None, {"x": X})[0]
    np.testing.assert_allclose(difference, outputs(theirs, x=scaled), rtol=1e-5, atol=1e-6)
    assert [x.name for x in ours.graph.input] == ["x"]


@pytest.mark.slow
def test_the_statistics_of_a_trained_model_do_not_train_again() -> None:
    arrays = {"x": X, "target": Y}
    proto, _ = trained(adapted(mlp(), arrays), arrays, epochs=1)
    assert {x.name for x in proto.graph.initializer} >= {"x.mean", "x.scale"}
    again, _ = trained(graphopt.compile(proto, loss=passes.CrossEntropy(), optimizer=SGD), arrays, epochs=1)
    before, after = ({x.name: x.raw_data for x in one.graph.initializer} for one in (proto, again))
    assert {name for name in before if before[name] == after[name]} == {"x.mean", "x.scale"}
    with pytest.raises(graphopt.GraphoptError, match="found that the model standardizes 'x'"):
        adapted(proto, arrays)


def test_two_inputs_are_standardized_each_by_its_own_numbers(tmp_path: Path) -> None:
    text = """g (float[N,4] x, float[N] age, int64[N] group) => (float[N,3] y) {
        g = Cast<to=1>(group)  one = Constant<value_ints=[1]>()  column = Unsqueeze(age, one)
        other = Unsqueeze(g, one)  all = Concat<axis=1>(x, column, other)  y = MatMul(all, w) }"""
    proto = model(text, w=RNG.standard_normal((6, 3)))
    age, group = X[:, 1] * 3, Y % 2
    np.save(tmp_path / "age.npy", age)
    arrays = {"x": X, "age": np.load(tmp_path / "age.npy", mmap_mode="r"), "group": group, "target": Y}
    step = adapted(proto, arrays, validation=None)
    scaled = {
        name: ((x - x.mean(0, dtype=float)) / x.std(0, dtype=float)).astype(np.float32)
        for name, x in (("x", X), ("age", age))
    }
    found = graphopt.Executor(step).predict({"x": X, "age": age, "group": group})["y"]
    np.testing.assert_allclose(found, outputs(proto, **scaled, group=group), rtol=1e-4, atol=1e-5)
    only = adapted(proto, arrays, standardize=passes.Standardize(inputs="a*"), validation=None)
    found = graphopt.Executor(only).predict({"x": X, "age": age, "group": group})["y"]
    np.testing.assert_allclose(found, outputs(proto, x=X, age=scaled["age"], group=group), rtol=1e-4, atol=1e-3)
    with pytest.raises(graphopt.GraphoptError, match=r"by the names of the inputs, 'x', 'age', found those of one"):
        graphopt.compile(proto, standardize=passes.Standardize(0.5, 1.0))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_types_keep_their_precision(dtype: Any) -> None:
    name = {np.float16: "float16", np.float64: "double"}[dtype]
    proto = model(f"g ({name}[N,4] x) => ({name}[N,2] y) {{ y = MatMul(x, w) }}", dtype=dtype, w=np.ones((4, 2)))
    x = X.astype(dtype) if dtype is np.float16 else X.astype(dtype) + 1e4
    arrays = {"x": x, "target": np.zeros((len(X), 2), dtype)}
    step = adapted(proto, arrays, loss=passes.MeanSquaredError(), validation=None)
    expected = StandardScaler().fit_transform(x.astype(np.float64)).sum(axis=1)
    found = graphopt.Executor(step).predict({"x": x})["y"]
    assert found.dtype == dtype
    np.testing.assert_allclose(found[:, 0], expected, **({"atol": 0.2} if dtype is np.float16 else {"atol": 1e-9}))


def test_integers_are_fed_to_a_model_of_floats() -> None:
    whole = {"x": RNG.integers(0, 255, (50, 4), np.uint8), "target": RNG.integers(0, 3, 50)}
    whole["target"][:3] = [0, 1, 2]
    step = adapted(mlp(), whole, validation=None)
    scaled = StandardScaler().fit_transform(whole["x"].astype(float)).astype(np.float32)
    found = graphopt.Executor(step).predict({"x": whole["x"].astype(np.float32)})["y"]
    np.testing.assert_allclose(found, outputs(mlp(), x=scaled), rtol=1e-4, atol=1e-5)


def test_the_target_of_a_model_that_computes_its_loss_stays_as_it_is() -> None:
    text = """g (float[N,4] x, float[N,1] t) => (float[N,1] p, float loss) {
        p = MatMul(x, w)  d = Sub(p, t)  s = Mul(d, d)  loss = ReduceMean<keepdims=0>(s) }"""
    proto = model(text, w=np.ones((4, 1)))
    arrays = {"x": X, "t": X[:, :1] * 100}
    step = adapted(proto, arrays, loss=passes.OwnLoss(), validation=None)
    centered = [node for node in step.graph if node.op_type == "Sub" and node.inputs[0].name in ("x", "t")]
    assert {node.inputs[0].name for node in centered} == {"x"}
    scaled = StandardScaler().fit_transform(X.astype(float)).sum(1, keepdims=True)
    expected = np.mean((scaled - arrays["t"]) ** 2)
    assert graphopt.Executor(step).evaluate(arrays)["loss"] == pytest.approx(expected, rel=1e-5)


def test_sequences_of_features_and_numbers_of_ones_own() -> None:
    proto = model("g (float[N,T,2] x) => (float[N,T,2] y) { y = Mul(x, w) }", w=np.ones(2))
    x = RNG.standard_normal((5, 7, 2)).astype(np.float32) + np.float32([3, -4])
    step = graphopt.compile(
        proto, standardize=passes.Standardize([3.0, -4.0], 2, axis=-1), loss=passes.MeanSquaredError()
    )
    found = graphopt.run(step, {"x": x, "target": x})["y"]
    np.testing.assert_allclose(found, (x - np.float32([3, -4])) / 2, rtol=1e-6)


def test_a_weight_that_has_the_name_of_a_mean_keeps_it() -> None:
    proto = model('g (float[N,4] x) => (float[N,4] y) { y = Mul(x, "x.mean") }', **{"x.mean": np.full(4, 7.0)})
    arrays = {"x": X, "target": X}
    result, _ = trained(adapted(proto, arrays, loss=passes.MeanSquaredError()), arrays, epochs=1)
    onnx.checker.check_model(result, full_check=True)
    assert sorted(x.name for x in result.graph.initializer) == ["x.mean", "x.mean.1", "x.scale"]


@pytest.mark.parametrize("labels", [[0, 0, 1, 2, 2, 2], [1, 0], [0, 0, 0], [[0, 1], [1, 1]], np.uint8([3, 1, 2, 0])])
def test_balanced_weights_are_those_of_scikit_learn(labels: Any) -> None:
    y = np.asarray(labels)
    expected = compute_class_weight("balanced", classes=np.unique(y), y=y.ravel())
    np.testing.assert_allclose(balanced_class_weights(y), expected, rtol=1e-15)


def test_balanced_weights_of_rows_and_without_ignored_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "ELEMENTS", 10)
    rows, _ = hold_out(len(Y), 0.4)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=Y[rows])
    np.testing.assert_allclose(balanced_class_weights(Y, rows, classes=3), expected, rtol=1e-15)
    marked = np.where(np.arange(len(Y)) % 3, Y, -100)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=Y[marked >= 0])
    np.testing.assert_allclose(balanced_class_weights(marked, ignore_index=-100), expected, rtol=1e-15)


@pytest.mark.parametrize("classes", [None, 3])
def test_a_balanced_loss_counts_the_classes_of_a_new_head(classes: int | None) -> None:
    rows, _ = hold_out(len(Y), 0.2, seed=4)
    numbers = tuple(compute_class_weight("balanced", classes=np.arange(3), y=Y[rows]).tolist())
    steps = {"adapter": passes.Head(classes=classes), "optimizer": SGD}
    pipeline = graphopt.standard(loss=passes.CrossEntropy(class_weights="balanced"), **steps)
    two = mlp((4, 8, 2))  # outputs of the file, of which the data has one more
    found = graphopt.adapt(pipeline, two, {"x": X, "target": Y}, seed=4)
    assert found["loss"][0].class_weights == pytest.approx(numbers)
    assert found["adapter"][0].classes == 3


@pytest.mark.parametrize("several", [False, True])
def test_a_balanced_loss_is_the_one_with_the_numbers(several: bool) -> None:
    def losses(weights: Any) -> Any:
        loss = passes.CrossEntropy(class_weights=weights)
        return passes.Losses({"y": loss}) if several else loss

    arrays = {"x": X, "target_y" if several else "target": Y}
    rows, _ = hold_out(len(Y), 0.2, seed=4)
    numbers = tuple(compute_class_weight("balanced", classes=np.arange(3), y=Y[rows]).tolist())
    pipeline = graphopt.standard(loss=losses("balanced"), optimizer=SGD)
    found = graphopt.adapt(pipeline, mlp(), arrays, seed=4)
    assert found.learns is False and pipeline.learns is True
    expected = graphopt.compile(mlp(), loss=losses(numbers), optimizer=SGD)
    assert graphopt.listing(found(mlp())) == graphopt.listing(expected)


@pytest.mark.parametrize("dtype", [np.int64, np.float32, bool])
@pytest.mark.slow
def test_a_balanced_binary_loss_is_that_of_two_classes(dtype: Any) -> None:
    hit = (X[:, 0] > 1).astype(dtype)
    one = graphopt.load(models.linear((4,), 1))
    balanced = passes.BinaryCrossEntropy(class_weights="balanced")
    step = adapted(one, {"x": X, "target": hit[:, None]}, loss=balanced, validation=None)
    numbers = compute_class_weight("balanced", classes=np.array([False, True]), y=hit.astype(bool))
    scaled = StandardScaler().fit_transform(X.astype(float)).astype(np.float32)
    logits = graphopt.run(one, {"x": scaled})["y"]
    two = model("g (float[N,2] x) => (float[N,2] y) { y = Mul(x, w) }", w=np.ones(2))
    expected = graphopt.compile(two, loss=passes.CrossEntropy(class_weights=tuple(numbers.tolist())))
    both = np.concatenate([np.zeros_like(logits), logits], axis=1)
    theirs = graphopt.run(expected, {"x": both, "target": hit.astype(np.int64)})["loss"]
    assert graphopt.Executor(step).evaluate({"x": X, "target": hit[:, None].astype(np.float32)})[
        "loss"
    ] == pytest.approx(float(theirs), rel=1e-6)


def balanced(proto: Any, arrays: dict[str, Any], **options: Any) -> Any:
    """Adapt to the arrays and a target, which stands last if it is not among them."""
    given = {key: x for key, x in {**arrays, "target": arrays.get("target", Y)}.items() if x is not None}
    return adapted(proto, given, loss=passes.CrossEntropy(class_weights="balanced"), **options)


@pytest.mark.parametrize("call", messages.calls("standardize_mistakes"))
def test_wrong_numbers_and_data_are_errors_of_one_line(call: str) -> None:
    messages.refused("standardize_mistakes", call, globals())


def test_mixed_precision_standardizes_in_the_type_of_the_input() -> None:
    scaling, precision = passes.Standardize(5e5, 2.0), passes.MixedPrecision()
    step = graphopt.compile(mlp(), standardize=scaling, loss=passes.CrossEntropy(), precision=precision)
    types = {node.op_type: node.outputs[0].dtype for node in list(step.graph)[:3]}
    assert types == {"Sub": ir.DataType.FLOAT, "Div": ir.DataType.FLOAT, "Cast": ir.DataType.FLOAT16}


def test_a_pipeline_that_scikit_learn_exports_is_not_standardized_twice() -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        pipeline = make_pipeline(StandardScaler(), MLPClassifier((8,), max_iter=2)).fit(X, Y)
    proto = skl2onnx.to_onnx(pipeline, X[:1], options={"zipmap": False})
    loss = passes.CrossEntropy(from_logits=False, class_weights="balanced")
    with pytest.raises(graphopt.GraphoptError, match="found that the model standardizes 'X'"):
        adapted(proto, {"X": X, "target": Y}, loss=loss)


TOKENS = "g (int64[N,4] x) => (float[N,4] y) { f = Cast<to=1>(x)  y = Mul(f, w) }"


def test_other_errors_of_passes_that_have_not_learnt() -> None:
    with pytest.raises(graphopt.GraphoptError, match="expected a number for each class, found none: learn them by"):
        graphopt.compile(mlp(), loss=passes.CrossEntropy(class_weights="balanced"))
    shares = passes.CrossEntropy(class_weights="balanced", target_probabilities=True)
    with pytest.raises(graphopt.GraphoptError, match="expected class numbers as targets, found target_probabilities"):
        adapted(mlp(), {"x": X, "target": Y}, loss=shares)
    with pytest.raises(graphopt.GraphoptError, match="adapt: expected a data set or arrays by name, found list"):
        adapted(mlp(), [{"x": X, "target": Y}])
    unknown = graphopt.load(mlp())
    unknown.graph.inputs[0].shape = None
    with pytest.raises(graphopt.GraphoptError, match="expected an input of known rank, found 'x': declare its shape"):
        passes.Standardize(0, 1)(unknown)


def test_numbers_that_the_type_cannot_tell_apart_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="FLOAT cannot tell numbers of feature 1 apart, whose mean is 1.7e"):
        graphopt.compile(
            mlp(), standardize=passes.Standardize([0, 1.7e9, 0, 0], [1, 10, 1, 1]), loss=passes.CrossEntropy()
        )


def test_one_number_for_all_features_and_features_whose_number_is_open() -> None:
    for mean, scale in (([0, 1.7e9, 0, 0], 10), (1.7e9, [1, 1, 1, 10])):
        with pytest.warns(UserWarning, match=r"apart, whose mean is 1\.7e\+09 and whose scale is 10"):
            graphopt.compile(mlp(), standardize=passes.Standardize(mean, scale), loss=passes.CrossEntropy())
    proto = model("g (float[N,F] x) => (float[N,F] y) { y = Mul(x, w) }", w=np.ones(1))
    wrong = passes.Standardize([1, 2], [1, 2, 3])
    with pytest.raises(graphopt.GraphoptError, match="expected 3 numbers, one per feature, or one for all, found 2"):
        graphopt.compile(proto, standardize=wrong, loss=passes.MeanSquaredError())


def test_a_constant_feature_far_from_zero_is_zero_without_a_warning() -> None:
    x = X.copy()
    x[:, 2] = 3e8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = adapted(mlp(), {"x": x, "target": Y}, validation=None)
    scaled = StandardScaler().fit_transform(x.astype(float)).astype(np.float32)
    assert not scaled[:, 2].any()
    found = graphopt.Executor(step).predict({"x": x})["y"]
    np.testing.assert_allclose(found, outputs(mlp(), x=scaled), rtol=1e-4, atol=1e-5)


# The command.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(), "my.onnx")
    np.savez("train.npz", x=X, target=Y)
    return tmp_path


RECIPE = ("data=npz", "data.path=train.npz", "executor.threads=1", "fit.batch_size=16", "fit.seed=3")
LEARNT = ("standardize=inputs", "loss.class_weights=balanced")


@pytest.mark.slow
def test_a_recipe_learns_from_the_rows_that_train_and_says_what_it_does(folder: Path) -> None:
    assert cli.main(["my.onnx", *RECIPE, *LEARNT, "fit.epochs=2", "folder=run"]) == 0
    rows, held = hold_out(len(X), 0.2, seed=3)
    theirs = StandardScaler().fit(X[rows].astype(np.float64))
    weights = {x.name: onnx.numpy_helper.to_array(x) for x in onnx.load("run/trained.onnx").graph.initializer}
    np.testing.assert_allclose(weights["x.mean"], theirs.mean_[None], rtol=1e-6)
    np.testing.assert_allclose(weights["x.scale"], theirs.scale_[None], rtol=1e-6)
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    assert config["standardize"]["mean"] is None and config["loss"]["class_weights"] == "balanced"
    numbers = compute_class_weight("balanced", classes=np.arange(3), y=Y[rows])
    logged = re.search(r"class_weights=\(([^)]*)\)", Path("run/graphopt.log").read_text())
    np.testing.assert_allclose([float(x) for x in logged[1].split(",")], numbers, rtol=1e-15)

    assert cli.main(["predict", "folder=run", *RECIPE]) == 0
    expected = outputs(onnx.load("run/trained.onnx"), x=X)
    np.testing.assert_allclose(np.load("run/predictions.npz")["y"], expected, rtol=1e-5, atol=1e-6)
    np.savez("held.npz", x=X[held], target=Y[held])
    before = Path("run/metrics.jsonl").read_text().splitlines()[-1]
    for source in ("folder=run", "resume=run"):
        given = [source, *RECIPE, *LEARNT, "data.path=held.npz", "fit.metrics=[accuracy]"]
        assert cli.main(["evaluate", *given]) == 0
        measured = yaml.safe_load(Path("run/metrics.json").read_text())
        assert measured["loss"] == pytest.approx(yaml.safe_load(before)["validation_loss"], rel=1e-6)
    assert cli.main(["evaluate", "run/trained.onnx", "folder=out", *RECIPE, "standardize=inputs"]) == 0


@pytest.mark.slow
def test_a_checkpoint_without_its_graph_is_not_measured_by_other_statistics(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["my.onnx", *RECIPE, *LEARNT, "fit.epochs=1", "folder=run"]) == 0
    Path("run/step.onnx").unlink()
    capsys.readouterr()
    assert cli.main(["evaluate", "my.onnx", *RECIPE, *LEARNT, "resume=run"]) == 1
    assert "expected step.onnx in the folder of the run" in capsys.readouterr().err
    assert cli.main(["evaluate", "my.onnx", *RECIPE, *LEARNT, "folder=run"]) == 0


@pytest.mark.slow
def test_a_folder_of_images_is_read_in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pixels = RNG.integers(0, 255, (12, 6, 5, 3), np.uint8)
    for i, image in enumerate(pixels):
        place = Path("images", "ab"[i % 3 == 0])
        place.mkdir(parents=True, exist_ok=True)
        pillow.fromarray(image).save(place / f"{i}.png")
    monkeypatch.setattr(moments, "ELEMENTS", 3 * 6 * 5 * 2)
    given = ["model=cnn", "data=images", "data.path=images", *LEARNT, "fit.validation=null", "fit.epochs=1"]
    assert cli.main([*given, "folder=run"]) == 0
    weights = {x.name: onnx.numpy_helper.to_array(x) for x in onnx.load("run/trained.onnx").graph.initializer}
    np.testing.assert_allclose(weights["x.mean"].ravel(), pixels.mean((0, 1, 2)) / 255, rtol=1e-5)
    np.testing.assert_allclose(weights["x.scale"].ravel(), pixels.std((0, 1, 2)) / 255, rtol=1e-5)
    logged = re.search(r"class_weights=\(([^)]*)\)", Path("run/graphopt.log").read_text())
    assert [float(x) for x in logged[1].split(",")] == [12 / 2 / 8, 12 / 2 / 4]


@pytest.mark.slow
def test_other_runs_of_a_recipe_that_learns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("compile", "hosts", "report"):
        assert cli.main([run, "my.onnx", *RECIPE, *LEARNT, f"folder={run}"]) == 0
    assert "x.mean" in {x.name for x in onnx.load("compile/step.onnx").graph.initializer}
    assert cli.main(["compile", "my.onnx", "standardize=inputs", "standardize.mean=1", "standardize.scale=2"]) == 0
