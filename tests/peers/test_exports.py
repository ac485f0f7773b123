"""Language models that transformers exports train as PyTorch does, by both exporters, with a cache and without."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from test_language_models import Logits, unequal  # noqa: E402

import graphopt  # noqa: E402
import passes  # noqa: E402

ROWS, TOKENS, CLASSES, HEADS, HEAD, FRAMES = 2, 6, 61, 2, 8, 20
RATE, STEPS = 1e-3, 15
SIZES: dict[str, Any] = {"vocab_size": CLASSES, "attn_implementation": "eager"}
HIDDEN: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SIZES, n_embd=16, n_layer=2, n_head=HEADS, n_positions=32)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **HIDDEN, num_attention_heads=4, num_key_value_heads=HEADS, head_dim=HEAD)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, **HIDDEN, num_attention_heads=HEADS, max_position_embeddings=32)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **SIZES, d_model=16, d_ff=24, d_kv=HEAD, num_layers=2, num_heads=HEADS, decoder_start_token_id=0
        )
    ),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **SIZES,
            **{"d_model": 16, "num_mel_bins": 8, "max_source_positions": FRAMES // 2},
            **{"max_target_positions": 32, "encoder_layers": 2, "decoder_layers": 2},
            **{"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS},
            **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        )
    ),
}
DRAW = np.random.default_rng(0)
IDS, LABELS = DRAW.integers(3, CLASSES, (2, ROWS, TOKENS))
SOURCE = DRAW.integers(3, CLASSES, (ROWS, TOKENS + 2))
SOUND = DRAW.standard_normal((ROWS, 8, FRAMES)).astype(np.float32)
MASK = np.array([[1] * TOKENS, [1] * (TOKENS - 2) + [0] * 2])
SOURCE_MASK = np.array([[1] * (TOKENS + 2), [1] * TOKENS + [0] * 2])
FEEDS: dict[str, dict[str, np.ndarray]] = {
    "gpt2": {"input_ids": IDS, "attention_mask": MASK},
    "llama": {"input_ids": IDS, "attention_mask": MASK},
    "bert": {"input_ids": IDS, "attention_mask": MASK, "token_type_ids": IDS % 2},
    "t5": {
        **{"input_ids": SOURCE, "attention_mask": SOURCE_MASK},
        **{"decoder_input_ids": IDS, "decoder_attention_mask": MASK},
    },
    "whisper": {"input_features": SOUND, "decoder_input_ids": IDS, "decoder_attention_mask": MASK},
}


class Cached(torch.nn.Module):
    """Read and write the cache of a decoder as tensors, as optimum's exports do."""

    def __init__(self, model: Any, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Any) -> Any:
        count = len(self.names)
        inputs, past = dict(zip(self.names, tensors, strict=False)), tensors[count:]
        cache = transformers.DynamicCache([(past[i], past[i + 1]) for i in range(0, len(past), 2)])
        if self.model.config.is_encoder_decoder:
            cache = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
        found = self.model(**inputs, past_key_values=cache, use_cache=True)
        cache = getattr(found.past_key_values, "self_attention_cache", found.past_key_values)
        return found.logits, *(x for layer in cache.layers for x in (layer.keys, layer.values))


class First(Cached):
    """Write the cache of a decoder, of which there is none before."""

    def forward(self, *inputs: Any) -> Any:
        empty = torch.zeros(inputs[0].shape[0], HEADS, 0, HEAD)
        return super().forward(*inputs, *4 * [empty])


@functools.cache
def network(name: str) -> Any:
    torch.manual_seed(0)
    return unequal(MODELS[name]().eval())


def feeds_of(name: str, cache: bool, start: int = 0, count: int = TOKENS) -> dict[str, np.ndarray]:
    """Return some tokens and what a model reads beside them; with a cache, the mask counts what came before."""
    if not cache:
        return FEEDS[name]
    tokens = IDS[:, start : start + count] if start + count <= TOKENS else IDS
    if "decoder_input_ids" in FEEDS[name]:
        others = {x: array for x, array in FEEDS[name].items() if "mask" not in x}
        return {**others, "decoder_input_ids": tokens}
    positions = np.broadcast_to(np.arange(start, start + count), tokens.shape).copy()
    mask = np.ones((ROWS, start + count), np.int64)
    return {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}


