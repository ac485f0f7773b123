"""Variances of predictions, beside PyTorch's Hessians and all masks of Dropout; tests/peers has laplace-torch's."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from builders import model
from scipy.optimize import minimize_scalar
from scipy.special import softmax

import graphopt
import passes
from graphopt import models
from graphopt.errors import GraphoptError
from graphopt.graph.rewriting import Pass

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 4)).astype(np.float32)
FORMS = {
    "Gemm": "z = Gemm(h, w, b)",
    "transposed": "z = Gemm<transB = 1>(h, v, b)",
    "MatMul": "p = MatMul(h, w) z = Add(p, b)",
    "without a bias": "z = MatMul(h, w)",
}


def network(form: str = "Gemm", outputs: int = 3, ending: str = "y = Identity(z)") -> onnx.ModelProto:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((5, outputs))
    numbers = {"u": rng.standard_normal((4, 5)), "w": w, "v": w.T.copy(), "b": rng.standard_normal(outputs)}
    used = {name: x for name, x in numbers.items() if name == "u" or f"{name}" in FORMS[form].split("(", 1)[1]}
    text = f"g (float[N,4] x) => (float[N,{outputs}] y) {{ f = MatMul(x, u) h = Tanh(f) {FORMS[form]} {ending} }}"
    return model(text, **used)


def torch_layers(form: str, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the features of the rows, with a 1 for a bias, and the last layer's weights, in float64."""
    weights = {
        x.name: torch.tensor(onnx.numpy_helper.to_array(x)).double() for x in network(form, outputs).graph.initializer
    }
    w = weights["w"] if "w" in weights else weights["v"].T
    h = torch.tanh(torch.tensor(X).double() @ weights["u"])
    if "b" in weights:
        w, h = torch.cat([w, weights["b"][None]]), torch.cat([h, torch.ones(len(h), 1).double()], 1)
    return h, w


def hessian(h: torch.Tensor, w: torch.Tensor, target: np.ndarray, noise: float | None) -> torch.Tensor:
    def loss(w: torch.Tensor) -> torch.Tensor:
        z, t = h @ w, torch.tensor(target)
        if noise is not None:
            return (z - t).pow(2).sum() / (2 * noise)
        if z.shape[1] == 1:
            return torch.nn.functional.binary_cross_entropy_with_logits(z[:, 0], t.double(), reduction="sum")
        return torch.nn.functional.cross_entropy(z, t, reduction="sum")

    return torch.autograd.functional.hessian(loss, w).reshape(w.numel(), w.numel())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("task", ["classification", "binary", "regression"])
def test_variances_are_those_of_pytorchs_hessian(form: str, structure: str, task: str) -> None:
    outputs, noise = (
        {"classification": 3, "binary": 1, "regression": 2}[task],
        0.3 if task == "regression" else None,
    )
    target = np.random.default_rng(2).integers(0, max(outputs, 2), 60)
    if noise is not None:
        target = np.random.default_rng(2).standard_normal((60, 2))
    h, w = torch_layers(form, outputs)
    precision = hessian(h, w, target, noise) + 0.7 * torch.eye(w.numel()).double()
    covariance = torch.diag(1 / precision.diag()) if structure == "diag" else torch.linalg.inv(precision)
    by_weight = covariance.reshape(*w.shape, *w.shape)
    expected = torch.einsum("nd,dcec,ne->nc", h, by_weight, h).numpy()
    laplace = passes.LastLayerLaplace(
        0.7, structure, "regression" if noise is not None else "classification", noise=noise or 1.0
    )
    unsure = graphopt.calibrate(network(form, outputs), {"x": X, "target": target}, laplace)
    onnx.checker.check_model(ir.to_proto(unsure), full_check=True)
    found = graphopt.run(unsure, {"x": X})
    np.testing.assert_allclose(found["y.variance"], expected, rtol=1e-4)
    if task == "classification":
        scaled = found["y"] / np.sqrt(1 + np.pi / 8 * expected)
        np.testing.assert_allclose(found["probability"], softmax(scaled, axis=1), atol=1e-5)
    assert ("probability" in found) == (noise is None)


