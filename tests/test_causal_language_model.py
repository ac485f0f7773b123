"""The loss of causal language models, values and gradients, at once and in blocks, against PyTorch's."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from builders import model
from steps import assert_close

import graphopt
import passes
from graphopt import models
from graphopt.graph import inference
from graphopt.graph.roles import Role, with_role
from graphopt.graph.traversal import subgraphs

RNG = np.random.default_rng(0)
ROWS, TOKENS, WIDTH, CLASSES = 3, 5, 4, 7
IDS = RNG.integers(0, CLASSES, (ROWS, TOKENS))
SOME = np.where(RNG.random(IDS.shape) < 0.3, -100, IDS)
MASK = (RNG.random(IDS.shape) < 0.6).astype(np.int64)
WEIGHTS = {
    "table": RNG.standard_normal((CLASSES, WIDTH)),
    "head": RNG.standard_normal((WIDTH, CLASSES)),
    "turned": RNG.standard_normal((CLASSES, WIDTH)),
    "bias": RNG.standard_normal(CLASSES),
    "a": RNG.standard_normal((WIDTH, 2)),
    "b": RNG.standard_normal((2, CLASSES)),
}
# What computes the logits of hidden numbers h, in ONNX and in PyTorch
HEADS: dict[str, tuple[str, Any]] = {
    "product": ("logits = MatMul(h, head)", lambda h, w: h @ w["head"]),
    "bias": ("z = MatMul(h, head) logits = Add(z, bias)", lambda h, w: h @ w["head"] + w["bias"]),
    "tied": (
        "t = Transpose<perm = [1, 0]>(table) logits = MatMul(h, t)",
        lambda h, w: h @ w["table"].T,
    ),
    "soft cap": (
        "z = MatMul(h, head) c = Constant<value = float {2.0}>() d = Div(z, c) e = Tanh(d) logits = Mul(e, c)",
        lambda h, w: 2 * torch.tanh(h @ w["head"] / 2),
    ),
    "Gemm": (
        "s = Constant<value = int64[2] {-1, 4}>() f = Reshape(h, s) g = Gemm<transB = 1>(f, turned, bias) "
        "k = Constant<value = int64[3] {-1, 5, 7}>() logits = Reshape(g, k)",
        lambda h, w: h @ w["turned"].T + w["bias"],
    ),
    "adapter": (
        "z = MatMul(h, head) u = MatMul(h, a) v = MatMul(u, b) c = Constant<value = float {0.5}>() k = Mul(v, c) "
        "logits = Add(z, k)",
        lambda h, w: h @ w["head"] + 0.5 * (h @ w["a"] @ w["b"]),
    ),
    "cast": (
        "z = MatMul(h, head) d = Cast<to = 11>(z) e = Cast<to = 1>(d) logits = Identity(e)",
        lambda h, w: h @ w["head"],
    ),
}


def decoder(head: str = "product", batch: str = "N", tokens: str = "S") -> onnx.ModelProto:
    """Return a model in which the logits of a token depend on this token alone."""
    body = HEADS[head][0]
    tokens = "5" if head == "Gemm" else tokens
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (int64[{batch},{tokens}] input_ids) => '
        f"(float[{batch},{tokens},{CLASSES}] logits) {{ x = Gather(table, input_ids) h = Tanh(x) {body} }}"
    )
    for name, array in WEIGHTS.items():
        if name in body or name == "table":
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return proto


def by_torch(head: str, ids: np.ndarray, labels: np.ndarray, **options: Any) -> dict[str, np.ndarray]:
    """Return PyTorch's loss and gradients in float64."""
    w = {name: torch.tensor(array, requires_grad=True) for name, array in WEIGHTS.items()}
    logits = HEADS[head][1](torch.tanh(w["table"][torch.tensor(ids)]), w)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), torch.tensor(labels)[:, 1:].flatten(), **options)
    loss.backward()
    return {"loss": loss.detach().numpy(), **{k: x.grad.numpy() for k, x in w.items() if x.grad is not None}}


