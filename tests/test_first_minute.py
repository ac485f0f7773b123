"""Check what people from Keras, Lightning, skorch and scikit-learn try first: tuples, predict, progress, summaries."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from scipy.special import softmax

import graphopt
import passes
from graphopt import models
from graphopt.data.foreign import as_dataset, has_rows, relabelled
from graphopt.training.records import Records

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
NAMED = {"x": X, "target": Y}
MODEL = models.mlp(4, 2, hidden=8)
STEP = graphopt.compile(MODEL, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test write into a folder of its own."""
    monkeypatch.chdir(tmp_path)


def executor(step: Any = STEP) -> graphopt.Executor:
    return graphopt.Executor(step, native=False)


def numbers(records: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in x.items() if k not in ("seconds", "samples_per_second")} for x in records]


# --- Data as tuples ---


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.astype(np.float64), Y.astype(np.int32)),
        (X.tolist(), Y.tolist()),
        ({"x": X}, Y),
    ],
)
def test_a_tuple_trains_as_its_arrays_by_name(data: Any) -> None:
    expected = graphopt.fit(executor(), NAMED, epochs=2, seed=3)
    found = graphopt.fit(executor(), data, epochs=2, seed=3)
    assert numbers(found) == numbers(expected)
    assert graphopt.evaluate(executor(), data) == graphopt.evaluate(executor(), NAMED)


def test_series_frames_and_tensors_are_taken_as_arrays() -> None:
    pandas, torch = pytest.importorskip("pandas"), pytest.importorskip("torch")
    expected = numbers(graphopt.fit(executor(), NAMED, epochs=1))
    frame, series = pandas.DataFrame(X, columns=list("abcd")), pandas.Series(Y)
    assert numbers(graphopt.fit(executor(), (frame, series), epochs=1)) == expected
    assert numbers(graphopt.fit(executor(), (torch.tensor(X), torch.tensor(Y)), epochs=1)) == expected


def test_a_third_part_is_the_sample_weight() -> None:
    loss = passes.CrossEntropy(sample_weight=True)
    step = graphopt.compile(MODEL, loss=loss, optimizer=passes.SGD(0.1))
    weights = RANDOM.random(60).astype(np.float32)
    expected = graphopt.fit(executor(step), {**NAMED, "sample_weight": weights}, epochs=2)
    assert numbers(graphopt.fit(executor(step), (X, Y, weights), epochs=2)) == numbers(expected)


def test_batches_stay_batches() -> None:
    batch = {"x": X[:20], "target": Y[:20]}
    assert has_rows((X, Y))
    assert not has_rows([batch, batch])
    assert not has_rows((batch, batch))
    runner = executor()
    graphopt.fit(runner, (batch, batch, batch), epochs=1, validation=None)
    assert runner.batches == 3


def test_a_model_of_several_inputs_needs_their_names() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> f (float[N,4] a, float[N,4] b) => (float[N,1] y) '
        "<float[4,1] w = {0.5, -0.25, 1.5, 0.75}> { s = Add(a, b) y = MatMul(s, w) }"
    )
    step = graphopt.compile(model, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01))
    target = X[:, :1]
    with pytest.raises(graphopt.GraphoptError, match=r"'a', 'b', 'target'.* as X, write \{'a': ..., 'b': ...\}"):
        graphopt.fit(executor(step), (X, target))
    named = graphopt.fit(executor(step), {"a": X, "b": X, "target": target}, epochs=1)
    assert numbers(graphopt.fit(executor(step), ({"a": X, "b": X}, target), epochs=1)) == numbers(named)


def test_validation_may_be_a_tuple() -> None:
    expected = graphopt.fit(executor(), NAMED, epochs=1, validation={"x": X[:20], "target": Y[:20]})
    found = graphopt.fit(executor(), (X, Y), epochs=1, validation=(X[:20], Y[:20]))
    assert numbers(found) == numbers(expected)


# --- Names of classes ---