@pytest.mark.parametrize("form", ["Gemm", "without a bias"])
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_directions_beyond_the_rank_get_their_mean_variance(structure: str, form: str) -> None:
    """The surest are kept."""
    rng = np.random.default_rng(3)
    head = model(
        f"g (float[N,5] h) => (float[N,3] y) {{ {FORMS[form].replace('z =', 'y =')} }}",
        **{x.name: onnx.numpy_helper.to_array(x) for x in network(form).graph.initializer if x.name in "wb"},
    )
    features = np.tanh(X @ rng.standard_normal((4, 5))).astype(np.float32)
    rows, every = {"h": features, "target": rng.integers(0, 3, 60)}, rng.standard_normal((7, 5)).astype(np.float32)

    def variances(rank: int | None, h: np.ndarray) -> np.ndarray:
        unsure = graphopt.calibrate(head, rows, passes.LastLayerLaplace(0.5, structure, rank=rank))
        onnx.checker.check_model(ir.to_proto(unsure), full_check=True)
        return graphopt.run(unsure, {"h": h.astype(np.float32)})["y.variance"]

    np.testing.assert_allclose(variances(9, every), variances(None, every), rtol=1e-5)
    numbers = {x.name: onnx.numpy_helper.to_array(x) for x in head.graph.initializer}
    has_bias, x = "b" in numbers, features.astype(np.float64)
    p = softmax(x @ numbers["w"] + numbers.get("b", 0), axis=1)
    curvature = p[:, :, None] * (np.eye(3) - p[:, None])
    h, of_bias = every, np.zeros(3)
    if structure == "full":
        x, h = (np.append(v, np.ones((len(v), 1)), 1) if has_bias else v for v in (x, every))
        precision = np.einsum("nab,ni,nj->aibj", curvature, x, x).reshape(2 * [3 * x.shape[1]])
        inverse = np.linalg.inv(precision + 0.5 * np.eye(len(precision))).reshape(2 * [3, x.shape[1]])
        covariances = [inverse[c, :, c] for c in range(3)]
    else:
        left, u = np.linalg.eigh(curvature.sum(0))
        parts = np.stack([np.linalg.inv(x.T @ x / 60 * each + 0.5 * np.eye(5)) for each in left])
        covariances = [*np.einsum("ck,kij->cij", u**2, parts)]
        of_bias = u**2 @ (1 / (left + 0.5)) * has_bias
    for rank in (2, None):
        expected = []
        for covariance in covariances:
            lengths, axes = np.linalg.eigh(covariance)
            lengths[rank:] = lengths[rank:].mean() if rank else lengths
            expected.append(np.square(h @ axes) @ lengths)
        np.testing.assert_allclose(variances(rank, every), np.stack(expected, 1) + of_bias, rtol=1e-4)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_row_is_not_certain_where_directions_are_left_out(structure: str) -> None:
    """The difference of two large numbers was 0 in float32."""
    rng = np.random.default_rng(0)
    x = np.maximum(rng.standard_normal((400, 12)) @ rng.standard_normal((12, 12)), 0).astype(np.float32)
    x = np.concatenate([x, np.zeros((400, 8), np.float32)], 1)  # dead units
    head = model("g (float[N,20] x) => (float[N,2] y) { y = MatMul(x, w) }", w=rng.standard_normal((20, 2)))
    every, live = (
        graphopt.run(
            graphopt.calibrate(
                head,
                {"x": x, "target": rng.standard_normal((400, 2))},
                passes.LastLayerLaplace(1e-4, structure, "regression", rank=rank),
            ),
            {"x": x},
        )["y.variance"]
        for rank in (None, 12)
    )
    np.testing.assert_allclose(live, every, rtol=1e-3)


def test_a_rank_of_a_diagonal_is_refused() -> None:
    laplace = passes.LastLayerLaplace(1.0, "diag", rank=2)
    with pytest.raises(GraphoptError, match="rank: expected structure full or kron, found diag: leave rank out"):
        graphopt.calibrate(network(), {"x": X, "target": np.zeros(60, np.int64)}, laplace)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_prior_makes_the_rows_most_likely(structure: str) -> None:
    target = np.random.default_rng(2).integers(0, 3, 60)
    h, w = torch_layers("Gemm", 3)
    sums = hessian(h, w, target, None).numpy()
    sums = np.diag(np.diag(sums)) if structure == "diag" else sums
    square = float(w.pow(2).sum())

    def evidence(
        log_prior: float,
    ) -> float:  # the logarithm of Laplace's approximation, without what is constant
        prior, count = np.exp(log_prior), len(sums)
        _, determinant = np.linalg.slogdet(sums + prior * np.eye(count))
        return -0.5 * (count * log_prior - determinant - prior * square)

    best = np.exp(minimize_scalar(evidence, bracket=(-2, 2), tol=1e-12).x)
    data = {"x": X, "target": target}
    found, expected = (
        graphopt.run(graphopt.calibrate(network(), data, passes.LastLayerLaplace(prior, structure)), {"x": X})
        for prior in ("marginal", float(best))
    )
    np.testing.assert_allclose(found["y.variance"], expected["y.variance"], rtol=1e-4)


