"""Influence of training rows equals captum's TracInCP."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_influence import LOSS, network, rows

import graphopt

captum = pytest.importorskip("captum.influence")


def test_influence_is_captums() -> None:
    module, file = network()
    train, test = rows(30, 0), rows(5, 1)
    data = torch.utils.data.TensorDataset(torch.tensor(train["x"]), torch.tensor(train["target"]))
    options = {"loss_fn": torch.nn.CrossEntropyLoss(reduction="none"), "batch_size": 10}
    tracin = captum.TracInCP(module, data, ["now"], lambda *_: 1.0, **options)
    expected = tracin.influence((torch.tensor(test["x"]), torch.tensor(test["target"]))).numpy()
    found = graphopt.influence(file, train, test, LOSS)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * abs(expected).max())