def test_names_of_classes_are_numbered_in_their_order_everywhere() -> None:
    names = np.array(["no", "yes"])[Y]
    runner, seen = executor(), []
    graphopt.fit(runner, (X, names), epochs=2, callbacks=lambda run, record: seen.append(run.labels))
    assert seen == [["no", "yes"]] * 2
    assert numbers(graphopt.fit(executor(), (X, names), epochs=2)) == numbers(
        graphopt.fit(executor(), (X, Y), epochs=2)
    )
    ones = Y == 1
    only = graphopt.evaluate(runner, (X[ones], names[ones]))  # in which "yes" is the only class
    assert only == graphopt.evaluate(runner, (X[ones], Y[ones]))
    with pytest.raises(graphopt.GraphoptError, match="data: expected the classes no, yes, found perhaps"):
        graphopt.evaluate(runner, (X, np.where(ones, "perhaps", "no")))
    graphopt.fit(runner, (X[ones], names[ones]), epochs=1)  # more data, of the same numbers
    assert runner.labels == ["no", "yes"]
    assert graphopt.evaluate(runner, (X[ones], names[ones]))["accuracy"] > only["accuracy"] - 0.01
    with pytest.raises(graphopt.GraphoptError, match="data: expected the classes no, yes, found perhaps"):
        graphopt.fit(runner, (X, np.where(ones, "perhaps", "no")))
    ignored = graphopt.data.Dataset({**NAMED, "target": np.where(ones, 0, -100)}, labels=("yes",))
    assert relabelled(ignored, ["no", "yes"], "data").arrays["target"].tolist() == np.where(ones, 1, -100).tolist()
    notes = {note.key: note.value for note in runner.trained().metadata_props}
    assert json.loads(notes["labels"]) == ["no", "yes"]
    assert executor(graphopt.compile(runner.trained(), loss=passes.CrossEntropy(), optimizer=passes.SGD())).labels == [
        "no",
        "yes",
    ]
    variable = getattr(np.dtypes, "StringDType", lambda: object)()  # text of NumPy 2
    for strings in (np.array(["u", "v"], variable), np.array([b"u", b"v"]), [["u"], ["v"]]):
        assert as_dataset((X[:2], strings)).labels == ("u", "v")
    assert as_dataset((X, Y)).labels is None


# --- predict ---


def test_predict_is_the_runtime_s_outputs_in_batches() -> None:
    runner = executor()
    graphopt.fit(runner, (X, Y), epochs=3)
    graphopt.save(runner.trained(), "trained.onnx")
    expected = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": X})[0]
    for model in (runner, runner.trained(), "trained.onnx"):
        for data in (X, X.tolist(), (X, Y), NAMED, {"x": X}, graphopt.data.Dataset(NAMED)):
            for size in (7, 256):
                outputs = graphopt.predict(model, data, batch_size=size)
                assert list(outputs) == ["y", "label", "probabilities"]
                np.testing.assert_allclose(outputs["y"], expected, rtol=1e-5, atol=1e-6)
                np.testing.assert_array_equal(outputs["label"], outputs["y"].argmax(axis=1))
                np.testing.assert_allclose(outputs["probabilities"], softmax(outputs["y"], axis=1), rtol=1e-5)


# --- Functions as callbacks ---


def test_functions_are_called_with_the_run_and_its_record() -> None:
    seen: list[Any] = []

    def stop(run: graphopt.callbacks.Run, record: dict[str, Any]) -> None:
        seen.append((run.epoch, record["validation_loss"]))
        if run.epoch == 2:
            run.stop("enough")

    records = graphopt.fit(executor(), (X, Y), epochs=5, callbacks=[stop, lambda run, record: None])
    assert seen == [(record["epoch"], record["validation_loss"]) for record in records]
    assert len(records) == 2


def test_one_callback_needs_no_list() -> None:
    early = graphopt.callbacks.EarlyStopping("loss", patience=1, min_delta=100)
    assert len(graphopt.fit(executor(), (X, Y), epochs=9, callbacks=early)) == 2
    assert "f1" in graphopt.fit(executor(), (X, Y), epochs=1, metrics="f1")[0]


# --- Augmentation ---