def by_graphopt(
    model: Any, loss: Any, feeds: dict[str, np.ndarray], **steps: Any
) -> tuple[dict[str, Any], graphopt.Executor]:
    """Return the loss and the gradients of a step of gradient descent."""
    optimizer = passes.SGD(1.0)
    executor = graphopt.Executor(graphopt.compile(model, loss=loss, optimizer=optimizer, **steps), native=False)
    before = executor.parameters
    reported = executor.step(feeds)
    found = {name: before[name] - array for name, array in executor.parameters.items()}
    return {"loss": reported["loss"], **found}, executor


def check(found: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    assert_close(found, expected, rtol=2e-6)


@pytest.mark.parametrize("blocks", [None, 1, 4, 100])
@pytest.mark.parametrize("head", HEADS)
def test_losses_and_gradients_are_pytorch_s(head: str, blocks: int | None) -> None:
    loss = passes.CausalLanguageModel(blocks=blocks)
    found, executor = by_graphopt(decoder(head), loss, {"input_ids": IDS})
    check(found, by_torch(head, IDS, IDS))
    scans = [node for node in executor.model.graph if node.op_type == "Scan"]
    assert len(scans) == (0 if blocks is None else 1)


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_options_are_those_of_cross_entropy(reduction: str, smoothing: float, blocks: int | None) -> None:
    loss = passes.CausalLanguageModel(labels=True, label_smoothing=smoothing, reduction=reduction, blocks=blocks)
    found, _ = by_graphopt(decoder("bias"), loss, {"input_ids": IDS, "labels": SOME})
    check(found, by_torch("bias", IDS, SOME, reduction=reduction, label_smoothing=smoothing))


@pytest.mark.parametrize("blocks", [None, 2])
def test_tokens_of_prompts_and_of_padding_do_not_count(blocks: int | None) -> None:
    loss = passes.CausalLanguageModel(completion_only=True, blocks=blocks)
    found, _ = by_graphopt(decoder(), loss, {"input_ids": IDS, "completion_mask": MASK})
    check(found, by_torch("product", IDS, np.where(MASK, IDS, -100)))
    loss = passes.CausalLanguageModel(ignore_index=2, blocks=blocks)
    found, _ = by_graphopt(decoder(), loss, {"input_ids": IDS})
    check(found, by_torch("product", IDS, IDS, ignore_index=2))
    with_mask = decoder()
    mask = onnx.helper.make_tensor_value_info("attention_mask", onnx.TensorProto.INT64, ["N", "S"])
    with_mask.graph.input.append(mask)
    found, _ = by_graphopt(
        with_mask, passes.CausalLanguageModel(blocks=blocks), {"input_ids": IDS, "attention_mask": MASK}
    )
    check(found, by_torch("product", IDS, np.where(MASK, IDS, -100)))


@pytest.mark.parametrize("blocks", [None, 2])
def test_weights_of_rows_are_weights_of_their_tokens(blocks: int | None) -> None:
    loss = passes.CausalLanguageModel(labels=True, sample_weight=True, blocks=blocks)
    weights = np.float32([0.5, 0.0, 2.0])
    feeds = {"input_ids": IDS, "labels": SOME, "sample_weight": weights}
    found, _ = by_graphopt(decoder(), loss, feeds)
    terms = [by_torch("product", IDS[[i]], SOME[[i]], reduction="sum") for i in range(ROWS)]
    count = sum(w * (row[1:] != -100).sum() for w, row in zip(weights, SOME, strict=True))
    expected = {k: sum(w * term[k] for w, term in zip(weights, terms, strict=True)) / count for k in terms[0]}
    check(found, expected)


def test_a_row_s_own_loss_is_the_mean_of_its_tokens() -> None:
    for blocks in (None, 2):
        loss = passes.CausalLanguageModel(labels=True, reduction="none", blocks=blocks)
        step = graphopt.compile(decoder(), loss=loss, gradient=None)
        found = graphopt.run(step, {"input_ids": IDS, "labels": SOME})["loss"]
        rows = [by_torch("product", IDS[[i]], SOME[[i]])["loss"] for i in range(ROWS)]
        np.testing.assert_allclose(found, rows, rtol=1e-6)


def test_a_batch_without_tokens_that_count_trains_nothing() -> None:
    for blocks in (None, 2):
        loss = passes.CausalLanguageModel(labels=True, blocks=blocks)
        found, _ = by_graphopt(decoder(), loss, {"input_ids": IDS, "labels": np.full_like(IDS, -100)})
        assert all((array == 0).all() for array in map(np.asarray, found.values()))


def test_frozen_weights_have_no_gradients_in_the_blocks() -> None:
    step = graphopt.compile(
        decoder(),
        parameters=passes.Parameters("table"),
        loss=passes.CausalLanguageModel(blocks=2),
        optimizer=passes.SGD(1.0),
    )
    (scan,) = [node for node in step.graph if node.op_type == "Scan"]
    assert [str(y.shape) for y in scan.outputs] == [
        "[logits/blocks,logits/rows]",
        "[logits/blocks,logits/rows,4]",
    ]
    found, _ = by_graphopt(
        decoder(),
        passes.CausalLanguageModel(blocks=2),
        {"input_ids": IDS},
        parameters=passes.Parameters("table"),
    )
    expected = by_torch("product", IDS, IDS)
    check(found, {"loss": expected["loss"], "table": expected["table"]})


def test_the_logits_are_outputs_of_prediction_and_evaluation_but_not_of_a_step() -> None:
    loss = passes.CausalLanguageModel(blocks=2)
    _, executor = by_graphopt(decoder(), loss, {"input_ids": IDS})
    assert executor.reported == ("loss",)
    assert executor.outputs == ("loss", "logits")
    trained = executor.trained()
    assert [x.name for x in trained.graph.input] == ["input_ids"]
    logits = graphopt.run(trained, {"input_ids": IDS})["logits"]
    assert logits.shape == (ROWS, TOKENS, CLASSES)
    np.testing.assert_array_equal(executor.predict(input_ids=IDS)["logits"], logits)
    evaluated = executor.evaluate(input_ids=IDS)
    np.testing.assert_array_equal(evaluated["logits"], logits)
    expected = F.cross_entropy(torch.tensor(logits[:, :-1]).flatten(0, 1), torch.tensor(IDS[:, 1:]).flatten())
    assert evaluated["loss"] == pytest.approx(float(expected), rel=1e-6)
    part = inference.extract(executor.model, with_role(executor.model, Role.LOSS))
    (scan,) = [node for node in part.graph if node.op_type == "Scan"]
    assert "Gemm" not in {node.op_type for node in subgraphs(scan)[0]}, "evaluation computes no gradient"
    named = graphopt.Executor(graphopt.compile(decoder(), loss=loss, optimizer=passes.SGD(1.0)), report=["logits"])
    assert named.step(input_ids=IDS).keys() == {"loss", "logits"}


def test_metrics_compare_the_logits_with_the_next_token() -> None:
    loss = passes.CausalLanguageModel(labels=True, blocks=2)
    executor = graphopt.Executor(graphopt.compile(decoder(), loss=loss, optimizer=passes.SGD(1.0)))
    data = {"input_ids": IDS, "labels": SOME}
    found = graphopt.evaluate(executor, data, metrics=["perplexity", "accuracy"], batch_size=ROWS)
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]), rel=1e-5)
    logits, valid = executor.predict(input_ids=IDS)["logits"][:, :-1], SOME[:, 1:] != -100
    assert found["accuracy"] == pytest.approx((logits.argmax(-1) == SOME[:, 1:])[valid].mean())


