"""Check how errors name what was probably meant."""

import copy
import pickle
import time

import pytest

import graphopt
import passes
from graphopt.errors import MEANINGS, BlockingOperator, NoGradient, nearest, unknown

OPTIONS = [
    "batch_size",
    "beta1",
    "checkpoint",
    "epochs",
    "learning_rate",
    "seed",
    "validation",
    "weight_decay",
]
METRICS = ["accuracy", "confusion_matrix", "f1", "mae", "mse", "roc_auc", "top_k"]
MEANT = [
    ("lr", OPTIONS, "learning_rate"),
    ("learnign_rate", OPTIONS, "learning_rate"),
    ("LEARNING_RATE", OPTIONS, "learning_rate"),
    ("epoch", OPTIONS, "epochs"),
    ("max_iter", OPTIONS, "epochs"),
    ("batchsize", OPTIONS, "batch_size"),
    ("validation_split", OPTIONS, "validation"),
    ("betas", OPTIONS, "beta1"),
    ("random_state", OPTIONS, "seed"),
    ("bananas", OPTIONS, None),
    ("", OPTIONS, None),
    ("acc", METRICS, "accuracy"),
    ("confusion", METRICS, "confusion_matrix"),
    ("mean_squared_error", METRICS, "mse"),
    ("MSE", passes.__all__, "MeanSquaredError"),
    ("Adamw", passes.__all__, "AdamW"),
    ("passes.CrossEntropyLoss", [f"passes.{name}" for name in passes.__all__], "passes.CrossEntropy"),
    ("train", graphopt.__all__, "fit"),
    ("nativ", ["native", "plain"], "native"),
]


@pytest.mark.parametrize(("name", "names", "meant"), MEANT)
def test_the_nearest_name_is_told(name, names, meant):
    assert nearest(name, names) == meant
    told = f", nearest: {meant!r}" if meant else ""
    assert unknown("name", name, names) == f"unknown name {name!r}{told}; known: {', '.join(sorted(names))}"


def test_a_word_has_no_two_meanings_among_the_options_of_a_function():
    lines = [line.split() for line in MEANINGS.strip().splitlines()]
    assert all(len(line) > 1 and len(line) == len(set(line)) for line in lines)
    firsts = [line[0] for line in lines]
    assert len(firsts) == len(set(firsts))


def test_long_names_and_long_lists_cost_little():
    start = time.perf_counter()
    names = [f"layers.{i}.weight" for i in range(10**5)]
    assert nearest("a" * 10**5, names) is None
    nearest("layers.7.weigth", names)
    assert time.perf_counter() - start < 2


def test_errors_are_copied_with_their_message():
    """Another process, such as one of joblib, sends its error as a pickle."""
    error = NoGradient([BlockingOperator("", "Det", ("d",), ("w",))])
    for copied in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert str(copied) == str(error)
        assert copied.operators == error.operators
