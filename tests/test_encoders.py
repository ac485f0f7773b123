"""Train models that encode strings themselves: predictions are ONNX Runtime's on the file, and steps those of the rest.

The rest is the part of the file behind the encoders, which `onnx.utils.extract_model` cuts off.
"""

import dataclasses

import messages
import numpy as np
import onnx
import onnxruntime
import pytest
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, OneHotEncoder, OrdinalEncoder, StandardScaler
from steps import outputs

import graphopt
import passes
from graphopt import GraphoptError

WORDS = ["a", "b", "a b", "7"]
STEPS = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
HEAD = '<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 2, "com.microsoft": 1]>'


@dataclasses.dataclass
class Case:
    """Hold nodes that make numbers [N, K] of the strings `s`, and how wide these are; `cut` are the numbers."""

    nodes: str
    width: int
    cut: str = "z"


CASES = {
    "LabelEncoder": Case(
        "i = ai.onnx.ml.LabelEncoder<keys_strings = ['a', 'b'], values_int64s = [1, 2], default_int64 = 0>(s)"
        " z = Gather<axis = 0>(table, i)",
        4,
        "i",
    ),
    "LabelEncoder of floats": Case(
        "v = ai.onnx.ml.LabelEncoder<keys_strings = ['a', 'b'], values_floats = [1.5, 2.0]>(s) z = Unsqueeze(v, one)",
        1,
        "v",
    ),
    "CategoryMapper": Case(
        "i = ai.onnx.ml.CategoryMapper<cats_strings = ['a', 'b'], cats_int64s = [0, 1], default_int64 = 2>(s)"
        " z = Gather<axis = 0>(table, i)",
        4,
        "i",
    ),
    "OneHotEncoder": Case("z = ai.onnx.ml.OneHotEncoder<cats_strings = ['a', 'b', '7'], zeros = 1>(s)", 3),
    "Tokenizer, TfIdfVectorizer": Case(
        "t = com.microsoft.Tokenizer<separators = [' '], mark = 0, mincharnum = 1, pad_value = '#'>(s)"
        " z = TfIdfVectorizer<mode = 'TF', min_gram_length = 1, max_gram_length = 1, max_skip_count = 0,"
        " ngram_counts = [0], ngram_indexes = [0, 1], pool_strings = ['a', 'b']>(t)",
        2,
    ),
    "StringSplit": Case("t, c = StringSplit<delimiter = ' '>(s) v = Cast<to = 1>(c) z = Unsqueeze(v, one)", 1, "c"),
    "StringConcat, Equal": Case(
        "d = StringConcat(s, s) e = Equal(d, twice) v = Cast<to = 1>(e) z = Unsqueeze(v, one)", 1, "e"
    ),
    "RegexFullMatch": Case("e = RegexFullMatch<pattern = 'a.*'>(s) v = Cast<to = 1>(e) z = Unsqueeze(v, one)", 1, "e"),
    "numbers among strings": Case(
        "n = Cast<to = 8>(k) d = StringConcat(s, n) e = Equal(d, seven) v = Cast<to = 1>(e) z = Unsqueeze(v, one)",
        1,
        "e",
    ),
    "body of an If": Case(
        "many = Greater(most, least)"
        " e = If(many) <then_branch = g1 () => (bool[N] p) { p = Equal(s, first) },"
        " else_branch = g2 () => (bool[N] q) { q = Equal(s, twice) }>"
        " v = Cast<to = 1>(e) z = Unsqueeze(v, one)",
        1,
        "e",
    ),
}
CONSTANTS = {
    "one": np.array([1], np.int64),
    "twice": np.array(["aa"], object),
    "seven": np.array(["77"], object),
    "first": np.array(["a"], object),
}


