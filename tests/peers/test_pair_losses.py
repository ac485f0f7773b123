"""Losses of embeddings and preferences equal sentence-transformers' and TRL's, over several steps."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import json
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
accelerate = pytest.importorskip("accelerate")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

from builders import mlp, run  # noqa: E402
from language import save_lines  # noqa: E402

import graphopt  # noqa: E402
import passes  # noqa: E402
from graphopt.training.rollouts import advantages_of, weighted  # noqa: E402

RNG = np.random.default_rng(0)
ROWS = {name: RNG.standard_normal((6, 4)) for name in ("", "positive", "negative", "negative_2", "other")}
SCORES = RNG.uniform(0, 1, 6)

Metric = losses.TripletDistanceMetric
OF_EMBEDDINGS: dict[str, tuple[passes.Loss, Any, tuple[str, ...]]] = {
    "ranking": (passes.InfoNCE(), losses.MultipleNegativesRankingLoss(None), ("", "positive")),
    "ranking of negatives": (
        passes.InfoNCE(0.1, negatives=1),
        losses.MultipleNegativesRankingLoss(None, scale=10.0),
        ("", "positive", "negative"),
    ),
    "symmetric ranking": (
        passes.InfoNCE(symmetric=True),
        losses.MultipleNegativesRankingLoss(
            None, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
        ),
        ("", "positive"),
    ),
    "triplet": (passes.Triplet(5.0), losses.TripletLoss(None), ("", "positive", "negative")),
    "triplet of cosines": (
        passes.Triplet(0.5, "cosine"),
        losses.TripletLoss(None, Metric.COSINE, 0.5),
        ("", "positive", "negative"),
    ),
    "similarity": (passes.CosineSimilarity(), losses.CosineSimilarityLoss(None), ("", "other")),
}


@pytest.mark.parametrize("name", OF_EMBEDDINGS)
def test_losses_of_embeddings_are_sentence_transformerss(name: str) -> None:
    loss, twin, rows = OF_EMBEDDINGS[name]
    proto = mlp(dtype=np.float64)
    step = graphopt.compile(proto, loss=loss, optimizer=passes.SGD(0.1))
    w = {x.name: torch.tensor(onnx.numpy_helper.to_array(x).copy()) for x in proto.graph.initializer}
    w = {key: x.requires_grad_() for key, x in w.items()}
    feeds = {f"x_{row}" if row else "x": ROWS[row] for row in rows}
    if name == "similarity":
        feeds["target"] = SCORES
    optimizer = torch.optim.SGD(w.values(), 0.1)
    for outputs in run(step, 10, feeds):
        hidden = [torch.tanh(torch.tensor(ROWS[row]) @ w["fc0.weight"].T + w["fc0.bias"]) for row in rows]
        embeddings = [h @ w["fc1.weight"].T + w["fc1.bias"] for h in hidden]
        expected = twin.double().compute_loss_from_embeddings(embeddings, torch.tensor(SCORES))
        assert outputs["loss"] == pytest.approx(expected.item(), rel=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
    for key, x in w.items():
        np.testing.assert_allclose(outputs[f"{key}.next"], x.detach().numpy(), rtol=1e-5, atol=1e-7)


WORDS = {**{f"w{i}": i for i in range(30)}, "[PAD]": 30, "[EOS]": 31, "[UNK]": 32}
EXAMPLES = [
    {"prompt": "w1 w2 w3 ", "chosen": "w4 w5", "rejected": "w6 w7 w8"},
    {"prompt": "w9 w2 ", "chosen": "w4 w5 w11", "rejected": "w6"},
    {"prompt": "w20 ", "chosen": "w21 w22 w23", "rejected": "w6 w2"},
]


class Logits(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any) -> Any:
        return self.model(input_ids=input_ids, use_cache=False).logits


@pytest.fixture(scope="module")
def decoder() -> Any:
    torch.manual_seed(0)
    without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": 33, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, **without, bos_token_id=31, eos_token_id=31)
    return transformers.GPT2LMHeadModel(config).eval()


SPECIAL = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}


def word_tokenizer() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def trained_by(trainer: Any, config: Any, model: Any, rows: list[dict[str, Any]], folder: Path, **options: Any) -> Any:
    """Return a trainer of TRL's."""
    arguments: dict[str, Any] = {"use_cpu": True, "report_to": [], "bf16": False}
    arguments |= {"output_dir": str(folder), "per_device_train_batch_size": len(rows)}
    processing = transformers.PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), **SPECIAL)
    return trainer(
        model=model,
        args=config(**arguments, **options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=processing,
    )


@pytest.fixture(scope="module")
def file(decoder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the decoder's file, before any training."""
    path = tmp_path_factory.mktemp("decoder") / "model.onnx"
    torch.onnx.export(
        Logits(decoder),
        (torch.arange(24).reshape(4, 6),),
        path,
        dynamo=True,
        verbose=False,
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_shapes={
            "input_ids": {
                0: torch.export.Dim("rows", min=2, max=64),
                1: torch.export.Dim("length", min=2, max=16),
            }
        },
    )
    return path


def steps_agree(loss: passes.Loss, feeds: Any, model: Any, expected_loss: Any, path: Path) -> None:
    """Compare five losses, before and after steps of SGD, with those of a function of PyTorch."""
    step = graphopt.compile(path, loss=loss, optimizer=passes.SGD(0.1))
    executor, optimizer = graphopt.Executor(step), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = expected_loss()
        assert executor.step(feeds)["loss"] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.5, "loss_type": "hinge"},
        {"beta": 0.3, "loss_type": "ipo"},
        {"loss_type": "robust", "label_smoothing": 0.2},
    ],
    ids=lambda options: options.get("loss_type", "sigmoid"),
)
def test_dpo_is_trls(decoder: Any, file: Path, options: dict[str, Any], tmp_path: Path) -> None:
    model = copy.deepcopy(decoder)
    kind = functools.partial(trl.DPOTrainer, ref_model=copy.deepcopy(model))
    trainer = trained_by(kind, trl.DPOConfig, model, EXAMPLES, tmp_path, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    feeds = {}
    for name in ("input_ids", "completion_mask"):
        feeds[name], feeds[f"{name}_rejected"] = (x.numpy() for x in batch[name].chunk(2))
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    path = save_lines(tmp_path / "pairs.jsonl", EXAMPLES)
    rows = graphopt.data.text(path, tokenizer=str(tmp_path)).arrays
    for end in ("", "_rejected"):
        both = [(x[f"input_ids{end}"], np.asarray(x[f"completion_mask{end}"], np.int64)) for x in (rows, feeds)]
        mine, theirs = ([tuple(t * m) for t, m in zip(*pair, strict=True)] for pair in both)
        assert sorted(mine) == sorted(theirs)
    steps_agree(
        passes.DPO(**options),
        feeds,
        model,
        lambda: trainer.compute_loss(model, dict(batch)),
        file,
    )


@pytest.mark.parametrize(
    "loss",
    [passes.ORPO(beta=0.3), passes.SimPO(beta=1.5, gamma=0.7, label_smoothing=0.1)],
    ids=lambda loss: type(loss).__name__,
)
def test_preferences_without_a_reference_are_trls(decoder: Any, file: Path, loss: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(decoder)
    if isinstance(loss, passes.ORPO):
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        trainer = trained_by(ORPOTrainer, ORPOConfig, model, EXAMPLES, tmp_path, beta=loss.beta)
    else:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        options = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": loss.beta, "simpo_gamma": loss.gamma}
        options["label_smoothing"] = loss.label_smoothing
        trainer = trained_by(CPOTrainer, CPOConfig, model, EXAMPLES, tmp_path, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    both = trainer.concatenated_inputs(batch, padding_value=30)
    feeds = {}
    for name, x in (
        ("input_ids", both["concatenated_input_ids"]),
        ("completion_mask", (both["concatenated_labels"] != -100).long()),
    ):
        feeds[name], feeds[f"{name}_rejected"] = (part.numpy() for part in x.chunk(2))
    steps_agree(loss, feeds, model, lambda: trainer.get_batch_loss_metrics(model, batch)[0], file)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.6},
        {"loss_type": "apo_zero_unpaired"},
    ],
    ids=["kto", "weights", "apo"],
)
def test_kto_is_trls(decoder: Any, file: Path, options: dict[str, Any], tmp_path: Path) -> None:
    model = copy.deepcopy(decoder)
    rows = [
        {"prompt": x["prompt"], "completion": x["chosen" if label else "rejected"], "label": label}
        for x, label in zip(EXAMPLES, (True, False, True), strict=True)
    ]
    kind = functools.partial(trl.KTOTrainer, ref_model=copy.deepcopy(model))
    trainer = trained_by(kind, trl.KTOConfig, model, rows, tmp_path, **options)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = passes.KTO(**options)
    prefixes = {"": ""} if loss.loss_type != "kto" else {"": "", "KL_": "_mismatched"}
    width = max(batch[f"{prefix}input_ids"].shape[1] for prefix in prefixes)
    feeds = {"label": batch["label"].numpy().astype(np.int64)}
    for prefix, end in prefixes.items():
        for name in ("input_ids", "completion_mask"):
            x = batch[f"{prefix}{name}"].numpy()
            feeds[f"{name}{end}"] = np.pad(x, ((0, 0), (0, width - x.shape[1])))
    steps_agree(loss, feeds, model, lambda: trainer.compute_loss(model, dict(batch)), file)
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
    read = graphopt.data.text(save_lines(tmp_path / "rows.jsonl", rows), tokenizer=str(tmp_path)).arrays
    for end in prefixes.values():
        both = [(x[f"input_ids{end}"], np.asarray(x[f"completion_mask{end}"], np.int64)) for x in (read, feeds)]
        mine, theirs = ([tuple(t * m) for t, m in zip(*pair, strict=True)] for pair in both)
        trimmed = [[np.trim_zeros(np.array(x), "b").tolist() for x in side] for side in (mine, theirs)]
        assert sorted(trimmed[0]) == sorted(trimmed[1])
    assert sorted(np.asarray(read["label"]).tolist()) == sorted(feeds["label"].tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "grpo", "beta": 0.3, "temperature": 0.7},
        {"loss_type": "dr_grpo", "epsilon_high": 0.4},
        {"loss_type": "dapo", "beta": 0.1, "epsilon_low": 0.1, "importance_sampling_level": "sequence"},
        {"loss_type": "bnpo", "beta": 0.2, "use_bias_correction_kl": False},
    ],
    ids=lambda options: options["loss_type"],
)
def test_grpo_is_trls(decoder: Any, file: Path, options: dict[str, Any], tmp_path: Path) -> None:
    model, rng = copy.deepcopy(decoder), np.random.default_rng(3)
    theirs = {"epsilon" if name == "epsilon_low" else name: x for name, x in options.items() if name != "beta"}
    theirs |= {"max_completion_length": 5, "num_generations": 4, "gradient_accumulation_steps": 1}
    kind = functools.partial(trl.GRPOTrainer, reward_funcs=lambda completions, **_: [0.0] * len(completions))
    rows = [{"prompt": "w1 w2"}] * 4
    trainer = trained_by(kind, trl.GRPOConfig, model, rows, tmp_path, **theirs)
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = options.get("beta", 0.0)  # in the configuration, TRL fetches a reference for it
    tokens, lengths = rng.integers(0, 30, (4, 8)), np.array([5, 3, 1, 4])
    mask = np.arange(5) < lengths[:, None]
    old, reference = (-rng.uniform(3.3, 3.7, (4, 5)).astype(np.float32) for _ in range(2))
    advantages = rng.standard_normal(4).astype(np.float32)
    batch = {
        "prompt_ids": tokens[:, :3],
        "prompt_mask": np.ones((4, 3), np.int64),
        "completion_ids": tokens[:, 3:],
        "completion_mask": mask.astype(np.int64),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": np.array(lengths.sum()),
    }
    inputs = {name: torch.tensor(x) for name, x in batch.items()}
    feeds = {"input_ids": tokens, "advantages": advantages, "rewards": advantages}
    placed = {"completion_mask": mask.astype(np.int64), "old_log_probabilities": old}
    if options.get("beta"):
        placed["reference"] = np.where(mask, reference, 0)
    feeds |= {name: np.pad(x, ((0, 0), (3, 0))) for name, x in placed.items()}
    if "reference" in feeds:  # of the token after each
        feeds["reference"] = np.roll(feeds["reference"], -1, axis=1)
    loss = passes.GRPO(**options, max_completion_length=5, reference="inputs")
    steps_agree(loss, feeds, model, lambda: trainer._compute_loss(model, inputs), file)


