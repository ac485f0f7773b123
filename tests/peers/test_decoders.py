"""Files of published decoders train as PyTorch does, and go back into the file with its cache."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import safetensors.numpy
import torch

import graphopt
import passes

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
og = pytest.importorskip("onnxruntime_genai")


def imported_builder() -> Any:
    """Import onnxruntime-genai's builder, whose package `builders` has the name of a module of these tests."""
    own = sys.modules.pop("builders", None)
    sys.path.insert(0, str(Path(og.__file__).parent / "models"))
    try:
        return importlib.import_module("onnxruntime_genai.models.builder")
    finally:
        sys.path.pop(0)
        del sys.modules["builders"]
        if own is not None:
            sys.modules["builders"] = own


builder = imported_builder()

ROWS, TOKENS, CLASSES, WINDOW = 3, 12, 97, 8
RATE, STEPS, GENERATED = 1e-3, 20, 20
IDS = np.random.default_rng(0).integers(3, CLASSES, (ROWS, TOKENS))
TARGET = np.roll(IDS, -1, axis=1)
PROMPT = IDS[0, :5]

SMALL = {
    **{"vocab_size": CLASSES, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager"},
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# The builder rounds the root of the width to two digits.
GEMMA = {**SMALL, "hidden_size": 64, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=16),
    "tied llama": lambda: transformers.LlamaConfig(**SMALL, head_dim=16, tie_word_embeddings=True),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GEMMA,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={**PLAIN, "full_attention": PLAIN, "sliding_attention": PLAIN},
    ),
    "phi": lambda: transformers.PhiConfig(
        **{**SMALL, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2},
        partial_rotary_factor=0.5,
        layer_norm_eps=1e-6,  # the builder's
    ),
    "phi3": lambda: transformers.Phi3Config(
        **{**SMALL, "hidden_size": 64}, original_max_position_embeddings=64, rope_parameters=PLAIN
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **{**SMALL, "hidden_size": 64, "num_hidden_layers": 3},
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
        rope_parameters=PLAIN,
        tie_word_embeddings=True,
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **{**SMALL, "hidden_size": 64, "intermediate_size": 32, "max_position_embeddings": 4096 * 32},
        **{"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW},
        rope_parameters={
            **{
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            **{"original_max_position_embeddings": 4096, "truncate": False},
        },
    ),
    # The builder writes no window for Mistral.
    "mistral": lambda: transformers.MistralConfig(**SMALL, head_dim=16, sliding_window=None),
}
# More of the builder's architectures, for test_architectures.py.
WIDE = {**SMALL, "hidden_size": 64}
OTHERS: dict[str, Callable[[], Any]] = {
    "ernie": lambda: transformers.Ernie4_5Config(**WIDE, head_dim=16),
    "gemma": lambda: transformers.GemmaConfig(**WIDE, head_dim=16),
    "granite": lambda: transformers.GraniteConfig(**WIDE),
    "granite hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **WIDE,
        shared_intermediate_size=48,
        layer_types=["attention"] * 2,
        num_local_experts=0,
        position_embedding_type="rope",
    ),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**WIDE, head_dim=16),
    "lfm2 moe": lambda: transformers.Lfm2MoeConfig(
        **WIDE, layer_types=["conv", "full_attention"], num_experts=4, num_dense_layers=1
    ),
    "nemotron": lambda: transformers.NemotronConfig(**WIDE, norm_eps=1e-6, partial_rotary_factor=1.0),
    "olmo": lambda: transformers.OlmoConfig(**WIDE),
    "qwen2": lambda: transformers.Qwen2Config(**WIDE),
    "smollm3": lambda: transformers.SmolLM3Config(**WIDE),
}
FULL_RUN = [pytest.param(name, marks=pytest.mark.exhaustive) for name in [*CONFIGS][2:]]
NAMES = ["llama", "gemma2", *FULL_RUN]
IN_4_BITS = [name for name in FULL_RUN if name.values != ("lfm2",)]  # whose modules have names of their own

# Stacked experts: in PyTorch, and in the builder's files.
EXPERTS = {f"mlp.experts.{x}_proj": f"moe.experts.{x}_proj" for x in ("gate_up", "down")}

Decoder = tuple[Path, Any]  # a folder with model.onnx, and PyTorch's model


