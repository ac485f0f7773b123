"""A data scientist: a table becomes a model with probabilities, runs are compared, and a Pipeline trains."""

from __future__ import annotations

import csv
import re
import warnings
from pathlib import Path

import pandas
from desk import Desk
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_wine
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

KINDS = ("Barolo", "Grignolino", "Barbera")
SOFTMAX = """
import csv, numpy
rows = list(csv.reader(open("run/wine.csv")))
scores = numpy.array([[float(x) for x in row[:3]] for row in rows[1:]])
shares = numpy.exp(scores - scores.max(1, keepdims=True))
numpy.savetxt("shares.csv", shares / shares.sum(1, keepdims=True), delimiter=",")
"""
PIPELINE = """
import pandas
from sklearn.compose import make_column_transformer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from graphopt import OnnxClassifier
table = pandas.read_csv("train.csv")
target = table.pop("kind")
words = OneHotEncoder(handle_unknown="ignore"{})
columns = make_column_transformer((words, ["region"]), (StandardScaler(), list(table)[:13]))
print(cross_val_score(make_pipeline(columns, OnnxClassifier(max_iter=50, random_state=0)), table, target, cv=3).mean())
"""


def play(desk: Desk) -> str:
    truth = prepare(desk.folder)
    theirs, of_pipeline = in_scikit_learn(desk.folder, truth)
    model = [
        "model=mlp",
        "data=csv",
        "data.path=train.csv",
        "data.target=kind",
        "data.columns=auto",
        "fit.epochs=40",
    ]
    desk.graphopt(*model, "folder=run")
    desk.graphopt("predict", "folder=run", "data.path=test.csv", "data.target=null", "predictions=wine.csv")
    with open(desk.folder / "run" / "wine.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    if not any(name.startswith("probabilities") for name in rows[0]):
        desk.python(SOFTMAX)
    label = next(name for name in rows[0] if rows[0][name] in KINDS)
    right = sum(row[label] == kind for row, kind in zip(rows, truth, strict=True)) / len(truth)
    desk.graphopt("-m", *model, "optimizer.learning_rate=0.001,0.01", "folder=sweep")
    desk.graphopt("compare", "folder=sweep")
    said = desk.python(PIPELINE.format(""))
    if desk.refusals:
        said = desk.python(PIPELINE.format(", sparse_output=False"))
    share = re.findall(r"^[0-9.]+$", said, re.MULTILINE)
    return (
        f"accuracy {right:.3f} on held-out rows (scikit-learn {theirs:.3f}); Pipeline "
        f"{float(share[-1]) if share else 0:.3f} (scikit-learn {of_pipeline:.3f})"
    )


def in_scikit_learn(folder: Path, truth: list[str]) -> tuple[float, float]:
    """Return the accuracies of scikit-learn's network on the same rows: on those held out, and in three folds."""
    train, test = (pandas.read_csv(folder / f"{name}.csv") for name in ("train", "test"))
    target = train.pop("kind")
    numbers = list(train)[:-1]
    columns = make_column_transformer((OneHotEncoder(), ["region"]), (StandardScaler(), numbers))
    network = make_pipeline(columns, MLPClassifier(max_iter=50, random_state=0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        folds = cross_val_score(network, train, target, cv=3).mean()
        return float(network.fit(train, target).score(test, truth)), float(folds)


def prepare(folder: Path) -> list[str]:
    """Write wine.csv in two parts, with a column of words; return the kinds of the second part."""
    wine = load_wine()
    names = [*wine.feature_names, "region"]
    rows = [[*x, ("north", "south")[int(x[0] > 13)]] for x in wine.data]
    parts = train_test_split(rows, [KINDS[i] for i in wine.target], test_size=0.3, random_state=0)
    for name, x, kinds in (("train", parts[0], parts[2]), ("test", parts[1], parts[3])):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            is_train = name == "train"
            csv.writer(file).writerow([*names, *(["kind"] if is_train else [])])
            csv.writer(file).writerows(
                [*row, *([kind] if is_train else [])] for row, kind in zip(x, kinds, strict=True)
            )
    return list(parts[3])