def test_validation_without_metrics_computes_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = passes.CausalLanguageModel(blocks=2)
    executor = graphopt.Executor(graphopt.compile(decoder(), loss=loss, optimizer=passes.SGD(1.0)))
    expected = executor.evaluate(input_ids=IDS)["loss"]
    assert executor.losses(input_ids=IDS) == {"loss": expected}
    monkeypatch.setattr(graphopt.Executor, "evaluate", None)
    measured = {"loss": pytest.approx(expected), "perplexity": pytest.approx(np.exp(expected))}
    assert graphopt.evaluate(executor, {"input_ids": IDS}) == measured


@pytest.mark.parametrize("wanted", [None, ["perplexity", "accuracy"]])
def test_perplexity_is_that_of_all_tokens_that_count(wanted: Any) -> None:
    """In batches of unequal numbers of tokens, with masks and a penalty beside the loss."""
    loss = passes.CausalLanguageModel(labels=True, completion_only=True, blocks=2)
    steps = {"loss": loss, "optimizer": passes.SGD(1.0), "regularizer": passes.L2(0.1)}
    executor = graphopt.Executor(graphopt.compile(decoder(), **steps))
    mask = (IDS % 3 > 0).astype(np.int64)
    data = {"input_ids": IDS, "labels": SOME, "completion_mask": mask}
    found = graphopt.evaluate(executor, data, metrics=wanted, batch_size=1)
    logits = torch.tensor(executor.predict(input_ids=IDS)["logits"])[:, :-1]
    labels = np.where(mask > 0, SOME, -100)[:, 1:]
    assert (labels != -100).sum(1).min() < (labels != -100).sum(1).max()
    expected = F.cross_entropy(logits.flatten(0, 1), torch.tensor(labels).flatten())
    assert found["perplexity"] == pytest.approx(float(expected.exp()), rel=1e-5)
    if wanted:
        right = logits.argmax(-1).numpy() == labels
        assert found["accuracy"] == pytest.approx(right[labels != -100].mean())


