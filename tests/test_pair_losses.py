"""Losses of pairs, preferences and teachers: values and gradients are those of PyTorch."""

from __future__ import annotations

from typing import Any

import messages
import numpy as np
import onnx
import pytest
import torch
from builders import TYPES, mlp, model, run
from test_halves import halved
from torch.nn import functional as F  # noqa: N812
from twins import descended

import graphopt
import passes
from graphopt.errors import GraphoptError

RNG = np.random.default_rng(0)
ROWS = {name: RNG.standard_normal((6, 4)) for name in ("first", "positive", "negative", "negative_2", "other")}
SCORES, SIGNS = RNG.uniform(0, 1, 6), np.array([1.0, -1, 1, -1, -1, 1])


def torch_weights(proto: onnx.ModelProto) -> dict[str, torch.Tensor]:
    arrays = {x.name: onnx.numpy_helper.to_array(x).copy() for x in proto.graph.initializer}
    return {name: torch.tensor(x, requires_grad=True) for name, x in arrays.items() if x.dtype == np.float64}


def embed(w: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    hidden = torch.tanh(torch.tensor(ROWS[name]) @ w["fc0.weight"].T + w["fc0.bias"])
    return hidden @ w["fc1.weight"].T + w["fc1.bias"]


def ranked(w: dict[str, torch.Tensor], *others: str, scale: float = 20.0, symmetric: bool = False) -> torch.Tensor:
    a, p, *n = (F.normalize(embed(w, name)) for name in ("first", "positive", *others))
    here = torch.arange(len(a))
    forward = F.cross_entropy(scale * a @ torch.cat([p, *n]).T, here, reduction="none")
    return (forward + F.cross_entropy(scale * p @ a.T, here, reduction="none")) / 2 if symmetric else forward


def triplet(distance: Any, margin: float) -> Any:
    loss = torch.nn.TripletMarginWithDistanceLoss(distance_function=distance, margin=margin, reduction="none")
    return lambda w: loss(embed(w, "first"), embed(w, "positive"), embed(w, "negative"))


def similar(w: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cosine_similarity(embed(w, "first"), embed(w, "other"))


LOSSES: dict[str, tuple[passes.Loss, Any]] = {
    "InfoNCE": (passes.InfoNCE(), ranked),
    "InfoNCE of negatives": (
        passes.InfoNCE(0.5, negatives=1),
        lambda w: ranked(w, "negative", scale=2.0),
    ),
    "symmetric InfoNCE": (passes.InfoNCE(0.1, symmetric=True), lambda w: ranked(w, scale=10, symmetric=True)),
    "Triplet": (passes.Triplet(2.0), triplet(F.pairwise_distance, 2.0)),
    "Triplet of sums": (
        passes.Triplet(distance="manhattan"),
        triplet(lambda x, y: F.pairwise_distance(x, y, p=1), 1.0),
    ),
    "Triplet of cosines": (
        passes.Triplet(0.3, distance="cosine"),
        triplet(lambda x, y: 1 - F.cosine_similarity(x, y), 0.3),
    ),
    "CosineSimilarity": (
        passes.CosineSimilarity(),
        lambda w: (similar(w) - torch.tensor(SCORES)) ** 2,
    ),
    "CosineEmbedding": (
        passes.CosineEmbedding(0.2),
        lambda w: F.cosine_embedding_loss(
            embed(w, "first"), embed(w, "other"), torch.tensor(SIGNS), 0.2, reduction="none"
        ),
    ),
}


def fed(loss: passes.Loss, step: Any, dtype: type = np.float64) -> dict[str, np.ndarray]:
    inputs = [str(x.name) for x in step.graph.inputs]
    feeds = {name: ROWS[name.removeprefix("x_")] for name in inputs if name.startswith("x_")}
    if "target" in inputs:
        feeds["target"] = SIGNS if isinstance(loss, passes.CosineEmbedding) else SCORES
    if "sample_weight" in inputs:
        feeds["sample_weight"] = SCORES
    return {"x": ROWS["first"].astype(dtype), **{name: x.astype(dtype) for name, x in feeds.items()}}


@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_are_pytorchs(name: str, weighted: bool) -> None:
    loss, twin = LOSSES[name]
    loss = type(loss)(**{**vars(loss), "sample_weight": weighted})
    proto = mlp(dtype=np.float64)
    step = graphopt.compile(proto, loss=loss, optimizer=passes.SGD(1.0))
    weights = torch_weights(proto)
    rows = twin(weights)
    shares = torch.tensor(SCORES) if weighted else torch.ones(6, dtype=torch.float64)
    expected = (rows * shares).sum() / shares.sum()
    expected.backward()
    (outputs,) = run(step, 1, fed(loss, step))
    np.testing.assert_allclose(outputs["loss"], expected.item(), rtol=1e-9)
    for key, w in weights.items():
        moved = (w - w.grad).detach().numpy()
        np.testing.assert_allclose(outputs[f"{key}.next"], moved, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(outputs["y"], embed(weights, "first").detach().numpy(), rtol=1e-9)


@pytest.mark.parametrize("name", ["InfoNCE of negatives", "CosineSimilarity"])
@pytest.mark.slow
def test_a_pair_loss_fits_evaluates_and_exports(name: str) -> None:
    assert issubclass(passes.InfoNCE, passes.PairLoss)
    """Rows of a pair stay together when `fit` shuffles them, and prediction reads the first of them alone."""
    loss = LOSSES[name][0]
    executor = graphopt.Executor(graphopt.compile(mlp(), loss=loss, optimizer=passes.AdamW(0.05)), threads=1)
    many = {key: np.tile(x, (8, *[1] * (x.ndim - 1))) for key, x in fed(loss, executor.model, np.float32).items()}
    rest = {key: x[:6] for key, x in many.items()}
    before = executor.evaluate(rest)["loss"]
    records = graphopt.fit(executor, many, epochs=10, batch_size=6, validation=rest)
    assert records[-1]["validation_loss"] == pytest.approx(executor.evaluate(rest)["loss"], rel=1e-4)
    assert records[-1]["validation_loss"] < before
    trained = executor.trained()
    assert [node.op_type for node in trained.graph.node] == [node.op_type for node in mlp().graph.node]
    assert [x.name for x in trained.graph.input] == ["x"]
    y = graphopt.run(trained, {"x": rest["x"]})["y"]
    np.testing.assert_allclose(executor.predict(x=rest["x"])["y"], y, atol=1e-6)
    assert executor.evaluate(rest)["y"].shape == y.shape


@pytest.mark.slow
def test_a_pair_loss_runs_on_targets_workers_and_with_accumulation() -> None:
    steps = {"loss": passes.Triplet(5.0), "optimizer": passes.AdamW(0.01)}
    step = graphopt.compile(mlp(), **steps)
    feeds = fed(steps["loss"], step, np.float32)
    plain = graphopt.Executor(step, threads=1, target="plain")
    losses = [plain.step(feeds)["loss"] for _ in range(6)]
    twice = graphopt.compile(mlp(), accumulate=passes.Accumulate(2), **steps)
    for other in (
        graphopt.Executor(step, threads=1, native=True),
        graphopt.Executor(step, threads=1, target="onnxruntime"),
        halved(graphopt.standard(**steps), mlp(), native=False),
    ):
        np.testing.assert_allclose([other.step(feeds)["loss"] for _ in range(6)], losses, rtol=1e-5)
    both = graphopt.Executor(twice, threads=1)
    found = [both.step(feeds)["loss"] for _ in range(12)]
    np.testing.assert_allclose(found[::2], losses, rtol=1e-5)


# --- Preferences ---

V, S = 11, 5
LM = """g (int64[N,S] input_ids) => (NUMBER[N,S,11] logits) {
    e = Gather(words, input_ids)  h = MatMul(e, hidden)  t = Tanh(h)  logits = MatMul(t, head) }"""
TOKENS = {name: RNG.integers(0, V, (4, S)) for name in ("input_ids", "input_ids_rejected")}
MASKS = {
    "completion_mask": np.array([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 1, 0]]),
    "completion_mask_rejected": np.array([[0, 0, 1, 0, 0], [0, 1, 1, 1, 0], [0, 1, 1, 1, 1], [0, 0, 0, 1, 1]]),
}


def language_model(dtype: type = np.float64) -> onnx.ModelProto:
    rng = np.random.default_rng(4)
    shapes = {"words": (V, 6), "hidden": (6, 7), "head": (7, V)}
    text = LM.replace("NUMBER", TYPES[dtype])
    return model(text, dtype=dtype, **{name: rng.standard_normal(shape) for name, shape in shapes.items()})


def log_probabilities(w: dict[str, torch.Tensor], which: str, average: bool = False) -> torch.Tensor:
    ids = torch.tensor(TOKENS[f"input_ids{which}"])
    mask = torch.tensor(MASKS[f"completion_mask{which}"])[:, 1:]
    logits = torch.tanh(w["words"][ids] @ w["hidden"]) @ w["head"]
    log_p = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * mask
    return log_p.sum(1) / (mask.sum(1) if average else 1)


def preference(w: Any, reference: Any, options: dict[str, Any]) -> torch.Tensor:
    """Return the loss as TRL computes it."""
    kind, beta = options.get("loss_type", "sigmoid"), options.get("beta", 0.1)
    average, noise = kind == "ipo" or options.get("average", False), options.get("label_smoothing", 0.0)
    chosen, rejected = (log_probabilities(w, which, average) for which in ("", "_rejected"))
    if reference is not None:
        chosen = chosen - log_probabilities(reference, "", average).detach()
        rejected = rejected - log_probabilities(reference, "_rejected", average).detach()
    d = chosen - rejected
    kept, flipped = -F.logsigmoid(beta * d), -F.logsigmoid(-beta * d)
    return {
        "sigmoid": (1 - noise) * kept + noise * flipped,
        "robust": ((1 - noise) * kept - noise * flipped) / (1 - 2 * noise),
        "hinge": torch.relu(1 - beta * d),
        "ipo": (d - 1 / (2 * beta)) ** 2,
    }[kind].mean()


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "smoothed": {"beta": 0.5, "label_smoothing": 0.2},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "hinge": {"loss_type": "hinge", "beta": 0.3},
    "ipo": {"loss_type": "ipo", "beta": 0.5},
    "means": {"average": True, "beta": 2.0},
    "no reference": {"reference": "none"},
    "in blocks": {"blocks": 3},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow
def test_dpo_is_trls_over_several_steps(name: str) -> None:
    """The reference is the model before the first step."""
    options, proto = OPTIONS[name], language_model()
    step = graphopt.compile(proto, loss=passes.DPO(**options), optimizer=passes.SGD(0.5))
    weights, start = torch_weights(proto), torch_weights(language_model())
    reference = None if options.get("reference") == "none" else start
    optimizer = torch.optim.SGD(weights.values(), 0.5)
    for outputs in run(step, 5, {**TOKENS, **MASKS}):
        loss = preference(weights, reference, options)
        assert outputs["loss"] == pytest.approx(loss.item(), rel=1e-8)
        descended(loss, optimizer)
    for key, w in weights.items():
        np.testing.assert_allclose(outputs[f"{key}.next"], w.detach().numpy(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["default", "smoothed", "robust"])
@pytest.mark.parametrize("beta", [0.5, 2000.0])
def test_dpo_in_float64_runs_on_the_runtime(name: str, beta: float) -> None:
    """ONNX Runtime has no Softplus in float64; large margins do not overflow."""
    options, proto = {**OPTIONS[name], "beta": beta, "reference": "none"}, language_model()
    step = graphopt.compile(proto, loss=passes.DPO(**options), optimizer=passes.SGD(1e-6))
    found = graphopt.Executor(step, native=False).step({**TOKENS, **MASKS})["loss"]
    assert found == pytest.approx(preference(torch_weights(proto), None, options).item(), rel=1e-8)


def test_dpo_takes_precomputed_log_probabilities() -> None:
    proto = language_model(np.float32)
    given = {
        f"reference{which}": log_probabilities(torch_weights(language_model()), which)
        .detach()
        .numpy()
        .astype(np.float32)
        - np.float32(0.1)
        for which in ("", "_rejected")
    }
    executor = graphopt.Executor(
        graphopt.compile(proto, loss=passes.DPO(reference="inputs"), optimizer=passes.SGD(0.5))
    )
    reported = executor.step({**TOKENS, **MASKS, **given})
    assert reported["loss"] == pytest.approx(np.log(2))
    assert reported["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert executor.step({**TOKENS, **MASKS, **given})["reward_accuracy"] == 1


@pytest.mark.slow
def test_dpo_with_adapters_has_the_same_file_without_them_as_its_reference() -> None:
    """The graph stores no weight twice, and the trained file predicts what the executor does."""
    proto = language_model(np.float32)
    step = graphopt.compile(
        proto, adapter=passes.LoRA("h*", rank=2), loss=passes.DPO(beta=0.5), optimizer=passes.AdamW(0.05)
    )
    assert not [name for name in step.graph.initializers if name.startswith("reference/")]
    executor = graphopt.Executor(step, threads=1)
    feeds = {**TOKENS, **MASKS}
    losses = [executor.step(feeds)["loss"] for _ in range(10)]
    assert losses[0] == pytest.approx(np.log(2), rel=1e-6)
    weights = {
        x.name: torch.tensor(onnx.numpy_helper.to_array(x).astype(float)) for x in executor.trained().graph.initializer
    }
    expected = preference(weights, torch_weights(language_model()), {"beta": 0.5})
    assert executor.evaluate(feeds)["loss"] == pytest.approx(expected.item(), rel=2e-5)
    assert losses[-1] < 0.5 * losses[0]
    y = graphopt.run(executor.trained(), {"input_ids": TOKENS["input_ids"]})["logits"]
    np.testing.assert_allclose(executor.predict(input_ids=TOKENS["input_ids"])["logits"], y, atol=1e-5)


# --- Teachers ---


def distilled(w: Any, teacher: torch.Tensor, target: torch.Tensor, t: float, alpha: float) -> torch.Tensor:
    logits = embed(w, "first")
    soft = F.kl_div((logits / t).log_softmax(-1), (teacher / t).softmax(-1), reduction="batchmean")
    return alpha * t * t * soft + (1 - alpha) * F.cross_entropy(logits, target)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("source", ["file", "input"])
def test_distillation_is_pytorchs(source: str, alpha: float, tmp_path: Any) -> None:
    student, teacher = mlp(dtype=np.float64), mlp((4, 16, 3), dtype=np.float64, seed=5)
    graphopt.save(teacher, tmp_path / "teacher.onnx")
    logits, labels = graphopt.run(teacher, {"x": ROWS["first"]})["y"], np.arange(6) % 3
    loss = passes.Distillation(tmp_path / "teacher.onnx" if source == "file" else None, temperature=3.0, alpha=alpha)
    step = graphopt.compile(student, loss=loss, optimizer=passes.SGD(1.0))
    given = {"teacher": logits, "target": labels, "x": ROWS["first"]}
    feeds = {str(x.name): given[str(x.name)] for x in step.graph.inputs if x.name in given}
    weights = torch_weights(student)
    expected = distilled(weights, torch.tensor(logits), torch.tensor(labels), 3.0, alpha)
    expected.backward()
    (outputs,) = run(step, 1, feeds)
    np.testing.assert_allclose(outputs["loss"], expected.item(), rtol=1e-7)
    for key, w in weights.items():
        np.testing.assert_allclose(outputs[f"{key}.next"], (w - w.grad).detach().numpy(), rtol=1e-6, atol=1e-9)
    assert {str(x.name) for x in step.graph.inputs if "teacher/" in str(x.name)} == set()
    executor = graphopt.Executor(step)
    assert {x.name for x in executor.trained().graph.initializer} == set(weights)


def test_distillation_has_another_loss_and_its_ignored_labels() -> None:
    hard = passes.CrossEntropy(ignore_index=2)
    step = graphopt.compile(mlp(dtype=np.float64), loss=passes.Distillation(loss=hard), optimizer=passes.SGD(1.0))
    labels, teacher = np.array([0, 2, 1, 2, 2, 0]), RNG.standard_normal((6, 3))
    (outputs,) = run(step, 1, {"x": ROWS["first"], "teacher": teacher, "target": labels})
    kept = labels != 2
    logits = embed(torch_weights(mlp(dtype=np.float64)), "first")[kept]
    soft = F.kl_div((logits / 2).log_softmax(-1), (torch.tensor(teacher[kept]) / 2).softmax(-1), reduction="batchmean")
    expected = 0.5 * 4 * soft + 0.5 * F.cross_entropy(logits, torch.tensor(labels[kept]))
    np.testing.assert_allclose(outputs["loss"], expected.item(), rtol=1e-7)


# --- Wrong input ---


def compiled(loss: passes.Loss, proto: Any = None) -> Any:
    return graphopt.compile(proto or mlp(), loss=loss, optimizer=passes.SGD(0.1))


FIXED = "g (float[4,4] x) => (float[4,4] y) { y = Mul(x, w) }"


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("pair_losses_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("pair_losses_mistakes", call, globals())


def test_a_teacher_that_does_not_fit_is_refused(tmp_path: Any) -> None:
    for name, sizes, message in (
        ("classes", (4, 8, 5), r"expected logits of shape .*3\], found .*5\]"),
        ("inputs", (4, 3), "expected one that reads the model's inputs a, b, found 'x': rename it"),
    ):
        graphopt.save(mlp(sizes), tmp_path / f"{name}.onnx")
        student = mlp()
        if name == "inputs":
            student = model(
                "g (float[N,4] a, float[N,4] b) => (float[N,3] y) { c = Add(a, b)  y = MatMul(c, w) }",
                w=np.ones((4, 3)),
            )
        with pytest.raises(GraphoptError, match=f"^Distillation: teacher .*{message}"):
            compiled(passes.Distillation(tmp_path / f"{name}.onnx"), student)


def test_texts_of_two_lengths_train_as_apart_when_padded_and_masked():
    """PyTorch embeds each side at its own length."""
    proto = mean_of_tokens()
    table = torch.tensor(onnx.numpy_helper.to_array(proto.graph.initializer[0]).copy(), requires_grad=True)
    feeds = tokens_of((4, 5), (4, 9))
    executor = graphopt.Executor(graphopt.compile(proto, **RANKED), native=False)
    width = feeds["x_positive"].shape[1]
    padded = {name: np.pad(array, ((0, 0), (0, width - array.shape[1]))) for name, array in feeds.items()}
    losses = []
    for _ in range(3):
        a, p = (F.normalize(table[feeds[name]].mean(1)) for name in ("x", "x_positive"))
        loss = F.cross_entropy(20 * a @ p.T, torch.arange(len(a)))
        (gradient,) = torch.autograd.grad(loss, table)
        table = (table - 0.1 * gradient).detach().requires_grad_()
        losses.append(loss.item())
    assert [executor.step(padded)["loss"] for _ in range(3)] == pytest.approx(losses, rel=1e-5)


RANKED: Any = {"loss": passes.InfoNCE(), "optimizer": passes.SGD(0.1)}


def mean_of_tokens() -> onnx.ModelProto:
    """Return a model of texts: the mean of the rows of a table, over the positions that the mask has."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (int64[N,L] x, float[N,L] mask) => (float[N,D] y) {'
        " one = Constant<value_ints = [1]>() two = Constant<value_ints = [2]>() e = Gather(table, x)"
        " k = Unsqueeze(mask, two) p = Mul(e, k) s = ReduceSum<keepdims = 0>(p, one)"
        " n = ReduceSum<keepdims = 1>(mask, one) y = Div(s, n) }"
    )
    array = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "table"))
    return proto


def tokens_of(first: tuple[int, int], positive: tuple[int, int]) -> dict[str, np.ndarray]:
    rng, feeds = np.random.default_rng(1), {}
    for end, shape in (("", first), ("_positive", positive)):
        feeds |= {f"x{end}": rng.integers(0, 20, shape), f"mask{end}": np.ones(shape, np.float32)}
    return feeds