def test_a_softmax_after_the_layer_is_applied_once() -> None:
    data = {"x": X, "target": np.zeros(60, np.int64)}
    laplace = passes.LastLayerLaplace(1.0)
    a = graphopt.run(graphopt.calibrate(network(), data, laplace), {"x": X})
    b = graphopt.run(graphopt.calibrate(network(ending="y = Softmax(z)"), data, laplace), {"x": X})
    for name in ("y.variance", "probability"):
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5)


def test_uncertainty_is_larger_far_from_the_rows() -> None:
    step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-2))
    executor = graphopt.Executor(step)
    data = {"x": X, "target": np.argmax(X[:, :3], 1)}
    graphopt.fit(executor, data, epochs=20, validation=None, verbose=False)
    unsure = graphopt.calibrate(executor.trained(), data, passes.LastLayerLaplace())
    near, far = (graphopt.run(unsure, {"x": X * scale})["y.variance"].mean() for scale in (1, 10))
    assert far > 3 * near


DROPOUT = """g (float[N,4] x) => (float[N,3] y) {
    h = MatMul(x, u)
    r = Constant<value_float = 0.5>()
    d = Dropout(h, r)
    t = Tanh(d)
    y = MatMul(t, w)
}"""


def dropped() -> tuple[onnx.ModelProto, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    u, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 4), (4, 3)))
    return model(DROPOUT, u=u, w=w), u, w


def test_means_and_variances_of_dropout_are_those_of_all_masks() -> None:
    file, u, w = dropped()
    samples, x = 4000, X[:5]
    found = graphopt.run(graphopt.explain(file, passes.MonteCarloDropout(samples)), {"x": x})
    masks = 2 * np.array(list(itertools.product([0, 1], repeat=4)))
    every = np.stack([np.tanh(x @ u * mask) @ w for mask in masks])
    spread = every.std(0)
    np.testing.assert_allclose(found["y"], np.tanh(x @ u) @ w, rtol=1e-5, atol=1e-6)
    assert (np.abs(found["y.mean"] - every.mean(0)) < 5 * spread / np.sqrt(samples)).all()
    fourth = ((every - every.mean(0)) ** 4).mean(0)
    assert (np.abs(found["y.variance"] - spread**2) < 5 * np.sqrt((fourth - spread**4) / samples) + 1e-6).all()
    p = softmax(every, axis=2)
    assert (np.abs(found["probability"] - p.mean(0)) < 5 * p.std(0) / np.sqrt(samples)).all()

    def entropy(p: np.ndarray) -> np.ndarray:
        return -(p * np.log(p)).sum(-1)

    information = entropy(p.mean(0)) - entropy(p).mean(0)
    np.testing.assert_allclose(found["y.mutual_information"], information, rtol=0.1, atol=5e-3)


def test_no_variance_is_below_0() -> None:
    """Rounding of the mean square made half of those near 0 negative."""
    text = "g (float[N,8] x) => (float[N,8] y) { d = Dropout(x, ratio) y = Mul(d, d) }"
    unsure = graphopt.explain(model(text, ratio=np.array(0.001)), passes.MonteCarloDropout(7, task="regression"))
    x = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    assert (graphopt.run(unsure, {"x": x})["y.variance"] >= 0).all()


def test_masks_of_dropout_are_the_same_bits_in_each_call_and_runtime() -> None:
    file, *_ = dropped()
    unsure = graphopt.explain(file, passes.MonteCarloDropout(20))
    first, second = (graphopt.run(unsure, {"x": X}) for _ in range(2))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
    reference = onnx.reference.ReferenceEvaluator(ir.to_proto(unsure))
    with np.errstate(over="ignore"):
        others = dict(zip(first, reference.run(None, {"x": X}), strict=True))
    for name, value in first.items():
        np.testing.assert_allclose(value, others[name], rtol=1e-4, atol=1e-5)
    other = graphopt.run(graphopt.explain(file, passes.MonteCarloDropout(20, seed=1)), {"x": X})
    assert np.abs(other["y.mean"] - first["y.mean"]).max() > 1e-3


def test_old_runtimes_get_no_empty_attributes() -> None:
    """ONNX Runtime 1.16 refused the loop over masks, whose sums alone leave it."""
    lowered = graphopt.lower(graphopt.explain(dropped()[0], passes.MonteCarloDropout(5)), "portable")
    (loop,) = (node for node in lowered.graph if node.op_type == "Scan")
    assert "scan_input_axes" in loop.attributes
    assert not [x.name for x in loop.attributes.values() if x.type is ir.AttributeType.INTS and not x.value]