def longest(completions: list[str], **_: Any) -> list[float | None]:
    return [None if "x" in text else float(len(text)) / 3 for text in completions]


def digits(completions: list[str], **_: Any) -> list[float | None]:
    return [None if text == "xx" else sum(c.isdigit() for c in text) / 7 for text in completions]


def advantages_of_trl(completions: list[str], scale: str, functions: Sequence[Any], weights: list[float]) -> np.ndarray:
    """Return what the code of TRL's trainer computes from the rewards of completions."""
    count, trainer = len(functions), trl.GRPOTrainer
    accelerate.PartialState(cpu=True)
    accelerator = SimpleNamespace(device="cpu", is_main_process=True)
    own = SimpleNamespace(
        **{"accelerator": accelerator, "state": SimpleNamespace(global_step=0), "environments": None},
        **{"args": SimpleNamespace(report_to=[]), "_log_completion_extra": None, "_log_metric": None},
        **{"reward_funcs": functions, "reward_func_names": ["f"] * count},
        **{"reward_processing_classes": [None] * count, "reward_weights": torch.tensor(weights)},
        **{"scale_rewards": scale, "multi_objective_aggregation": "sum_then_normalize"},
    )
    prompts = ["p"] * len(completions)
    rewards = trainer._calculate_rewards(own, [{"prompt": p} for p in prompts], prompts, completions, prompts)
    (method,) = ast.parse(textwrap.dedent(inspect.getsource(trainer._generate_and_score_completions))).body
    assert isinstance(method, ast.FunctionDef)
    texts = [*map(ast.unparse, method.body)]
    first, last = (
        next(i for i, text in enumerate(texts) if text.startswith(start))
        for start in ("unscorable_mask = ", "advantages = torch.nan_to_num(")
    )
    names = {**inspect.getmodule(trainer).__dict__, "self": own, "device": "cpu"}
    names |= {"rewards_per_func": rewards, "num_generations": 4}
    exec(compile(ast.Module(method.body[first : last + 1], []), "trl", "exec"), names)
    return np.asarray(names["advantages"].numpy())


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("weights", [[1.0], [0.3, 1.7]], ids=["one", "two"])
def test_advantages_are_those_of_trls_trainer(scale: Any, weights: list[float]) -> None:
    functions = [longest, digits][: len(weights)]
    completions = ["1", "ab2", "cx", "xx", "12", "a", "b345", "c", "xx", "xx", "xx", "1", "9", "9", "9", "9"]
    rewards = [np.array(f(completions), np.float32) for f in functions]
    found = advantages_of(weighted(rewards, np.float32(weights)), 4, scale)
    expected = advantages_of_trl(completions, scale, functions, weights)
    np.testing.assert_array_max_ulp(found, expected, 4)  # sums in another order