@functools.cache
def network(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        {**CONFIGS, **OTHERS}[name](), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the builder drops what is zero
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decoder]:
    """Return a function that builds a decoder by onnxruntime-genai's builder, once."""

    @functools.cache
    def build(name: str, precision: str = "fp32", *more: str) -> Decoder:
        folder = tmp_path_factory.mktemp("decoder")
        source, target = folder / "source", folder / "built"
        model = network(name)
        model.save_pretrained(source)
        if name == "gpt-oss" and precision == "int4":
            add_published_experts(source / "model.safetensors")
        words = {f"t{i}": i for i in range(CLASSES)}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(source)
        arguments = ["", str(source), str(target), precision, "cpu", str(folder / "cache")]
        options = builder.parse_extra_options(*arguments, list(more))
        if name == "gemma3":  # the builder reads these fields of older versions of transformers
            config = options["hf_details"]["hf_config"]
            config.rope_local_base_freq, config.rope_theta = PLAIN["rope_theta"], PLAIN["rope_theta"]
        builder.create_model(*arguments, **options)
        served = target / "genai_config.json"
        config = json.loads(served.read_text())
        if np.max(config["model"]["eos_token_id"]) >= CLASSES:  # of a tokenizer that the type of model brings
            config["model"]["eos_token_id"] = SMALL["eos_token_id"]
            served.write_text(json.dumps(config))
        return target, model

    return build


def add_published_experts(path: Path) -> None:
    """Add the experts of gpt-oss as it is published, in floats of 4 bits, of which the builder makes integers."""
    tensors, generator = safetensors.numpy.load_file(path), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith((*EXPERTS,))]:
        experts, inputs, outputs = tensors[name].shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = generator.integers(0, 256, (*shape, 16)).astype(np.uint8)
        tensors[f"{name}_scales"] = generator.integers(119, 122, shape).astype(np.uint8)
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


