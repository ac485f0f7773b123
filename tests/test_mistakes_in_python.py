"""Answer a newcomer's mistakes in Python in one line: the thing, what was expected and found, what to do."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest

import graphopt
import passes
from graphopt import callbacks, data, models

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
MODEL = models.mlp(4, 2, hidden=8)
LOSS, SGD = passes.CrossEntropy(), passes.SGD(0.1)
PIPELINE = graphopt.standard(loss=LOSS, optimizer=SGD)
STEP = graphopt.compile(MODEL, loss=LOSS, optimizer=SGD)
Case = tuple[Callable[[Any], Any], str]


class Unfinished(passes.Loss):
    def forward(self, op, prediction, target):
        return op.Abs(prediction - target)


class Keras(graphopt.Callback):
    def on_train_begin(self, run):
        pass


class Short(graphopt.Callback):
    def on_epoch_end(self, run):
        pass


def compiled(**steps: Any) -> Any:
    return graphopt.compile(MODEL, **{"loss": LOSS, "optimizer": SGD, **steps})


def fitted(t: Any, **options: Any) -> Any:
    return graphopt.fit(t.executor, (X, Y), **{"epochs": 1, **options})


def torch_module(t: Any) -> Any:
    return pytest.importorskip("torch").nn.Linear(2, 3)


def torch_loss(t: Any) -> Any:
    return pytest.importorskip("torch").nn.CrossEntropyLoss()


def session(t: Any) -> Any:
    return pytest.importorskip("onnxruntime").InferenceSession(
        "model.onnx", providers=["CPUExecutionProvider"]
    )


def estimator(t: Any) -> Any:
    return pytest.importorskip("sklearn.linear_model").LinearRegression()


def twice(t: Any) -> Any:
    for _ in range(2):
        graphopt.fit(graphopt.Executor(STEP, native=False), (X, Y), epochs=1, checkpoint="run")


SOURCES: list[Case] = [
    (lambda t: graphopt.compile({}), "model: expected the path of an ONNX file, .* found a dict"),
    (lambda t: graphopt.compile(None), "found None"),
    (lambda t: graphopt.compile(X), "found an ndarray"),
    (lambda t: graphopt.compile(b"no model"), "expected the bytes of an ONNX model"),
    (lambda t: graphopt.compile("missing.onnx"), "missing.onnx: no such file"),
    (
        lambda t: graphopt.compile(torch_module(t)),
        "found torch's Linear: export it first, by torch.onnx.export",
    ),
    (lambda t: graphopt.compile(estimator(t)), "found sklearn's LinearRegression: graphopt.from_sklearn"),
    (lambda t: graphopt.compile(session(t)), "found onnxruntime's InferenceSession: give the file"),
    (lambda t: graphopt.Executor(t.executor), r"found an Executor: executor.trained\(\) returns"),
    (
        lambda t: graphopt.Executor(MODEL),
        r"executor: .* found an inference model: compile it first, graphopt.compile\(",
    ),
    (
        lambda t: graphopt.Executor(graphopt.compile(MODEL, loss=LOSS)),
        "without an optimizer: compile it with optimizer=",
    ),
    (lambda t: graphopt.LocalSGD(MODEL), "LocalSGD: expected a training graph, found an inference model"),
    (lambda t: graphopt.DataParallel(STEP), r"found a Model: write graphopt.split_step\("),
    (lambda t: graphopt.split_step(MODEL, PIPELINE), "split_step: expected a pipeline, found a Model"),
    (lambda t: graphopt.adapt(MODEL, PIPELINE, (X, Y)), "adapt: expected a pipeline, found a Model"),
    (
        lambda t: graphopt.export_artifacts(MODEL, LOSS, "x"),
        "export_artifacts: expected a pipeline, found a CrossEntropy",
    ),
    (lambda t: graphopt.export_hosts(t.executor, "h"), "found an Executor: .* executor.model"),
    (
        lambda t: graphopt.export_hosts(MODEL, "h"),
        "export_hosts: expected a training graph, found an inference model",
    ),
    (lambda t: graphopt.save(t.executor, "a.onnx"), r"save: .* found an Executor: executor.trained\(\)"),
    (
        lambda t: graphopt.save("a.onnx", MODEL),
        r"save: expected a model first, found 'a.onnx': write save\(model, path\)",
    ),
    (lambda t: graphopt.save(MODEL, 3), "save: expected the path of a file, found an int"),
    (lambda t: graphopt.save(MODEL, ""), "save: expected the path of a file"),
    *[
        (
            lambda t, path=path: t.executor.save(path),
            r"save: .* of a checkpoint, .* of a model: .* graphopt.save\(executor.trained\(\), 'm.*\)",
        )
        for path in ("model.onnx", Path("missing/Model.ONNX"))
    ],
    (lambda t: graphopt.listing(3), "found an int"),
    (lambda t: graphopt.dot(None), "found None"),
    (lambda t: graphopt.summary([]), "found a list"),
    (
        lambda t: passes.Simplify()("model.onnx"),
        "Simplify: expected an onnx_ir.Model, found 'model.onnx': graphopt.load",
    ),
]
STEPS: list[Case] = [
    (
        lambda t: compiled(loss=passes.CrossEntropy),
        r"found the class CrossEntropy: write loss=passes.CrossEntropy\(\)",
    ),
    (lambda t: compiled(loss="cross_entropy"), r"found 'cross_entropy': write loss=passes.CrossEntropy\(\)"),
    (
        lambda t: compiled(loss=torch_loss(t)),
        r"found torch's CrossEntropyLoss: write loss=passes.CrossEntropy\(",
    ),
    (lambda t: compiled(loss=lambda a, b: a - b), "found a function of a and b: passes.CustomLoss"),
    (lambda t: compiled(loss=SGD), r"found SGD, which is for optimizer: write optimizer=passes.SGD\("),
    (lambda t: compiled(optimizer="adam"), r"found 'adam': write optimizer=passes.Adam\(\)"),
    (lambda t: compiled(optimizer=passes.AdamW), r"write optimizer=passes.AdamW\(\)"),
    (lambda t: compiled(parameters="layers.*"), r"write parameters=passes.Parameters\('layers.\*'\)"),
    (lambda t: compiled(clip=1.0), r"write clip=passes.ClipGlobalNorm\(1.0\)"),
    (lambda t: compiled(accumulate=4), r"write accumulate=passes.Accumulate\(4\)"),
    (lambda t: compiled(regularizer=0.1), r"write regularizer=passes.L2\(0.1\)"),
    (lambda t: compiled(precision="float16"), r"write precision=passes.MixedPrecision\('float16'\)"),
    (
        lambda t: compiled(optimiser=SGD),
        "compile: unknown argument 'optimiser', nearest: 'optimizer'; known: accumulate",
    ),
    (
        lambda t: compiled(learning_rate=0.1),
        r"compile: unknown argument 'learning_rate': .*passes.AdamW\(learning_rate=",
    ),
    (lambda t: compiled(epochs=3), "unknown argument 'epochs': graphopt.fit takes epochs"),
    (
        lambda t: graphopt.compile(MODEL, LOSS),
        "at most 1 without a name, found 2: name the steps, such as loss=",
    ),
    (
        lambda t: graphopt.Pipeline(SGD),
        "Pipeline: expected arguments, none without a name, found 1: give a name to each",
    ),
    (
        lambda t: graphopt.grad(MODEL, "x"),
        r"grad: expected names of inputs and weights, found 'x': write \['x'\]",
    ),
    (lambda t: graphopt.grad(MODEL), "grad: expected 'wrt', found none"),
    (lambda t: graphopt.lower("plain", STEP), "target: expected a word or a graphopt.Target, found a Model"),
    (lambda t: graphopt.Target("mine", 3), "Target: expected a pipeline, found an int"),
    (lambda t: passes.SGD(lr=0.1), "SGD: unknown argument 'lr', nearest: 'learning_rate'; known: dampening"),
    (lambda t: passes.AdamW(betas=(0.9, 0.99)), "AdamW: unknown argument 'betas', nearest: 'beta1'"),
    (lambda t: passes.AdamW(eps=1e-8), "nearest: 'epsilon'"),
    (lambda t: passes.Cosine(T_max=10), "nearest: 'steps'"),
    (lambda t: passes.StepDecay(gamma=0.1), "nearest: 'factor'"),
    (lambda t: passes.SGD(groups={"*.bias": 0.1}), r"SGD\(groups=.*expected a sequence, found \{"),
    (
        lambda t: passes.CrossEntropy(axis="1"),
        r"CrossEntropy\(axis='1'\): expected a whole number, found '1'",
    ),
    (lambda t: passes.CrossEntropy(from_logits="no"), "expected True or False, found 'no'"),
    (lambda t: passes.CrossEntropy(class_weights=3), "expected a sequence, a word or None, found 3"),
    (lambda t: passes.Losses([LOSS]), "Losses.*expected a mapping"),
    (
        lambda t: compiled(loss=passes.Losses({"y": passes.CrossEntropy})),
        r"Losses: y: .*passes.CrossEntropy\(\), found the class",
    ),
    (lambda t: passes.CustomLoss(), "CustomLoss: expected 'function', found none"),
    (
        lambda t: compiled(loss=passes.CustomLoss(3)),
        r"CustomLoss: expected a function of \(op, y, target\), found an int",
    ),
    (lambda t: compiled(loss=passes.CustomLoss(lambda a: a)), r"found one of \(a\)"),
    (lambda t: Unfinished(), "Unfinished: expected the method compare, found none: define it"),
]
EXECUTORS: list[Case] = [
    (lambda t: graphopt.Executor(STEP, thread=2), "Executor: unknown argument 'thread', nearest: 'threads'"),
    (
        lambda t: graphopt.Executor(STEP, threads="2"),
        "threads='2'.*expected a whole number or None, found '2'",
    ),
    (lambda t: graphopt.Executor(STEP, deterministic="yes"), "expected True or False, found 'yes'"),
    (
        lambda t: graphopt.Executor(STEP, device=0),
        "device: expected 'cpu', 'cuda', 'cuda:N' or 'webgpu', found 0",
    ),
    (lambda t: graphopt.Executor(STEP, session_options=3), "expected a mapping or None, found 3"),
    (lambda t: graphopt.Executor(STEP, target="nativ"), "unknown target 'nativ', nearest: 'native'"),
    (lambda t: t.executor.step(X, Y), r"\{'x': ..., 'target': ...\}, found an ndarray and an ndarray"),
    (lambda t: t.executor.step((X, Y)), r"\{'x': ..., 'target': ...\}, found a tuple"),
    (lambda t: t.executor.step(x=X[:0], target=Y[:0]), "batch: expected rows, found none"),
    (lambda t: t.executor.step(x=X.tolist(), target=Y), "found list: numpy.asarray makes one of it"),
    (
        lambda t: t.executor.run({"x": X, "target": Y}),
        r"run: .* found a dict: a single batch is for executor.step\(batch\)",
    ),
    (
        lambda t: t.executor.run([(X, Y)]),
        r"batch: expected arrays by name, \{'x': ..., 'target': ...\}, found a tuple",
    ),
    (lambda t: t.executor.run(None), "run: expected an iterable of batches, found None"),
    (lambda t: t.executor.evaluate(X, Y), "found an ndarray and an ndarray"),
    (lambda t: setattr(t.executor, "lr", 0.1), "executor: unknown attribute 'lr', nearest: 'learning_rate'"),
    (lambda t: setattr(t.executor, "learning_rate", "0.1"), "expected a number, found '0.1'"),
    (lambda t: setattr(t.executor, "state", 3), "state: expected arrays by name, found an int"),
    (lambda t: t.executor.set_hyperparameters(lr=1), "unknown hyperparameter 'lr', nearest: 'learning_rate'"),
    (lambda t: t.executor.save(), "save: expected 'path', found none"),
    (lambda t: t.executor.save("a", "b"), "save: expected arguments, at most 1 without a name, found 2"),
    (lambda t: t.executor.load(3), "load: expected the path of a file, found an int"),
    (lambda t: graphopt.run(MODEL, X), r"run: expected arrays by name, .* found an ndarray"),
    (lambda t: graphopt.run(MODEL, {"x": X.astype(float)}), "input 'x': expected float32, found float64"),
    (
        lambda t: graphopt.ForwardBackward(MODEL, loss=LOSS),
        "unknown argument 'loss': graphopt.compile takes loss",
    ),
]
FIT: list[Case] = [
    (
        lambda t: graphopt.fit(t.executor, X, Y),
        r"fit: .* found 3: give X and y as one tuple, fit\(executor, \(X, y\)\)",
    ),
    (
        lambda t: graphopt.fit(STEP, (X, Y)),
        r"fit: expected an executor first, found a Model: write fit\(graphopt.Executor",
    ),
    (lambda t: graphopt.fit("model.onnx", (X, Y)), "found 'model.onnx': write fit"),
    (lambda t: graphopt.fit((X, Y), t.executor), r"found a tuple: write fit\(executor, data\)"),
    (lambda t: graphopt.fit(t.executor), "fit: expected 'data', found none"),
    (lambda t: graphopt.fit(t.executor, X), r"data: expected \(X, y\), .* found an ndarray"),
    (lambda t: graphopt.fit(t.executor, None), r"data: expected \(X, y\), .* found None"),
    (lambda t: graphopt.fit(t.executor, "data.csv"), "found 'data.csv'"),
    (
        lambda t: graphopt.fit(t.executor, (X,)),
        r"expected \(X, y\) or \(X, y, sample_weight\), found \(an ndarray\)",
    ),
    (lambda t: graphopt.fit(t.executor, (X, None)), r"found \(an ndarray, None\)"),
    (
        lambda t: graphopt.fit(t.executor, (X, Y[:-1])),
        "expected the same number of rows in every array, found 'X' 60",
    ),
    (
        lambda t: graphopt.fit(t.executor, (X, Y.astype(float))),
        "expected int64, found float64",
    ),
    (
        lambda t: graphopt.fit(t.executor, [X, Y], validation=None),
        r"batch 1: .*yield \{'x': ..., 'target': ...\}",
    ),
    (
        lambda t: graphopt.fit(t.executor, {"x": X.tolist(), "target": Y}),
        "found list: numpy.asarray makes one of it",
    ),
    (lambda t: fitted(t, epoch=3), "fit: unknown argument 'epoch', nearest: 'epochs'; known: allow_nan"),
    (lambda t: fitted(t, validation_split=0.2), "nearest: 'validation'"),
    (lambda t: fitted(t, lr=0.1), r"fit: unknown argument 'lr': an optimizer takes it, .*learning_rate=..."),
    (lambda t: fitted(t, optimizer=SGD), "unknown argument 'optimizer': graphopt.compile takes optimizer"),
    (lambda t: fitted(t, device="cuda"), "unknown argument 'device': graphopt.Executor takes device"),
    (
        lambda t: fitted(t, patience=3),
        "unknown argument 'patience': the callback EarlyStopping takes it",
    ),
    (lambda t: fitted(t, epochs="3"), r"fit\(epochs='3'\): expected a whole number"),
    (lambda t: fitted(t, verbose="yes"), r"fit\(verbose='yes'\): expected True or False"),
    (lambda t: fitted(t, validation=X), r"validation: data: expected \(X, y\)"),
    (lambda t: fitted(t, validation="0.2"), "validation: data: .* found '0.2'"),
    (lambda t: fitted(t, metrics="acc"), "unknown metric 'acc', nearest: 'accuracy'"),
    (
        lambda t: fitted(t, metrics=3),
        "metrics: expected names such as 'accuracy', or functions, found an int",
    ),
    (lambda t: fitted(t, checkpoint=3), r"Checkpoints\(folder=3\): expected a word or a path"),
    (
        twice,
        r"run: expected an empty folder for checkpoints, found those of another run: continue it by resume=True",
    ),
    (
        lambda t: fitted(t, transform=lambda batch: batch),
        r"transform: expected a function of \(batch, random\), found one",
    ),
    (
        lambda t: fitted(t, transform=lambda batch, random: None),
        "transform: expected arrays by name, found None: return",
    ),
    (
        lambda t: fitted(t, transform=lambda batch, random: {"x": batch["x"]}),
        "transform: data: expected arrays 'x', 'ta",
    ),
    (
        lambda t: graphopt.evaluate("model.onnx", (X, Y)),
        "evaluate: expected an executor first, found 'model.onnx'",
    ),
    (
        lambda t: graphopt.evaluate(t.executor, X, Y),
        r"give X and y as one tuple, evaluate\(executor, \(X, y\)\)",
    ),
    (
        lambda t: graphopt.evaluate(t.executor, (X, Y), metric="f1"),
        "unknown argument 'metric', nearest: 'metrics'",
    ),
    (
        lambda t: graphopt.evaluate(t.executor, (X, Y), batch_size=0),
        r"evaluate\(batch_size=0\): expected a whole number",
    ),
    (
        lambda t: graphopt.predict(STEP, X),
        r"found a training graph: write predict\(graphopt.Executor\(step\), data\)",
    ),
    (
        lambda t: graphopt.predict(X, t.executor),
        r"predict: expected a model first, .* write predict\(executor, X\)",
    ),
    (lambda t: graphopt.predict(t.executor, None), "data: X: expected an array of numbers"),
    (lambda t: graphopt.predict(t.executor, [["a"]]), "data: X: expected an array of numbers"),
    (
        lambda t: graphopt.predict(t.executor, {"target": Y}),
        "expected arrays for the model's inputs, found target alone",
    ),
]
CALLBACKS: list[Case] = [
    (
        lambda t: fitted(t, callbacks=["early_stopping"]),
        r"found 'early_stopping': write graphopt.callbacks.EarlyStopping\(",
    ),
    (
        lambda t: fitted(t, callbacks=callbacks.EarlyStopping),
        r"found the class EarlyStopping: write EarlyStopping\(",
    ),
    (lambda t: fitted(t, callbacks=3), "callbacks: expected objects of graphopt.callbacks, found an int"),
    (
        lambda t: fitted(t, callbacks=lambda run: None),
        r"expected a function of \(run, record\), found one of \(run\)",
    ),
    (
        lambda t: fitted(t, callbacks=Keras()),
        "Keras: unknown event 'on_train_begin', nearest: 'on_fit_begin'",
    ),
    (lambda t: fitted(t, callbacks=Short()), r"Short.on_epoch_end: expected a function of \(run, record\)"),
    (
        lambda t: fitted(t, callbacks=callbacks.EarlyStopping("val_loss")),
        "measure 'val_loss', nearest: 'validation_loss'",
    ),
    (lambda t: callbacks.EarlyStopping(restore_best_weights=True), "nearest: 'restore_best'"),
    (lambda t: callbacks.EarlyStopping(monitor=3), r"EarlyStopping\(monitor=3\): expected a word"),
    (lambda t: callbacks.ReduceOnPlateau(factor=2), r"expected a number in \(0, 1\)"),
    (lambda t: callbacks.TimeLimit(10), "TimeLimit: expected a time such as '90 s'"),
    (lambda t: callbacks.CSV(3), r"CSV\(path=3\): expected a word or a path"),
    (lambda t: graphopt.Callback(3), "Callback: expected arguments, none without a name, found 1"),
    (lambda t: graphopt.Checkpoints("c", kep=2), "Checkpoints: unknown argument 'kep', nearest: 'keep'"),
    (lambda t: graphopt.Checkpoints("c", every=10), "checkpoint.every: expected '100 steps'"),
]
REST: list[Case] = [
    (lambda t: models.mlp((4,)), "mlp: expected 'outputs', found none"),
    (lambda t: models.mlp("a", 2), r"expected the shape of a row, such as 64 or \(1, 8, 8\), found 'a'"),
    (lambda t: models.mlp(4, 2, units=8), "mlp: unknown argument 'units'; known: features, hidden"),
    (lambda t: models.cnn(64, 10), r"model cnn: expected images, .* found \[64\]"),
    (lambda t: data.csv("missing.csv"), "missing.csv: no such file"),
    (lambda t: data.csv("a.csv", sep=";"), "csv: unknown argument 'sep', nearest: 'delimiter'"),
    (lambda t: data.Dataset([1, 2]), "data: expected arrays by name, found a list"),
    (lambda t: data.Loader({"x": X}, batch=3), "Loader: unknown argument 'batch', nearest: 'batch_size'"),
    (lambda t: data.Loader({"x": X}, batch_size="a"), "batch_size: expected 1 or more, found 'a'"),
    (
        lambda t: data.hold_out(X, 0.2),
        r"hold_out: expected the number of rows, found an ndarray: give len\(X\)",
    ),
    (lambda t: graphopt.Trainer(MODEL, lr=0.1), r"Trainer: unknown argument 'lr': an optimizer takes it"),
    (lambda t: graphopt.Trainer(MODEL, epochs=3), "nearest: 'max_iter'"),
    (lambda t: graphopt.Trainer(MODEL).fit(X), "fit: expected 'y', found none"),
    (lambda t: graphopt.Trainer(MODEL, loss="hinge").fit(X, Y), r"write loss=passes.Hinge\(\)"),
    (lambda t: graphopt.OnnxClassifier(lr=0.1), "nearest: 'learning_rate_init'"),
    (lambda t: graphopt.from_sklearn(), "from_sklearn: expected 'fitted', found none"),
]
CASES = [*SOURCES, *STEPS, *EXECUTORS, *FIT, *CALLBACKS, *REST]

ATTRIBUTES = [
    (lambda: passes.Adamw, "nearest: 'AdamW'"),
    (lambda: passes.MSE, "nearest: 'MeanSquaredError'"),
    (lambda: graphopt.train, "nearest: 'fit'"),
    (lambda: graphopt.Exector, "nearest: 'Executor'"),
    (lambda: graphopt.AdamW, "passes.AdamW is it"),
    (lambda: graphopt.EarlyStopping, "graphopt.callbacks.EarlyStopping is it"),
    (lambda: models.resnet, "nearest: 'cnn'; known: cnn, linear, mlp, transformer"),
    (lambda: data.read_csv, "nearest: 'csv'"),
    (lambda: callbacks.EarlyStop, "nearest: 'EarlyStopping'"),
]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mistakes"))
        graphopt.save(MODEL, "model.onnx")
        yield SimpleNamespace(executor=graphopt.Executor(STEP, native=False))


def test_a_mistake_is_answered_in_one_line(things: SimpleNamespace) -> None:
    """One test for all, whose failure names those that are wrong."""
    wrong = []
    for i, (mistake, remedy) in enumerate(CASES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                wrong.append((i, remedy, f"no error but {mistake(things)!r}"))
            except graphopt.GraphoptError as error:
                if "\n" in str(error) or not re.search(remedy, str(error)):
                    wrong.append((i, remedy, str(error)))
            except pytest.skip.Exception:
                continue
            except Exception as error:  # noqa: BLE001
                wrong.append((i, remedy, f"{type(error).__name__}: {error}"))
    assert len(CASES) > 150
    assert not wrong, "\n".join(map(str, wrong))
    assert not Path("a.onnx").exists()
    assert not Path("h").exists()


@pytest.mark.parametrize(("get", "remedy"), ATTRIBUTES)
def test_an_unknown_attribute_names_the_nearest(get: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(AttributeError) as caught:
        get()
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_attributes_with_underscores_cost_no_search() -> None:
    for module in (graphopt, passes, models, data, callbacks):
        assert not hasattr(module, "__path_that_is_not__")
        with pytest.raises(AttributeError, match="no attribute '_x'"):
            module._x  # noqa: B018


def test_errors_of_ones_own_functions_stay_as_they_are(things: SimpleNamespace) -> None:
    def broken(batch: Any, random: Any) -> Any:
        return len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        fitted(things, transform=broken)


def test_a_wrong_argument_is_a_type_error_too() -> None:
    with pytest.raises(TypeError) as caught:
        passes.SGD(lr=0.1)  # type: ignore[call-arg]
    assert isinstance(caught.value, graphopt.GraphoptError)


def test_arguments_are_checked_without_a_metaclass() -> None:
    """A protocol has a metaclass of its own."""

    @runtime_checkable
    class Named(Protocol):
        title: str

    @dataclass(frozen=True)
    class Titled(passes.SGD, Named):
        title: str = ""

    first = Titled.__new__(Titled)  # as a copy before the first call
    assert inspect.signature(Titled).parameters.keys() == {each.name for each in fields(Titled)}
    with pytest.raises(graphopt.GraphoptError, match="Titled: unknown argument 'titel', nearest: 'title'"):
        Titled(titel="a")  # type: ignore[call-arg]
    titled = Titled(0.1, title="a")
    assert pickle.loads(pickle.dumps(passes.SGD(0.1))) == copy.deepcopy(passes.SGD(0.1)) == passes.SGD(0.1)
    assert isinstance(titled, Named)
    assert type(first) is type(copy.copy(titled)) is Titled
    assert [*inspect.signature(titled).parameters] == ["model"]  # of a call of the pass, not of its class