def test_an_ensemble_is_the_mean_of_its_members() -> None:
    members = [models.mlp((4,), 3, seed=seed) for seed in range(4)]
    unsure = graphopt.explain(members[0], passes.Ensemble(members[1:]))
    every = np.stack([graphopt.run(member, {"x": X})["y"] for member in members])
    found = graphopt.run(unsure, {"x": X})
    np.testing.assert_allclose(found["y.mean"], every.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["y.variance"], every.var(0), rtol=1e-3, atol=1e-6)
    p = softmax(every, axis=2)
    np.testing.assert_allclose(found["probability"], p.mean(0), rtol=1e-4)
    entropy = [-(q * np.log(q)).sum(-1) for q in (p.mean(0), p)]
    np.testing.assert_allclose(found["y.mutual_information"], entropy[0] - entropy[1].mean(0), atol=1e-5)


TWO_PRODUCTS = "g (float[N,4] x) => (float[N,3] y) { a = MatMul(x, w) h = Tanh(x) b = MatMul(h, v) y = Add(a, b) }"
RELU = "g (float[N,4] x) => (float[N,4] y) { y = Relu(x) }"


@pytest.mark.parametrize(
    ("of", "unsure", "message"),
    [
        (
            lambda: model(RELU),
            passes.LastLayerLaplace(),
            "expected 'y' to come out of a Gemm or MatMul with a constan",
        ),
        (
            lambda: model(TWO_PRODUCTS, w=np.ones((4, 3)), v=np.ones((4, 3))),
            passes.LastLayerLaplace(),
            "expected 'y' to come out of one layer, found a sum of two values",
        ),
        (
            lambda: models.mlp((4,), 3),
            passes.MonteCarloDropout(),
            "expected Dropout before 'y', found none: export",
        ),
        (
            lambda: models.mlp((4,), 3),
            passes.Ensemble([models.mlp((5,), 3)]),
            "member 1: expected the inputs x of the",
        ),
        (
            lambda: models.mlp((4,), 3),
            passes.Ensemble([models.mlp((4,), 2)]),
            "member 1: expected an output 'y' FLOAT",
        ),
        (
            lambda: models.linear((4000,), 3),
            passes.LastLayerLaplace(),
            "at most 8192 weights for structure='full', f",
        ),
    ],
)
def test_bad_input_is_answered_in_one_line(of: object, unsure: Pass, message: str) -> None:
    with pytest.raises(GraphoptError) as error:
        graphopt.calibrate(of(), {"x": X, "target": np.zeros(60, np.int64)}, unsure)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_of_float16_what_is_unsure_is_finite() -> None:
    """The logarithm of 0 made it NaN."""
    text = "g (float16[N,4] x) => (float16[N,4] y) { y = Identity(x) }"
    unsure = graphopt.explain(model(text), passes.Ensemble([model(text)]))
    found = graphopt.run(unsure, {"x": np.float16([[30, 0, 0, -30], [0, 0, 0, 0]])})["y.mutual_information"]
    assert (found >= 0).all()
    assert (found < 1e-2).all()


@pytest.mark.parametrize("members", [[], "nofile.onnx"])
def test_an_ensemble_has_members(members: object) -> None:
    with pytest.raises(GraphoptError, match="Ensemble: expected a list of one other model or more, found "):
        passes.Ensemble(members)


def test_a_layer_of_zeros_has_no_marginal_prior() -> None:
    flat = model("g (float[N,4] x) => (float[N,1] y) { y = MatMul(x, w) }", w=np.zeros((4, 1)))
    data = {"x": X, "target": X.sum(1, keepdims=True)}
    with pytest.raises(GraphoptError, match="expected last weights other than 0"):
        graphopt.calibrate(flat, data, passes.LastLayerLaplace(task="regression"))


def test_a_feature_that_is_always_1_is_no_bias() -> None:
    """The order of the features changes nothing."""
    rng = np.random.default_rng(3)
    x = np.append(rng.standard_normal((60, 3)), np.ones((60, 1)), 1).astype(np.float32)
    w, target = rng.standard_normal((4, 3)).astype(np.float32), rng.integers(0, 3, 60)
    found = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        file = model("g (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }", w=w[order])
        rows = {"x": x[:, order], "target": target}
        unsure = graphopt.calibrate(file, rows, passes.LastLayerLaplace(0.7, "kron"))
        found.append(graphopt.run(unsure, {"x": x[:, order]})["y.variance"])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
