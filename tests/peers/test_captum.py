"""Explanations of a file equal captum's of the module."""

from __future__ import annotations

import numpy as np
import pytest
import torch

attr = pytest.importorskip("captum.attr")
robust = pytest.importorskip("captum.robust")

from steps import exported as exported_with  # noqa: E402
from test_explanations import exported, network  # noqa: E402
from torch import nn  # noqa: E402

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


class UNet(nn.Module):
    """Two levels, a skip connection, and the share of each class over the places."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 12, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(12, 6, 2, stride=2), nn.Conv2d(12, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = nn.functional.silu(self.norm(self.down(x)))
        deep = nn.functional.silu(self.deep(nn.functional.max_pool2d(first, 2)))
        return self.last(torch.cat([first, self.up(deep)], 1)).log_softmax(1).mean((2, 3))


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(5, 8, 2, batch_first=True, bidirectional=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0].amax(1))


class Masked(nn.Module):
    """An encoder whose attention and mean leave padding out."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x, src_key_padding_mask=padding)
        kept = (~padding).to(x.dtype)[:, :, None]
        return self.head((h * kept).sum(1) / kept.sum(1))


EXPLAINED = {"U-Net": (UNet, (1, 12, 12)), "recurrent": (Sequence, (7, 5)), "masked": (Masked, (6, 16))}


@pytest.mark.parametrize("name", EXPLAINED)
def test_networks_with_skips_states_and_masks_are_explained_as_by_captum(name: str) -> None:
    torch.manual_seed(0)
    make, shape = EXPLAINED[name]
    module, x, classes = make().eval(), torch.randn(3, *shape), torch.tensor([0, 3, 1])
    others = [torch.arange(6) >= torch.tensor([[6], [4], [2]])] if name == "masked" else []
    names = ["x", "padding"][: 1 + len(others)]
    rows = torch.export.Dim("n")
    file = exported_with(module, x, *others, dynamo=True, names=names, dynamic_shapes=tuple({0: rows} for _ in names))
    fed = {**dict(zip(names, [x, *others], strict=True)), "class": classes}
    fed = {key: value.numpy() for key, value in fed.items()}
    module, more = module.double(), {"target": classes, "additional_forward_args": tuple(others) or None}
    expected = {
        passes.Saliency(): attr.Saliency(module).attribute(x.double(), abs=False, **more),
        passes.IntegratedGradients(steps=20): attr.IntegratedGradients(module).attribute(
            x.double(), n_steps=20, **more
        ),
    }
    for explanation, wanted in expected.items():
        (result,) = graphopt.run(graphopt.explain(file, explanation, keep=False), fed).values()
        close(result, wanted, 5e-6)
    if others:
        assert not result[others[0].numpy()].any()  # padding explains nothing