def session(model: str | onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    source = model if isinstance(model, str) else model.SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def prefill(model: str | onnx.ModelProto, ids: np.ndarray = IDS) -> dict[str, np.ndarray]:
    """Return what a decoder's file computes from tokens after an empty past, by name."""
    running = session(model)
    feeds: dict[str, np.ndarray] = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    for x in running.get_inputs():
        if x.name.startswith("past") and all(isinstance(dim, int) for dim in x.shape[1:]):
            feeds[x.name] = np.zeros((len(ids), *x.shape[1:]), np.float32)
        elif x.name.startswith("past"):
            window = WINDOW if "sliding" in str(x.shape[2]) else 0
            size = x.shape[3] if isinstance(x.shape[3], int) else head_size(model)
            feeds[x.name] = np.zeros((len(ids), x.shape[1], window, size), np.float32)
    outputs = [y.name for y in running.get_outputs()]
    return dict(zip(outputs, running.run(outputs, feeds), strict=True))


def head_size(model: str | onnx.ModelProto) -> int:
    proto = onnx.load(model) if isinstance(model, str) else model
    weights = {x.name: x.dims for x in proto.graph.initializer}
    node = next(x for x in proto.graph.node if x.op_type == "GroupQueryAttention")
    output = next(x for x in proto.graph.node if node.output[0] in x.input)
    columns = next((a.i for a in output.attribute if a.name == "K"), weights[output.input[1]][0])
    return int(columns) // next(a.i for a in node.attribute if a.name == "num_heads")


def compiled(path: Path | str) -> graphopt.Executor:
    step = graphopt.compile(
        path,
        loss=passes.CrossEntropy(axis=-1),
        optimizer=passes.AdamW(RATE, weight_decay=0.0),
    )
    return graphopt.Executor(step, threads=1)


def logits(executor: graphopt.Executor, ids: np.ndarray = IDS) -> np.ndarray:
    return np.asarray(executor.predict(input_ids=ids)["logits"])


def train_equally(executor: graphopt.Executor, model: Any) -> None:
    """Train both, and compare the losses."""
    weights = [w for w in model.parameters() if w.requires_grad]
    optimizer = torch.optim.AdamW(weights, RATE, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        found = model(torch.tensor(IDS)).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(found, torch.tensor(TARGET).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((executor.step(input_ids=IDS, target=TARGET)["loss"], loss.item()))
    np.testing.assert_allclose(*np.transpose(losses), atol=1e-5)
    assert losses[-1][0] < losses[0][0]


def greedy(folder: Path, adapter: Path | None = None, prompt: np.ndarray = PROMPT) -> list[int]:
    """Return the tokens that onnxruntime-genai generates with the cache."""
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    length = len(prompt) + GENERATED
    parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = og.Generator(model, parameters)
    if adapter is not None:
        adapters = og.Adapters(model)
        adapters.load(str(adapter), "own")
        generator.set_active_adapter(adapters, "own")
    generator.append_tokens(prompt[None].astype(np.int32))
    tokens = []
    while not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    return tokens


def with_model(folder: Path, model: onnx.ModelProto, target: Path) -> Path:
    """Return a folder like another with another model."""
    shutil.copytree(folder, target)
    (target / "model.onnx.data").unlink()
    graphopt.save(model, target / "model.onnx")
    return target


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_file_and_of_pytorch(name, built):
    folder, model = built(name)
    executor = compiled(folder / "model.onnx")
    assert list(executor.inputs) == ["input_ids", "target"]
    found = logits(executor)
    np.testing.assert_allclose(found, prefill(str(folder / "model.onnx"))["logits"], atol=2e-6)
    with torch.no_grad():
        np.testing.assert_allclose(found, model(torch.tensor(IDS)).logits.numpy(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_pytorch_and_tokens_those_of_the_cache(name, built, tmp_path):
    folder, model = built(name)
    path = str(folder / "model.onnx")
    executor, own = compiled(path), copy.deepcopy(model)
    same = executor.trained(into=path)
    for name, before in prefill(path).items():
        np.testing.assert_array_equal(prefill(same)[name], before)
    first = greedy(folder)
    assert greedy(with_model(folder, same, tmp_path / "same")) == first
    train_equally(executor, own)
    trained = executor.trained(into=path)
    assert [x.name for x in trained.graph.input] == [x.name for x in onnx.load(path).graph.input]
    np.testing.assert_allclose(prefill(trained)["logits"], logits(executor), atol=2e-6)
    tokens = list(PROMPT)
    for _ in range(GENERATED):
        tokens.append(int(logits(executor, np.array([tokens]))[0, -1].argmax()))
    after = greedy(with_model(folder, trained, tmp_path / "trained"))
    assert after == tokens[len(PROMPT) :] and after != first


def packed_weight(file: onnx.ModelProto, node: onnx.NodeProto) -> torch.Tensor:
    """Return the weight [N,K] of a MatMulNBits by its product with an identity matrix."""
    size = next(a.i for a in node.attribute if a.name == "K")
    graph = onnx.helper.make_graph(
        [node],
        "product",
        [onnx.helper.make_tensor_value_info(node.input[0], onnx.TensorProto.FLOAT, [size, size])],
        [onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None)],
        [x for x in file.graph.initializer if x.name in node.input],
    )
    product = onnx.helper.make_model(graph, opset_imports=file.opset_import, ir_version=file.ir_version)
    return torch.tensor(session(product).run(None, {node.input[0]: np.eye(size, dtype=np.float32)})[0].T)


def packed_experts(file: onnx.ModelProto, *names: str) -> torch.Tensor:
    """Return the weights [experts, inputs, outputs] that a file has in 4 bits, in blocks of 32."""
    found = {x.name: onnx.numpy_helper.to_array(x) for x in file.graph.initializer if x.name in names}
    q, scales = (found[name] for name in names)
    w = np.stack([q & 15, q >> 4], -1).reshape(*q.shape[:-1], -1).astype(np.float32) - 8
    blocks = np.repeat(
        scales if scales.ndim == 3 else scales[..., None],
        w.shape[-1] // (scales.size // (w.size // w.shape[-1])),
        -1,
    )
    return torch.tensor(w * blocks).mT


def weights_of(model: Any, name: str) -> list[torch.Tensor]:
    """Return PyTorch's weights of a product that the builder names, which it concatenates or splits."""
    parent, _, leaf = name.replace(".attn.", ".self_attn.").replace(".moe.", ".mlp.").rpartition(".")
    module = model.get_submodule(parent)
    if hasattr(module, leaf):
        return [getattr(module, leaf).weight]
    if leaf == "qkv_proj":
        return [module.q_proj.weight, module.k_proj.weight, module.v_proj.weight]
    if leaf == "o_proj":
        return [module.dense.weight]
    return [module.gate_up_proj.weight.chunk(2)[leaf == "up_proj"]]


def dequantized(path: str, model: Any) -> Any:
    """Return PyTorch's model with the packed weights of a file, frozen."""
    own, file = copy.deepcopy(model).requires_grad_(False), onnx.load(path)
    packed: set[int] = set()
    for node in file.graph.node:
        if node.op_type == "MatMulNBits":
            weights = weights_of(own, node.input[1].removesuffix(".MatMul.weight_Q4"))
            found = packed_weight(file, node).split([len(w) for w in weights])
            packed |= {w.data_ptr() for w in weights}
            for w, numbers in zip(weights, found, strict=True):
                assert 0 < abs(w - numbers).max() < 0.1
                w.copy_(numbers)
        if node.op_type == "QMoE":
            for i in (2, 5):
                own_name = node.input[i].replace(".moe.", ".mlp.").removesuffix(".qweight")
                w = own.get_parameter(own_name)
                packed.add(w.data_ptr())
                w.copy_(packed_experts(file, *node.input[i : i + 2]))
    for parameter in own.parameters():
        parameter.requires_grad_(parameter.data_ptr() not in packed)
    return own


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *IN_4_BITS, pytest.param("gemma2", marks=pytest.mark.exhaustive)])
def test_what_is_not_packed_in_4_bits_trains_as_in_pytorch(name, built):
    folder, model = built(name, "int4", "accuracy_level=0", "block_size=16")
    path = str(folder / "model.onnx")
    executor, own = compiled(path), dequantized(path, model)
    np.testing.assert_allclose(logits(executor), prefill(path)["logits"], atol=1e-5)
    train_equally(executor, own)
    trained = executor.trained(into=path)
    np.testing.assert_allclose(prefill(trained)["logits"], logits(executor), atol=1e-5)


@pytest.mark.slow
def test_another_file_is_refused(built):
    folder, _ = built("llama")
    other, _ = built("gemma2")
    with pytest.raises(graphopt.GraphoptError, match="expected the file that was compiled, with "):
        compiled(folder / "model.onnx").trained(into=str(other / "model.onnx"))


@pytest.mark.slow
def test_adapters_of_stacked_experts_are_those_of_peft(built, tmp_path):
    peft = pytest.importorskip("peft")
    folder, model = built("gpt-oss")
    path, theirs, ours = str(folder / "model.onnx"), tmp_path / "theirs", tmp_path / "ours"
    torch.manual_seed(1)
    config = peft.LoraConfig(
        **{"r": 3, "lora_alpha": 6, "lora_dropout": 0.0, "target_modules": ["q_proj", "k_proj", "v_proj"]},
        target_parameters=[*EXPERTS],
    )
    own = peft.get_peft_model(copy.deepcopy(model), config)
    with torch.no_grad():
        for name, x in own.named_parameters():
            if "lora_B" in name:
                x.normal_(0, 0.05)
    own.save_pretrained(theirs)
    executor = graphopt.Executor(
        graphopt.compile(
            path,
            adapter=passes.LoRA.load(theirs),
            loss=passes.CrossEntropy(axis=-1),
            optimizer=passes.AdamW(RATE, weight_decay=0.0),
        ),
        threads=1,
    )
    with torch.no_grad():
        expected = own(torch.tensor(IDS)).logits.numpy()
        assert abs(expected - model(torch.tensor(IDS)).logits.numpy()).max() > 0.01
    np.testing.assert_allclose(logits(executor), expected, atol=2e-6)
    train_equally(executor, own)
    graphopt.save_adapter(executor, ours, form="peft")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(model), ours).eval()
    with torch.no_grad():
        np.testing.assert_allclose(again(torch.tensor(IDS)).logits.numpy(), logits(executor), atol=2e-6)
    merged, slots = executor.trained(into=path), executor.trained(into=path, adapters="slots")
    np.testing.assert_allclose(prefill(merged)["logits"], logits(executor), atol=2e-6)
    np.testing.assert_array_equal(prefill(slots)["logits"], prefill(path)["logits"])
    graphopt.save_adapter(executor, tmp_path / "own.onnx_adapter")
    first = greedy(folder)
    places = [with_model(folder, proto, tmp_path / name) for name, proto in (("merged", merged), ("slots", slots))]
    assert greedy(places[1]) == first
    assert greedy(places[1], tmp_path / "own.onnx_adapter") == greedy(places[0]) != first


@pytest.mark.slow
def test_the_default_adapts_experts_and_leaves_routers(built):
    folder, _ = built("gpt-oss")
    steps = {"loss": passes.CrossEntropy(axis=-1), "optimizer": passes.AdamW(RATE)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step = graphopt.compile(folder / "model.onnx", adapter=passes.LoRA(rank=2), **steps)
    names = [*graphopt.Executor(step, native=False).parameters]
    assert sum(".moe.experts." in name for name in names) == 8 and not any("router" in name for name in names)