def exported(name: str, cache: bool, dynamo: bool, path: Path, first: bool = False) -> Path:
    """Export a model with sizes that differ from those of the tests; the `first` pass has no cache before it."""
    past = 3 if cache and not first else 0
    feeds = feeds_of(name, cache, past)
    caches = [f"past_key_values.{i}.{kind}" for i in range(2) for kind in ("key", "value")] if cache else []
    presents = [x.replace("past_key_values", "present") for x in caches]
    tensors = [torch.tensor(x) for x in feeds.values()]
    kept = [] if first else caches
    tensors += [torch.randn(ROWS, HEADS, past, HEAD) for _ in kept]
    dims = [{0: "rows"} if x.ndim == 3 else {0: "rows", 1: f"length of {n}"} for n, x in feeds.items()]
    dims += [{0: "rows", 2: "past"} for _ in kept]
    names = [*feeds, *kept]
    kind = First if first else Cached
    module = (kind(network(name), [*feeds]) if cache else Logits(network(name), *feeds)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        automatic = tuple({i: torch.export.Dim.DYNAMIC for i in x} for x in dims)
        torch.onnx.export(
            module,
            tuple(tensors),
            path,
            dynamo=dynamo,
            verbose=False,
            input_names=names,
            output_names=["logits", *presents],
            **(
                {"dynamic_shapes": (automatic,)}
                if dynamo
                else {"dynamic_axes": dict(zip(names, dims, strict=True)), "opset_version": 18}
            ),
        )
    return path


def compiled(path: Path, name: str, dynamo: bool) -> graphopt.Executor:
    """Compile a file; transformers does not train the positions of Whisper's encoder, which TorchScript renames."""
    positions = "*encoder.embed_positions*" if dynamo else "*onnx::Add_*"
    step = graphopt.compile(
        path,
        parameters=passes.Parameters(freeze=positions if name == "whisper" else None),
        loss=passes.CrossEntropy(axis=-1, ignore_index=-100),
        optimizer=passes.AdamW(RATE, weight_decay=0.01),
    )
    return graphopt.Executor(step, threads=1)


def equal_training(executor: graphopt.Executor, name: str, feeds: dict[str, np.ndarray]) -> None:
    """Compare logits and losses with PyTorch's."""
    model = copy.deepcopy(network(name))
    tensors = {x: torch.tensor(array) for x, array in feeds.items()}
    feeds = {x: array for x, array in feeds.items() if x in executor.inputs}
    assert {*executor.inputs} == {*feeds, "target"}
    with torch.no_grad():
        expected = model(**tensors).logits.numpy()
    np.testing.assert_allclose(executor.predict(**feeds)["logits"], expected, atol=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    labels = np.where((MASK == 0) | (LABELS % 4 == 0), -100, LABELS)
    losses = []
    for _ in range(STEPS):
        if name in ("gpt2", "llama"):  # transformers shifts their labels
            logits = model(**tensors).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels).flatten())
        else:
            loss = model(**tensors, labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((executor.step(**feeds, target=labels)["loss"], loss.item()))
    np.testing.assert_allclose(*np.transpose(losses), atol=1e-5)
    assert losses[-1][0] < losses[0][0] - 0.05


def by_cache(model: onnx.ModelProto, name: str) -> np.ndarray:
    """Return a decoder's logits of all tokens: of three at first, then of one at a time after the cache."""
    running = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    inputs = [x.name for x in running.get_inputs()]
    caches = [x for x in inputs if x.startswith("past")]
    past = {x: np.zeros((ROWS, HEADS, 0, HEAD), np.float32) for x in caches}
    parts, start = [], 0
    for stop in range(3, TOKENS + 1):
        feeds = {x: array for x, array in feeds_of(name, True, start, stop - start).items() if x in inputs}
        if "use_cache_branch" in inputs:
            feeds["use_cache_branch"] = np.array([start > 0])
        found = running.run(["logits", *(x.replace("past_key_values", "present") for x in caches)], feeds | past)
        past = dict(zip(caches, found[1:], strict=True))
        assert {x.shape[2] for x in past.values()} == {stop}
        parts.append(found[0])
        start = stop
    return np.concatenate(parts, axis=1)


def merged(name: str, folder: Path) -> onnx.ModelProto:
    """Return both passes of a decoder as branches of an If that share weights, as optimum merges them."""
    later, first = (onnx.load(exported(name, True, False, folder / f"{i}.onnx", first=bool(i))) for i in range(2))
    weights: dict[tuple[Any, ...], onnx.TensorProto] = {}
    bodies = []
    for prefix, model in (("later", later), ("first", first)):
        graph = model.graph
        names = {x.name: x.name for x in graph.input}
        for x in graph.initializer:
            array = onnx.numpy_helper.to_array(x)
            same = weights.setdefault((array.dtype.str, array.shape, array.tobytes()), x)
            same.name = names[x.name] = same.name if same is not x else f"{prefix}/{x.name}"
        for node in graph.node:
            node.input[:] = [x and names.get(x, f"{prefix}/{x}") for x in node.input]
            node.output[:] = [x and f"{prefix}/{x}" for x in node.output]
        outputs = [onnx.helper.make_empty_tensor_value_info(f"{prefix}/{y.name}") for y in graph.output]
        bodies.append(onnx.helper.make_graph(graph.node, prefix, [], outputs))
    choice = onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1])
    results = [y.name for y in later.graph.output]
    node = onnx.helper.make_node("If", [choice.name], results, then_branch=bodies[0], else_branch=bodies[1])
    graph = onnx.helper.make_graph([node], "merged", [*later.graph.input, choice], later.graph.output, weights.values())
    return onnx.helper.make_model(graph, opset_imports=later.opset_import, ir_version=later.ir_version)