def test_a_smoothed_loss_is_no_perplexity() -> None:
    loss = passes.CausalLanguageModel(label_smoothing=0.1)
    executor = graphopt.Executor(graphopt.compile(decoder(), loss=loss, optimizer=passes.SGD(1.0)))
    assert graphopt.evaluate(executor, {"input_ids": IDS}).keys() == {"loss"}
    found = graphopt.evaluate(executor, {"input_ids": IDS}, metrics="perplexity")
    logits = torch.tensor(executor.predict(input_ids=IDS)["logits"])[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), torch.tensor(IDS[:, 1:]).flatten())
    assert found["perplexity"] == pytest.approx(float(expected.exp()), rel=1e-5)


@pytest.mark.parametrize("unroll", [False, True])
def test_hosts_train_without_logits(tmp_path: Path, unroll: bool) -> None:
    loss = passes.CausalLanguageModel(blocks=2)
    step = graphopt.compile(decoder(tokens="5"), loss=loss, optimizer=passes.SGD(1.0))
    graphopt.export_hosts(step, tmp_path / "host", batch=ROWS, unroll=unroll)
    train = onnx.load(tmp_path / "host/train.onnx")
    assert "logits" not in {y.name for y in train.graph.output}
    assert sum(node.op_type == "Scan" for node in train.graph.node) == (0 if unroll else 1)
    state = {name: array for name, array in graphopt.Executor(step).state.items()}
    named = {x.name for x in train.graph.input}
    feeds = {"input_ids": IDS, "learning_rate": np.array(1.0, np.float32)} | {
        k: x for k, x in state.items() if k in named
    }
    found = graphopt.run(train, feeds)
    expected = by_torch("product", IDS, IDS)
    np.testing.assert_allclose(state["head"] - found["head.next"], expected["head"], atol=1e-6)
    assert "logits" in {y.name for y in onnx.load(tmp_path / "host/evaluate.onnx").graph.output}


def test_workers_train_as_one() -> None:
    loss = passes.CausalLanguageModel(labels=True, blocks=2)
    pipeline = graphopt.standard(loss=loss, optimizer=passes.SGD(1.0))
    halves = graphopt.split_step(pipeline, decoder())
    (grad,) = halves.grad
    state = graphopt.Executor(halves.step).state
    parts = [slice(0, 1), slice(1, 3)]
    initial = {x.name: state[x.name] for x in grad.graph.inputs if x.name in state}
    found = [graphopt.run(grad, {"input_ids": IDS[p], "labels": SOME[p], **initial}) for p in parts]
    names = [name for name in found[0] if name.endswith(".grad")]
    rows = sum(part["rows"] for part in found)
    expected = by_torch("product", IDS, SOME)
    for name in names:
        mean = sum(part[name] * part["rows"] for part in found) / rows
        np.testing.assert_allclose(mean, expected[name.removesuffix(".grad")], atol=1e-6)


