"""Explanations of a file equal captum's of the module."""

from __future__ import annotations

import numpy as np
import pytest
import torch

attr = pytest.importorskip("captum.attr")
robust = pytest.importorskip("captum.robust")

from test_explanations import exported, network  # noqa: E402

import graphopt  # noqa: E402
import passes  # noqa: E402


def found(module: torch.nn.Module, x: torch.Tensor, explanation: passes.Explanation, **fed: torch.Tensor) -> np.ndarray:
    graph = graphopt.explain(exported(module, x), explanation, keep=False)
    (result,) = graphopt.run(graph, {"x": x.numpy(), **{name: value.numpy() for name, value in fed.items()}}).values()
    return result


def close(actual: np.ndarray, expected: torch.Tensor, tolerance: float) -> None:
    expected = expected.detach().float()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["images", "attention"])
def test_gradients_and_their_integrals_are_captums(name: str) -> None:
    module, shape = network(name)
    x, classes = torch.randn(3, *shape), torch.tensor([0, 3, 1])
    close(
        found(module, x, passes.Saliency(absolute=True), **{"class": classes}),
        attr.Saliency(module).attribute(x, target=classes),
        2e-6,
    )
    integrated = found(module, x, passes.IntegratedGradients(), **{"class": classes})
    module.double()
    close(integrated, attr.IntegratedGradients(module).attribute(x.double(), target=classes), 5e-6)


def test_grad_cam_is_captums() -> None:
    module, shape = network("images")
    x, classes = torch.randn(3, *shape), torch.tensor([0, 3, 1])
    layer = attr.LayerGradCam(module, module.second)
    # The layer after the activation: captum's hook on a module sees what follows it in the one that feeds the mean.
    expected = layer.attribute(x, target=classes, relu_attributions=True)
    graph = graphopt.load(exported(module, x))
    graphopt.Pipeline(normalize=passes.Normalize())(graph)
    (convolution,) = [node.outputs[0].name for node in graph.graph if node.op_type == "Conv"][-1:]
    close(
        found(module, x, passes.GradCAM(layer=convolution, resize=False), **{"class": classes}),
        expected,
        2e-6,
    )


def test_attacks_are_captums() -> None:
    module, shape = network("images")
    x, labels = torch.rand(4, *shape), torch.tensor([0, 1, 2, 3])
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    expected = robust.FGSM(module, loss_func=loss).perturb(x, epsilon=0.05, target=labels)
    actual = found(module, x, passes.FGSM(0.05, passes.CrossEntropy()), target=labels)
    assert np.isclose(actual, expected.detach(), rtol=0, atol=1e-6).mean() > 0.99
    expected = robust.PGD(module, loss_func=loss).perturb(x, radius=0.1, step_size=0.03, step_num=7, target=labels)
    actual = found(module, x, passes.PGD(0.1, passes.CrossEntropy(), step=0.03, steps=7), target=labels)
    assert np.isclose(actual, expected.detach(), rtol=0, atol=1e-5).mean() > 0.97