ALL = [(name, dynamo) for name in MODELS for dynamo in (True, False)]
RUN_BY_CI = [("t5", False)], [("llama", True), ("gpt2", False)]


def cases(cache: bool) -> list[Any]:
    names = [x for x in ALL if x[0] != "bert" or not cache]
    return [
        pytest.param(*x, marks=pytest.mark.slow if x in RUN_BY_CI[cache] else pytest.mark.exhaustive, id=case)
        for x in names
        for case in [f"{x[0]}-{'dynamo' if x[1] else 'torchscript'}"]
    ]


@pytest.mark.parametrize(("name", "dynamo"), cases(cache=False))
def test_an_exported_model_trains_as_pytorch_does(name: str, dynamo: bool, tmp_path: Path) -> None:
    path = exported(name, False, dynamo, tmp_path / "model.onnx")
    executor, feeds = compiled(path, name, dynamo), feeds_of(name, cache=False)
    equal_training(executor, name, feeds)
    running = onnxruntime.InferenceSession(executor.trained(into=path).SerializeToString())
    np.testing.assert_allclose(running.run(["logits"], feeds)[0], executor.predict(**feeds)["logits"], atol=1e-5)


@pytest.mark.parametrize(("name", "dynamo"), cases(cache=True))
def test_a_decoder_with_a_cache_trains_and_generates_after_it(name: str, dynamo: bool, tmp_path: Path) -> None:
    path = exported(name, True, dynamo, tmp_path / "model.onnx")
    executor, feeds = compiled(path, name, dynamo), feeds_of(name, cache=True)
    before = by_cache(executor.trained(into=path), name)
    equal_training(executor, name, feeds)
    found = by_cache(executor.trained(into=path), name)
    assert abs(found - before).max() > 1e-3
    feeds = {x: array for x, array in feeds.items() if x in executor.inputs}
    np.testing.assert_allclose(found, executor.predict(**feeds)["logits"], atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("gpt2", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama", "t5", "whisper")),
    ],
)
def test_a_merged_decoder_trains_and_generates_after_its_cache(name: str, tmp_path: Path) -> None:
    path = tmp_path / "merged.onnx"
    onnx.save(merged(name, tmp_path), path)
    executor, feeds = compiled(path, name, False), feeds_of(name, cache=True)
    before = by_cache(executor.trained(into=path), name)
    np.testing.assert_allclose(by_cache(onnx.load(path), name), before, atol=1e-5)
    equal_training(executor, name, feeds)
    found = by_cache(executor.trained(into=path), name)
    assert abs(found - before).max() > 1e-3
    feeds = {x: array for x, array in feeds.items() if x in executor.inputs}
    np.testing.assert_allclose(found, executor.predict(**feeds)["logits"], atol=1e-5)