@pytest.mark.parametrize("ignored", [None, -100])
def test_cross_entropy_computes_blocks_too(ignored: int | None) -> None:
    loss = passes.CrossEntropy(axis=-1, ignore_index=ignored, label_smoothing=0.1, blocks=2)
    target = IDS if ignored is None else SOME
    found, executor = by_graphopt(decoder("bias"), loss, {"input_ids": IDS, "target": target})
    w = {name: torch.tensor(array, requires_grad=True) for name, array in WEIGHTS.items()}
    logits = HEADS["bias"][1](torch.tanh(w["table"][torch.tensor(IDS)]), w)
    expected = F.cross_entropy(logits.flatten(0, 1), torch.tensor(target).flatten(), label_smoothing=0.1)
    expected.backward()
    gradients = {name: x.grad.numpy() for name, x in w.items() if x.grad is not None}
    check(found, {"loss": expected.detach().numpy(), **gradients})
    assert executor.reported == ("loss",)
    for wrong in (
        {"axis": 1},
        {"axis": -1, "from_logits": False},
        {"axis": -1, "target_probabilities": True},
    ):
        with pytest.raises(graphopt.GraphoptError, match="leave blocks out"):
            graphopt.compile(decoder(), loss=passes.CrossEntropy(blocks=2, **wrong))


STEPS: dict[str, dict[str, Any]] = {
    "recomputed": {"recompute": passes.Recompute()},
    "accumulated": {"accumulate": passes.Accumulate(2)},
    "clipped": {"clip": passes.ClipGlobalNorm(0.1)},
    "with a penalty": {"regularizer": passes.L2(0.1)},
    "in 16 bits": {
        "precision": passes.MixedPrecision("float16"),
        "gradient": passes.Gradient(loss_scale=64.0),
    },
    "for programs of others": {"fuse": passes.Fuse()},
}


@pytest.mark.parametrize("name", STEPS)
def test_blocks_train_as_all_logits_at_once(name: str) -> None:
    def losses(blocks: int | None, native: bool) -> list[float]:
        step = graphopt.compile(
            models.transformer((6,), 16, vocabulary=16, width=8, heads=2, layers=1),
            loss=passes.CausalLanguageModel(blocks=blocks),
            optimizer=passes.AdamW(1e-2),
            **STEPS[name],
        )
        executor = graphopt.Executor(step, native=native)
        return [executor.step(x=np.random.default_rng(i).integers(0, 16, (4, 6)))["loss"] for i in range(6)]

    tolerance = {"rtol": 2e-2 if name == "in 16 bits" else 1e-5}
    np.testing.assert_allclose(losses(3, False), losses(None, False), **tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_adapter_of_the_head_is_in_the_blocks_and_its_dropout_is_not(dropout: float) -> None:
    def losses(blocks: int | None) -> list[float]:
        adapter = passes.LoRA("head", rank=2, dropout=dropout)
        loss = passes.CausalLanguageModel(blocks=blocks)
        step = graphopt.compile(decoder("bias"), adapter=adapter, loss=loss, optimizer=passes.SGD(0.1))
        assert len([node for node in step.graph if node.op_type == "Scan"]) == (blocks is not None)
        executor = graphopt.Executor(step, native=False)
        trained = [executor.step(input_ids=IDS)["loss"] for _ in range(4)]
        return [*trained, executor.evaluate(input_ids=IDS)["loss"]]

    np.testing.assert_allclose(losses(2), losses(None), rtol=1e-6)


def test_a_head_without_a_product_holds_all_logits_with_a_warning() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[N,S] input_ids) => (float[N,S,7] logits) '
        "{ logits = Gather(table, input_ids) }"
    )
    table = WEIGHTS["table"] @ WEIGHTS["head"]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table.astype(np.float32), "table"))
    with pytest.warns(UserWarning, match="found Gather: a step holds the logits of all tokens"):
        by_graphopt(proto, passes.CausalLanguageModel(blocks=2), {"input_ids": IDS})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_graphopt(proto, passes.CausalLanguageModel(), {"input_ids": IDS})  # few classes


