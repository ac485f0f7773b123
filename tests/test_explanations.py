"""Explanations as outputs of the file, beside the same formulas in PyTorch; tests/peers compares them with captum."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import model
from test_derivatives import Attention, Recurrent, exported
from torch import nn

import graphopt
import passes
from graphopt import data


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(6), nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(self.first(x).relu(), 2)
        return self.head((x + self.norm(self.second(x)).relu()).mean((2, 3)))


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norms, self.head = nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(8)]), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = torch.cat([x, self.second(self.norms[0](x).relu())], 1)
        x = nn.functional.avg_pool2d(self.norms[1](x).relu(), 2)
        return self.head(nn.functional.max_pool2d(x, 4).flatten(1))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 6, 3, padding=1),
        )
        self.pool, self.head = nn.AvgPool2d(2), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features = nn.functional.silu(self.second(self.pool(nn.functional.gelu(self.norm(self.first(x))))))
        return self.head(self.features.mean((2, 3)))


NETWORKS = {
    "images": (Images, (1, 8, 8)),
    "recurrent": (Recurrent, (1, 8, 8)),
    "attention": (Attention, (3, 8)),
}


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    return make().eval(), shape


def chosen(scores: torch.Tensor, classes: list[int]) -> torch.Tensor:
    numbers = torch.tensor(classes)
    return scores.gather(1, torch.where(numbers < 0, scores.argmax(1), numbers)[:, None]).sum()


def slope(module: nn.Module, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(module(x).gather(1, classes[:, None]).sum(), x)[0]


@pytest.mark.parametrize("dynamo", [True, False], ids=["exporter", "torchscript"])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_their_integrals_are_those_of_pytorch(name: str, dynamo: bool) -> None:
    module, shape = network(name)
    file = exported(module, torch.randn(3, *shape), dynamo)
    saliency = graphopt.explain(file, passes.Saliency(), keep=False)
    integrated = graphopt.explain(file, passes.IntegratedGradients(steps=12, baseline=0.5), keep=False)
    places, weights = np.polynomial.legendre.leggauss(12)
    for batch in (1, 4):
        x = torch.randn(batch, *shape)
        classes = module(x).argmax(1)
        for fed, of in [
            ({"class": np.full(batch, -1)}, classes),
            ({"class": np.full(batch, 3)}, torch.full((batch,), 3)),
        ]:
            feeds = {"x": x.numpy(), **fed}
            expected = slope(module, x, of)
            (found,) = graphopt.run(saliency, feeds).values()
            np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))
            expected = sum(
                float(w) / 2 * slope(module, 0.5 + (1 + float(p)) / 2 * (x - 0.5), of)
                for p, w in zip(places, weights, strict=True)
            ) * (x - 0.5)
            (found,) = graphopt.run(integrated, feeds).values()
            kinks = 2e-2 if name == "recurrent" else 5e-6  # places of MaxPool at which float32 decides
            np.testing.assert_allclose(found, expected, rtol=0, atol=kinks * float(expected.abs().max()))


@pytest.mark.parametrize("dynamo", [True, False], ids=["exporter", "torchscript"])
@pytest.mark.parametrize("make", [Residual, Dense], ids=["residual", "dense"])
def test_gradients_where_digits_have_equal_maxima_are_those_of_pytorch(make: type[nn.Module], dynamo: bool) -> None:
    torch.manual_seed(0)
    module = make().eval()
    digits = torch.tensor(np.asarray(data.digits().arrays["x"]))
    graph = graphopt.explain(exported(module, digits[:3], dynamo), passes.Saliency(), keep=False)
    for batch in range(1, 9):
        x = digits[10 * batch : 11 * batch]
        of = torch.arange(batch)
        expected = slope(module, x, of)
        (found,) = graphopt.run(graph, {"x": x.numpy(), "class": of.numpy()}).values()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_the_sum_of_integrated_gradients_is_the_difference_of_the_outputs() -> None:
    module, shape = network("images")
    x = torch.randn(4, *shape)
    scores, start = module(x), module(torch.zeros_like(x))
    graph = graphopt.explain(exported(module, x), passes.IntegratedGradients(steps=100), keep=False)
    (found,) = graphopt.run(graph, {"x": x.numpy(), "class": np.full(4, 2)}).values()
    np.testing.assert_allclose(found.sum((1, 2, 3)), (scores - start)[:, 2].detach(), atol=1e-4)


def test_the_noise_of_smooth_gradients_is_normal_and_leaves_a_linear_network_as_it_is() -> None:
    linear = model("g (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }", w=np.arange(12.0).reshape(4, 3))
    (found,) = graphopt.run(
        graphopt.explain(linear, passes.SmoothGrad(), keep=False),
        {"x": np.zeros((2, 4), np.float32), "class": np.array([1, 1])},
    ).values()
    np.testing.assert_allclose(found, [[1, 4, 7, 10]] * 2, rtol=1e-6)
    # The mean gradient of a square by noisy inputs is twice the mean of the noise: one sample shows the noise.
    square = model(
        """g (float[N,9999] x) => (float[N] y) {
            s = Mul(x, x)
            a = Constant<value_ints = [1]>()
            y = ReduceSum<keepdims = 0>(s, a)
        }"""
    )
    graph = graphopt.explain(square, passes.SmoothGrad(samples=1, std=1.0), keep=False)
    (found,) = graphopt.run(graph, {"x": np.zeros((2, 9999), np.float32)}).values()
    noise = found.ravel() / 2
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert abs((noise**4).mean() - 3) < 0.3
    assert abs(np.corrcoef(found[0], found[1])[0, 1]) < 0.03


def test_grad_cam_is_that_of_pytorch() -> None:
    module, shape = network("images")
    x = torch.randn(3, *shape)
    scores = module(x)
    features = module.features
    (gradient,) = torch.autograd.grad(chosen(scores, [-1, -1, -1]), features)
    raw = (features * gradient.mean((2, 3), keepdim=True)).sum(1, keepdim=True).relu().detach()
    file = exported(module, x)
    for resize, expected in [(False, raw), (True, nn.functional.interpolate(raw, (8, 8), mode="bilinear"))]:
        graph = graphopt.explain(file, passes.GradCAM(resize=resize), keep=False)
        (found,) = graphopt.run(graph, {"x": x.numpy(), "class": np.full(3, -1)}).values()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_grad_cam_of_a_transformer_reads_what_its_last_attention_reads() -> None:
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, activation="gelu")

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = module, nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(x)[:, 0])

    torch.manual_seed(0)
    classifier, kept = Classifier().eval(), []
    x = torch.randn(2, 5, 8)
    file = exported(classifier, x)
    with torch.enable_grad():
        handle = module.norm1.register_forward_hook(lambda *args: kept.append(args[2]))
        # The fused path of inference calls no hooks.
        torch.backends.mha.set_fastpath_enabled(False)
        scores = classifier(x)
        torch.backends.mha.set_fastpath_enabled(True)
        handle.remove()
    (gradient,) = torch.autograd.grad(chosen(scores, [-1, -1]), kept[0])
    expected = (kept[0] * gradient.mean(1, keepdim=True)).sum(2).relu().detach()
    (found,) = graphopt.run(
        graphopt.explain(file, passes.GradCAM(), keep=False), {"x": x.numpy(), "class": np.full(2, -1)}
    ).values()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_attacks_are_those_of_a_loop_in_pytorch() -> None:
    module, shape = network("images")
    x, labels = torch.rand(4, *shape), torch.tensor([0, 1, 2, 3])

    def direction(at: torch.Tensor) -> torch.Tensor:
        at = at.detach().requires_grad_()
        return torch.autograd.grad(nn.functional.cross_entropy(module(at), labels), at)[0].sign()

    file, feeds = exported(module, x), {"x": x.numpy(), "target": labels.numpy()}
    loss = passes.CrossEntropy()
    found = graphopt.run(graphopt.explain(file, passes.FGSM(0.05, loss)), feeds)
    expected = x + 0.05 * direction(x)
    assert np.isclose(found["x.adversarial"], expected, rtol=0, atol=1e-6).mean() > 0.99
    pgd = passes.PGD(0.1, loss, step=0.03, steps=7, low=0.0, high=1.0)
    found = graphopt.run(graphopt.explain(file, pgd), feeds)["x.adversarial"]
    at = x
    for _ in range(7):
        at = torch.clamp(torch.clamp(at + 0.03 * direction(at), x - 0.1, x + 0.1), 0, 1)
    assert np.isclose(found, at, rtol=0, atol=1e-6).mean() > 0.97
    assert abs(found - x.numpy()).max() <= 0.1 + 1e-6
    assert found.min() >= 0
    assert found.max() <= 1


@pytest.mark.parametrize(
    ("explanation", "message"),
    [
        (passes.Saliency(), "'y' does not depend on 'other' differentiably: name another input"),
        (passes.Saliency(input="token"), "found 'token' of INT64: take the embedding's output 'rows'"),
        (passes.Saliency(input="other"), "'y' does not depend on 'other' differentiably"),
        (
            passes.FGSM(0.1, input="rows"),
            r"FGSM: expected a loss, as loss=passes.CrossEntropy\(\), found None",
        ),
        (passes.GradCAM(input="rows"), "layer: expected a value .N, C, H, W., or an attention .* found none"),
        (
            passes.GradCAM(layer="h", input="rows"),
            "layer: expected a value .* found 'h' of shape .N,3.: the last ones are none",
        ),
    ],
)
def test_what_cannot_be_explained_is_named(explanation: passes.Explanation, message: str) -> None:
    proto = model(
        """g (int64[N] token, float[N,2] other) => (float[N,2] y) {
            rows = Gather(table, token)
            h = Tanh(rows)
            y = MatMul(h, w)
        }""",
        table=np.ones((5, 3)),
        w=np.ones((3, 2)),
    )
    with pytest.raises(graphopt.GraphoptError, match=message):
        graphopt.explain(proto, explanation)


def test_tokens_are_explained_by_their_embeddings_and_a_class_beyond_the_last_is_the_last() -> None:
    proto = model(
        "g (int64[N] token) => (float[N,2] y) { rows = Gather(table, token)\n y = MatMul(rows, w) }",
        table=np.ones((5, 3)),
        w=np.arange(6.0).reshape(3, 2),
    )
    graph = graphopt.explain(proto, passes.Saliency(input="rows"), keep=False)
    (found,) = graphopt.run(graph, {"token": np.array([1, 2]), "class": np.array([0, 9])}).values()
    np.testing.assert_array_equal(found, [[0, 2, 4], [1, 3, 5]])


def test_tokens_alone_name_their_embedding() -> None:
    proto = model(
        "g (int64[N] token) => (float[N,2] y) { rows = Gather(table, token)\n y = MatMul(rows, w) }",
        table=np.ones((5, 3)),
        w=np.ones((3, 2)),
    )
    message = "expected .*floating-point input.*, found none: take the embedding's output 'rows'"
    with pytest.raises(graphopt.GraphoptError, match=f"input: {message}"):
        graphopt.explain(proto, passes.Saliency())
    with pytest.raises(graphopt.GraphoptError, match=f"wrt: {message}"):
        graphopt.Pipeline(normalize=passes.Normalize(), derive=passes.Differentiate())(graphopt.load(proto))


def test_an_attack_of_a_row_depends_on_no_other_row() -> None:
    proto = model("g (float[N,2] x) => (float[N,3] y) { y = MatMul(x, w) }", w=np.array([[18.0, -18, 0], [3, 0, -3]]))
    graph = graphopt.explain(proto, passes.FGSM(0.3, passes.CrossEntropy()), keep=False)
    x = np.array([[1, 0.2], [1, 0.2]], np.float32)
    (alone,) = graphopt.run(graph, {"x": x[:1], "target": np.array([0])}).values()
    (beside,) = graphopt.run(graph, {"x": x, "target": np.array([0, 1])}).values()
    np.testing.assert_array_equal(beside[:1], alone)


def test_all_numbers_of_noise_are_finite() -> None:
    least = np.float32(np.int32(-(2**31))) + np.float32(2.0**31)
    assert np.isfinite(np.log(least / np.float32(2.0**32) + np.float32(2.0**-33)))


def test_grad_cam_of_images_with_channels_last_has_their_size() -> None:
    proto = model(
        """g (float[N,16,12,3] x) => (float[N,2] y) {
            t = Transpose<perm = [0,3,1,2]>(x)
            c = Conv(t, k)
            r = Relu(c)
            m = GlobalAveragePool(r)
            f = Flatten(m)
            y = MatMul(f, w)
        }""",
        k=np.ones((4, 3, 3, 3)),
        w=np.ones((4, 2)),
    )
    feeds = {"x": np.ones((2, 16, 12, 3), np.float32), "class": np.full(2, -1)}
    (found,) = graphopt.run(graphopt.explain(proto, passes.GradCAM(), keep=False), feeds).values()
    assert found.shape == (2, 1, 16, 12)


def test_grad_cam_of_a_sequence_has_a_number_for_each_place() -> None:
    proto = model(
        """g (float[N,3,20] x) => (float[N,2] y) {
            c = Conv(x, k)
            r = Relu(c)
            m = GlobalAveragePool(r)
            f = Flatten(m)
            y = MatMul(f, w)
        }""",
        k=np.ones((4, 3, 3)),
        w=np.ones((4, 2)),
    )
    feeds = {"x": np.ones((2, 3, 20), np.float32), "class": np.full(2, 1)}
    (found,) = graphopt.run(graphopt.explain(proto, passes.GradCAM(), keep=False), feeds).values()
    np.testing.assert_allclose(found, np.full((2, 18), 4 * 9 / 18), rtol=1e-6)


def test_bounds_of_an_attack_are_in_order() -> None:
    with pytest.raises(graphopt.GraphoptError, match=r"PGD: expected low < high, found 1\.0 and 0\.0"):
        passes.PGD(0.1, passes.CrossEntropy(), low=1.0, high=0.0)


def test_a_network_of_float64_is_explained() -> None:
    proto = model("g (double[N,3] x) => (double[N,2] y) { y = MatMul(x, w) }", dtype=np.float64, w=np.ones((3, 2)))
    graph = graphopt.explain(proto, passes.Saliency(), keep=False)
    (found,) = graphopt.run(graph, {"x": np.ones((2, 3)), "class": np.full(2, -1)}).values()
    np.testing.assert_array_equal(found, np.ones((2, 3)))
