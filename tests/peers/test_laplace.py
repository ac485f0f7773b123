"""Variances and probabilities of a file equal laplace-torch's, of a last layer.

No extra installs laplace-torch, since its torchvision does not load beside PyTorch for CPUs:
pip install --no-deps laplace-torch==0.3 asdl asdfghjkl backpack-for-pytorch curvlinops-for-pytorch torchmetrics
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

laplace = pytest.importorskip("laplace")

from test_derivatives import exported  # noqa: E402

import graphopt  # noqa: E402
import passes  # noqa: E402


def rows(outputs: int, task: str) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))
    x = torch.randn(80, 4)
    y = torch.randint(0, outputs, (80,)) if task == "classification" else torch.randn(80, outputs)
    return module, x, y


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_variances_are_laplace_torchs(structure: str, task: str) -> None:
    module, x, y = rows(3, task)
    file = exported(module, x)
    unsure = passes.LastLayerLaplace(0.7, structure, task)
    (name,) = [value.name for value in graphopt.load(file).graph.inputs]
    (output,) = [value.name for value in graphopt.load(file).graph.outputs]
    found = graphopt.run(graphopt.calibrate(file, {name: x.numpy(), "target": y.numpy()}, unsure), {name: x.numpy()})
    module = module.double()
    peer = laplace.Laplace(
        module, task, subset_of_weights="last_layer", hessian_structure=structure, prior_precision=0.7
    )
    peer.fit(
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x.double(), y if task == "classification" else y.double()),
            batch_size=80,
        )
    )
    _, variance = peer._glm_predictive_distribution(x.double())
    expected = torch.diagonal(variance, dim1=1, dim2=2).detach().numpy()
    np.testing.assert_allclose(found[f"{output}.variance"], expected, rtol=1e-4)
    if task == "classification":
        p = peer(x.double(), pred_type="glm", link_approx="probit").detach().numpy()
        np.testing.assert_allclose(found["probability"], p, atol=1e-5)