def test_mistakes_are_named() -> None:
    two = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[N,S] a, int64[N,S] b) => (float[N,S,7] logits) '
        "{ x = Gather(table, a) y = Gather(table, b) logits = Add(x, y) }"
    )
    table = (WEIGHTS["table"] @ WEIGHTS["head"]).astype(np.float32)
    two.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    for name in (None, "c"):
        with pytest.raises(graphopt.GraphoptError, match=r"name of the input of token ids.*the model has a, b"):
            graphopt.compile(two, loss=passes.CausalLanguageModel(tokens=name))
    graphopt.compile(two, loss=passes.CausalLanguageModel(tokens="b"))
    with pytest.raises(graphopt.GraphoptError, match=r"expected logits of shape \[rows, tokens, classes\]"):
        graphopt.compile(models.linear((2,), 3), loss=passes.CausalLanguageModel())
    with pytest.raises(graphopt.GraphoptError, match="blocks=0"):
        passes.CausalLanguageModel(blocks=0)
    executor = graphopt.Executor(
        graphopt.compile(decoder(), loss=passes.CausalLanguageModel(), optimizer=passes.SGD(1.0))
    )
    with pytest.raises(graphopt.GraphoptError, match="'input_ids': expected labels from 0 to 6, found"):
        executor.step(input_ids=IDS + 7)


# How files keep the last token before the head: onnxruntime-genai's builder, and two exports.
PRUNED = {
    "Gather": "l = Gather<axis=1>(h, last)\n p = Unsqueeze(l, one)",
    "Gather of one": "p = Gather<axis=1>(h, lasts)",
    "Slice": "p = Slice(h, lasts, end, one)",
}


@pytest.mark.parametrize("blocks", [None, 2])
@pytest.mark.parametrize("kept", PRUNED)
def test_a_file_with_the_logits_of_the_last_token_trains_on_all(kept: str, blocks: int | None) -> None:
    rng = np.random.default_rng(0)
    weights = {"table": rng.standard_normal((11, 6)), "w": rng.standard_normal((6, 11))}
    places = {"last": np.array(-1), "lasts": np.array([-1]), "one": np.array([1]), "end": np.array([2**62])}

    def executor_of(pruned: str, head: str, size: str) -> tuple[onnx.ModelProto, graphopt.Executor]:
        text = f"""g (int64[B,S] input_ids) => (float[B,{size},11] logits) {{
            e = Gather(table, input_ids)\n h = Tanh(e)\n {pruned}\n z = MatMul({head}, w)\n logits = Identity(z)
        }}"""
        proto = model(text, opset=21, **weights, **places)
        loss = passes.CausalLanguageModel(blocks=blocks)
        return proto, graphopt.Executor(graphopt.compile(proto, loss=loss, optimizer=passes.AdamW(0.02)))

    ids = rng.integers(0, 11, (3, 5))
    (_, whole), (proto, pruned) = executor_of("", "h", "S"), executor_of(PRUNED[kept], "p", "1")
    for _ in range(4):
        np.testing.assert_allclose(pruned.step(input_ids=ids)["loss"], whole.step(input_ids=ids)["loss"], rtol=1e-6)
    expected = whole.predict(input_ids=ids)["logits"][:, -1:]
    np.testing.assert_allclose(pruned.predict(input_ids=ids)["logits"], expected, rtol=1e-5)
    for served in (pruned.trained(), pruned.trained(into=proto)):
        np.testing.assert_allclose(graphopt.run(served, {"input_ids": ids})["logits"], expected, rtol=1e-5)