def whole_of(case: Case, outputs: str = "float[N,3] y") -> onnx.ModelProto:
    """Return a model of strings and numbers: numbers of the strings beside x, and two layers."""
    nodes = case.nodes.replace("'", '"')
    model = onnx.parser.parse_model(
        f"{HEAD} g (string[N] s, int64[N] k, float[N,4] x) => ({outputs}) {{ most = ReduceMax<keepdims = 0>(x)"
        f" least = ReduceMin<keepdims = 0>(x) {nodes}"
        " j = Concat<axis = 1>(z, x) h = MatMul(j, w) t1 = Tanh(h) y = MatMul(t1, v1) }"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"table": (3, 4), "w": (case.width + 4, 5), "v1": (5, 3)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for name, array in CONSTANTS.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def batch_of(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "s": rng.choice(np.array(WORDS, object), rows),
        "k": rng.integers(5, 9, rows),
        "x": rng.standard_normal((rows, 4)).astype(np.float32),
    }


@pytest.mark.parametrize("name", CASES)
def test_a_file_that_encodes_strings_trains(name):
    whole = whole_of(CASES[name])
    executor = graphopt.Executor(graphopt.compile(whole, **STEPS), native=False)
    assert [*executor.inputs] == ["s", "k", "x", "target"]
    feeds = batch_of(6)
    np.testing.assert_allclose(executor.predict(feeds)["y"], outputs(whole, feeds)["y"], rtol=1e-5)

    numbers = onnx.ModelProto()
    numbers.CopyFrom(whole)
    numbers.graph.output.add(name=CASES[name].cut)
    cut = CASES[name].cut
    rest = onnx.utils.Extractor(onnx.shape_inference.infer_shapes(whole_typed(numbers, cut, feeds)))
    other = graphopt.Executor(graphopt.compile(rest.extract_model([cut, "x"], ["y"]), **STEPS), native=False)
    for step in range(3):
        feeds = batch_of(6, step)
        target = np.random.default_rng(step).standard_normal((6, 3)).astype(np.float32)
        encoded = {cut: outputs(numbers, feeds)[cut], "x": feeds["x"]}
        loss = other.step(encoded, target=target)["loss"]
        assert executor.step(feeds, target=target)["loss"] == pytest.approx(loss, rel=1e-5)
    assert {*executor.parameters} == {*other.parameters}

    trained = executor.trained()
    onnx.checker.check_model(trained)
    assert [x.name for x in trained.graph.input] == ["s", "k", "x"]
    np.testing.assert_allclose(outputs(trained, feeds)["y"], executor.predict(feeds)["y"], rtol=1e-5)


def whole_typed(model: onnx.ModelProto, name: str, feeds: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Return a model that declares the type of a value as ONNX Runtime computes it."""
    array = outputs(model, feeds)[name]
    kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    typed.graph.output.pop()
    shape = ["N", *array.shape[1:]]
    typed.graph.value_info.append(onnx.helper.make_tensor_value_info(name, kind, shape))
    return typed


def test_outputs_that_strings_alone_decide_come_back():
    case = dataclasses.replace(CASES["LabelEncoder"])
    case.nodes += " copy = Identity(s) next1 = Add(i, one)"
    whole = whole_of(case, "float[N,3] y, string[N] copy, int64[N] next1, int64[N] i")
    executor = graphopt.Executor(graphopt.compile(whole, **STEPS), native=False)
    feeds = batch_of(5)
    expected, found = outputs(whole, feeds), outputs(executor.trained(), feeds)
    assert [*found] == ["y", "copy", "next1", "i"]
    for name, x in expected.items():
        assert np.array_equal(found[name], x) if x.dtype.kind in "Oi" else np.allclose(found[name], x)


def test_a_string_that_nothing_reads_is_fed_and_ignored():
    whole = onnx.parser.parse_model(f"{HEAD} g (string[N] s, float[N,4] x) => (float[N,1] y) {{ y = MatMul(x, w) }}")
    whole.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((4, 1), np.float32), "w"))
    executor = graphopt.Executor(graphopt.compile(whole, **STEPS), native=False)
    feeds = {name: x for name, x in batch_of(3).items() if name != "k"}
    assert executor.step(feeds, target=np.zeros((3, 1), np.float32))["loss"] > 0
    assert [x.name for x in executor.trained().graph.input] == ["s", "x"]


def test_fit_takes_arrays_of_strings_and_refuses_numbers(tmp_path):
    graphopt.save(graphopt.compile(whole_of(CASES["LabelEncoder"]), **STEPS), tmp_path / "step.onnx")
    data = {**batch_of(40), "target": np.zeros((40, 3), np.float32)}
    records = []
    for texts in (data["s"], data["s"].astype(str)):
        executor = graphopt.Executor(tmp_path / "step.onnx", native=False)
        records.append(graphopt.fit(executor, {**data, "s": texts}, epochs=3, batch_size=8)[-1]["loss"])
    assert records[0] == records[1] < 1.0
    assert graphopt.evaluate(executor, data)["loss"] < 1.0
    with pytest.raises(GraphoptError, match=r"data 's': expected strings, found float64: .*astype\(str\)"):
        graphopt.fit(executor, {**data, "s": np.zeros(40)}, epochs=1)


def test_a_check_on_strings_compares_the_file():
    data = {**batch_of(6), "target": np.ones((6, 3), np.float32)}
    table = graphopt.check(whole_of(CASES["OneHotEncoder"]), data, **STEPS)
    assert {(x.part, x.verdict) for x in table.findings} == {
        ("file", "agrees"),
        ("gradient", "agrees"),
        ("update", "agrees"),
    }


def test_a_note_of_encoders_is_checked():
    step = graphopt.compile(whole_of(CASES["OneHotEncoder"]), **STEPS)
    step.metadata_props["graphopt.encoders"] = '{"inputs": ["s"], "part": "AAAA"}'
    with pytest.raises(GraphoptError, match=r"metadata 'graphopt\.encoders': expected names of inputs and the part"):
        graphopt.Executor(step)


def people(rows: int = 120):
    pandas = pytest.importorskip("pandas")
    rng = np.random.default_rng(0)
    columns = {
        "age": rng.normal(40, 10, rows).astype(np.float32),
        "city": rng.choice(["Bern", "Oslo", "Rome"], rows),
        "job": rng.choice(["smith", "cook"], rows),
    }
    table = pandas.DataFrame(columns)
    return table, ((table.age > 40) ^ (table.city == "Oslo")).to_numpy().astype(np.int64)


TYPES = [
    ("age", FloatTensorType([None, 1])),
    ("city", StringTensorType([None, 1])),
    ("job", StringTensorType([None, 1])),
]


@pytest.mark.parametrize("encoder", [OneHotEncoder(handle_unknown="ignore"), OrdinalEncoder()], ids=["hot", "ordinal"])
@pytest.mark.parametrize("labels", [[0, 1], ["no", "yes"]], ids=["numbers", "names"])
def test_a_pipeline_of_scikit_learn_trains(encoder, labels):
    table, classes = people()
    columns = ColumnTransformer([("texts", encoder, ["city", "job"]), ("numbers", StandardScaler(), ["age"])])
    pipeline = make_pipeline(columns, LogisticRegression()).fit(table, np.array(labels)[classes])
    file = to_onnx(pipeline, initial_types=TYPES, options={"zipmap": False}, target_opset=21)
    executor = graphopt.Executor(
        graphopt.compile(file, loss=passes.CrossEntropy(), optimizer=passes.Adam(0.1)), native=False
    )
    feeds = {name: table[[name]].to_numpy() for name in table}
    found = executor.predict(feeds)["probabilities"]
    np.testing.assert_allclose(found, pipeline.predict_proba(table), rtol=1e-4, atol=1e-5)
    before = executor.evaluate({**feeds, "target": classes})["loss"]
    graphopt.fit(executor, {**feeds, "target": 1 - classes}, epochs=20)
    found = outputs(executor.trained(), feeds)
    assert [*found] == ["label", "probabilities"]
    assert np.mean(found["label"] == np.array(labels)[1 - classes]) > 0.5
    assert executor.evaluate({**feeds, "target": 1 - classes})["loss"] < before + 0.1


def test_texts_of_tf_idf_train():
    rng = np.random.default_rng(0)
    texts = np.array([[" ".join(rng.choice(["good", "bad", "fine", "poor"], 4))] for _ in range(80)], object)
    classes = np.array(["good" in text for (text,) in texts]).astype(np.int64)
    vectorizer = ColumnTransformer([("texts", TfidfVectorizer(), 0)])
    pipeline = make_pipeline(vectorizer, LogisticRegression()).fit(texts, classes)
    file = to_onnx(pipeline, initial_types=[("s", StringTensorType([None, 1]))], options={"zipmap": False})
    for node in file.graph.node:  # machines may have no other locale
        if node.op_type == "StringNormalizer":
            kept = [x for x in node.attribute if x.name != "locale"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("locale", "C")])
    executor = graphopt.Executor(
        graphopt.compile(file, loss=passes.CrossEntropy(), optimizer=passes.Adam(0.1)), native=False
    )
    found = executor.predict(s=texts)["probabilities"]
    np.testing.assert_allclose(found, outputs(file, {"s": texts})["probabilities"], rtol=1e-5)
    losses = [executor.step(s=texts, target=classes)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0]
    trained = executor.trained()
    onnx.checker.check_model(trained)
    np.testing.assert_allclose(
        outputs(trained, {"s": texts})["probabilities"],
        executor.predict(s=texts)["probabilities"],
        rtol=1e-5,
    )


@pytest.mark.parametrize("classifier", [SGDClassifier("log_loss"), LogisticRegression(), MLPClassifier([2])])
def test_probabilities_in_place_of_logits_are_said(classifier):
    X = np.random.default_rng(0).random((60, 4)).astype(np.float32)
    fitted = classifier.set_params(max_iter=9, tol=9.0).fit(X, X[:, 0] > 0.5)
    file = to_onnx(fitted, X[:1], options={"zipmap": False})
    with pytest.warns(UserWarning, match="'probabilities' comes out of .*: set from_logits=False"):
        graphopt.compile(file, loss=passes.CrossEntropy())


def test_a_trained_model_computes_no_value_twice():
    """The label's part has a constant of its own that the model reads, too."""
    rng = np.random.default_rng(0)
    X = rng.random((50, 4)).astype(np.float32)
    pipeline = make_pipeline(Normalizer(), LogisticRegression()).fit(X, X[:, 0] > 0.5)
    file = to_onnx(pipeline, X[:1], options={"zipmap": False})
    step = graphopt.compile(file, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    trained = graphopt.Executor(step, native=False).trained()
    onnx.checker.check_model(trained)
    made = [y for node in trained.graph.node for y in node.output]
    assert len({*made, *(x.name for x in trained.graph.initializer)}) == len(made) + len(trained.graph.initializer)


def test_the_command_reads_the_columns_that_the_file_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, classes = people()
    columns = ColumnTransformer([("texts", OneHotEncoder(), ["city", "job"]), ("numbers", StandardScaler(), ["age"])])
    pipeline = make_pipeline(columns, LogisticRegression()).fit(table, classes)
    onnx.save(to_onnx(pipeline, initial_types=TYPES, options={"zipmap": False}), "pipeline.onnx")
    table.assign(target=classes).to_csv("people.csv", index=False)
    from graphopt.cli.command import main

    overrides = [
        "model=pipeline.onnx",
        "data=csv",
        "data.path=people.csv",
        "loss=cross_entropy",
        "fit.epochs=1",
    ]
    assert main([*overrides, "folder=run"]) == 0
    session = onnxruntime.InferenceSession("run/trained.onnx")
    assert [x.name for x in session.get_inputs()] == ["age", "city", "job"]
    assert main(["check", *overrides[:-1], "folder=checked"]) == 0


def test_a_trainer_takes_strings():
    whole = whole_of(CASES["OneHotEncoder"])
    trainer = graphopt.Trainer(whole, max_iter=3, **STEPS)
    X, y = batch_of(20), np.zeros((20, 3), np.float32)
    trainer.fit(X, y)
    predicted = trainer.predict(X)
    np.testing.assert_allclose(predicted, outputs(trainer.get_trained_onnx(), X)["y"], rtol=1e-5)
    np.testing.assert_allclose(trainer.losses(X, y), np.square(predicted).mean(1), rtol=1e-4)
    assert np.isfinite(trainer.score(X, y))


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("encoders_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("encoders_mistakes", call, globals())