def shifted(batch: dict[str, np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
    batch["x"] += random.standard_normal(batch["x"].shape).astype(np.float32)  # in place
    return batch


class Interrupt(graphopt.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, run: Any, record: Any) -> None:
        if run.step == self.step:
            raise InterruptedError


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("shuffle", [True, False, "consecutive"])
def test_a_resumed_run_transforms_to_the_same_bits(tmp_path: Any, prefetch: int, shuffle: Any) -> None:
    data = (X.copy(), Y)
    options: dict[str, Any] = {"epochs": 3, "batch_size": 7, "transform": shifted, "shuffle": shuffle}
    options["prefetch"] = prefetch
    whole = executor()
    expected = graphopt.fit(whole, data, **options)
    assert np.array_equal(data[0], X)  # the function changed copies
    assert numbers(expected) != numbers(graphopt.fit(executor(), data, **{**options, "transform": None}))
    for step in (4, 9):  # in the middle of the first epoch, and of the second
        with pytest.raises(InterruptedError):
            graphopt.fit(executor(), data, **options, checkpoint=tmp_path / str(step), callbacks=Interrupt(step))
        resumed = executor()
        found = graphopt.fit(resumed, data, **options, checkpoint=tmp_path / str(step), resume=True)
        assert numbers(found) == numbers(expected)
        assert all(np.array_equal(resumed.state[k], whole.state[k]) for k in whole.state)


def test_batches_of_an_iterable_are_transformed_the_same_after_an_interruption(tmp_path: Any) -> None:
    batches = [{"x": X[i : i + 10], "target": Y[i : i + 10]} for i in range(0, 60, 10)]
    options: dict[str, Any] = {"epochs": 2, "validation": None, "transform": shifted}
    expected = executor()
    graphopt.fit(expected, batches, **options)
    resumed = executor()
    graphopt.fit(executor(), batches, **{**options, "epochs": 1}, checkpoint=tmp_path)
    graphopt.fit(resumed, batches, **options, checkpoint=tmp_path, resume=True)
    assert all(np.array_equal(resumed.state[k], expected.state[k]) for k in expected.state)


def test_held_out_rows_are_not_transformed_and_those_that_train_are_all() -> None:
    seen: list[np.ndarray] = []

    def remember(batch: dict[str, np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
        seen.append(batch["x"])
        return batch

    graphopt.fit(executor(), (X, Y), epochs=1, seed=5, transform=remember)
    training, held_out = graphopt.data.hold_out(60, 0.2, seed=5)
    rows = np.concatenate(seen)
    assert {row.tobytes() for row in rows} == {X[i].tobytes() for i in training}
    assert len(held_out) == 12


# --- Progress ---


def test_nothing_is_shown_unless_somebody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    graphopt.fit(executor(), (X, Y), epochs=1)
    graphopt.fit(executor(), (X, Y), epochs=1, verbose=False)
    assert capsys.readouterr() == ("", "")
    graphopt.fit(executor(), (X, Y), epochs=1, verbose=True)
    assert "epoch 1/1" in capsys.readouterr().out


def test_a_terminal_shows_progress_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    graphopt.fit(executor(), (X, Y), epochs=2)
    assert capsys.readouterr().out.count("epoch 2/2  loss") == 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    graphopt.fit(executor(), (X, Y), epochs=2, callbacks=graphopt.callbacks.ProgressBar())
    assert capsys.readouterr().out.count("epoch 2/2  loss") == 1
    graphopt.Trainer(MODEL, loss=passes.CrossEntropy(), max_iter=1).fit(X, Y)
    assert capsys.readouterr().out == ""


# --- What a session shows ---


def test_records_are_a_list_that_shows_itself_as_a_table() -> None:
    records = graphopt.fit(executor(), (X, Y), epochs=15, metrics=["accuracy", "confusion_matrix"])
    assert isinstance(records, list)
    assert json.loads(json.dumps(records)) == records == pickle.loads(pickle.dumps(records))
    lines = repr(records).splitlines()
    assert lines[0].split() == [
        "epoch",
        "loss",
        "learning",
        "rate",
        "validation",
        "loss",
        "accuracy",
        "seconds",
    ]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "...", *map(str, range(8, 16))]
    assert len({len(line) for line in lines}) == 1
    assert records._repr_html_().count("<tr>") == 12
    assert repr(Records()) == "[]"
    assert "&lt;b&gt;" in Records([{"<b>": 1.0}])._repr_html_()


def test_models_steps_and_executors_show_themselves_in_a_line() -> None:
    runner = executor()
    runner.step(x=X, target=Y)
    assert repr(MODEL) == (
        "<model 'mlp': x float32[batch,4] -> y; 4 weights of 58 numbers, 3 nodes; graphopt.summary shows its layers>"
    )
    assert repr(STEP).startswith(
        "<training graph 'mlp': x float32[batch,4], target int64[batch] -> loss, y; 4 parameters"
    )
    assert repr(runner) == (
        "Executor('mlp', device='cpu', provider='CPUExecutionProvider', target='auto': 1 batches so far, 58 parameters "
        "in 4 tensors)"
    )
    for model in (
        graphopt.load(runner.trained()),
        graphopt.lower(STEP, "plain"),
        graphopt.grad(MODEL, ["x"]),
    ):
        assert len(repr(model)) < 300
    assert "Gemm" in str(MODEL)  # the whole graph, as onnx_ir prints it


def test_a_summary_counts_what_trains() -> None:
    frozen = graphopt.compile(
        MODEL,
        parameters=passes.Parameters(freeze="layers.0.*"),
        loss=passes.CrossEntropy(),
        optimizer=passes.AdamW(),
    )
    lines = [line.split() for line in str(graphopt.summary(frozen)).splitlines()]
    assert lines[1] == ["layers.0", "Gemm", "[batch,8]", "40", "no"]
    assert lines[3] == ["layers.2", "Gemm", "[batch,2]", "18", "yes"]
    assert lines[-1] == ["58", "parameters,", "of", "which", "18", "train"]
    assert str(graphopt.summary(graphopt.Executor(frozen, native=False))) == str(graphopt.summary(frozen))
    assert graphopt.summary(MODEL)._repr_html_().count("<tr>") == 4


def test_the_bytes_of_a_file_are_a_model() -> None:
    graphopt.save(MODEL, "my.onnx")
    with open("my.onnx", "rb") as file:
        content = file.read()
    assert graphopt.listing(content) == graphopt.listing("my.onnx")
    with pytest.raises(graphopt.GraphoptError, match="the model: expected the bytes of an ONNX model, found others"):
        graphopt.load(content[: len(content) // 2])
