"""Adapters that graphopt trains are what peft, ONNX Runtime and onnxruntime-genai load, and the other way round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import graphopt
import passes

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import nn  # noqa: E402
from transformers.pytorch_utils import Conv1D  # noqa: E402

pytestmark = [pytest.mark.usefixtures("plain"), pytest.mark.filterwarnings("ignore")]


class Mixed(nn.Module):
    """All modules that peft adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)
        self.turn = Conv1D(12, 16)
        self.mix = nn.Linear(12, 12)
        self.row = nn.Conv1d(4, 8, 3, padding=1)
        self.plane = nn.Conv2d(8, 6, 3, groups=2, stride=2, padding=1)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Any) -> Any:
        h = torch.tanh(self.mix(torch.tanh(self.turn(self.words(tokens)))))  # [N, 4, 12]
        h = torch.relu(self.row(h)).reshape(-1, 8, 3, 4)
        h = torch.relu(self.plane(h)).mean((2, 3))
        return self.head(self.norm(h))


ALL = ["words", "turn", "mix", "row", "plane"]


def tokens(seed: int = 0) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 11, (6, 4)))


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Mixed().eval()


@pytest.fixture(scope="module", params=[True, False], ids=["dynamo", "torchscript"])
def exported(module: nn.Module, request: Any, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "mixed.onnx"
    rows = {"tokens": {0: torch.export.Dim("N")}} if request.param else None
    options = {"dynamic_shapes": rows} if request.param else {"dynamic_axes": {"tokens": {0: "N"}}}
    torch.onnx.export(
        module, (tokens(),), path, input_names=["tokens"], output_names=["y"], dynamo=request.param, **options
    )
    return path


def train(path: Path, adapter: Any, steps: int = 6, **more: Any) -> graphopt.Executor:
    step = graphopt.compile(path, adapter=adapter, loss=passes.CrossEntropy(), optimizer=passes.AdamW(0.03), **more)
    executor = graphopt.Executor(step)
    for i in range(steps):
        executor.step(tokens=tokens(i).numpy(), target=np.arange(6) % 3)
    return executor


def reloaded(module: nn.Module, folder: Path) -> Any:
    """Return what peft computes with a folder on a fresh copy of a module."""
    torch.manual_seed(0)
    fresh = type(module)()
    fresh.load_state_dict(module.state_dict())
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(fresh, folder).eval()(tokens(9)).numpy()


def output(executor: graphopt.Executor) -> np.ndarray:
    return executor.predict(tokens=tokens(9).numpy())["y"]


OPTIONS = {
    "lora": {},
    "stabilized": {"scaling": "rank_stabilized"},
    "dora": {"dora": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_peft_computes_what_the_executor_does(module: nn.Module, exported: Path, options: Any, tmp_path: Path) -> None:
    names = [f"{name}.weight" for name in ALL if name != "plane" or "dora" not in options]
    executor = train(exported, passes.LoRA(names, rank=4, alpha=6, **options))
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    expected = output(executor)
    np.testing.assert_allclose(reloaded(module, tmp_path / "a"), expected, rtol=1e-5, atol=2e-6)
    with torch.no_grad():
        assert abs(module(tokens(9)).numpy() - expected).max() > 0.1
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    for key in tensors:  # each tensor counts
        changed = {**tensors, key: tensors[key] + 0.5}
        save_file(changed, tmp_path / "a" / "adapter_model.safetensors", {"format": "pt"})
        assert abs(reloaded(module, tmp_path / "a") - expected).max() > 1e-4, key


def test_what_peft_computes_otherwise_is_refused(exported: Path, tmp_path: Path) -> None:
    executor = train(exported, passes.LoRA(["plane.weight"], rank=4, dora=True), steps=0)
    with pytest.raises(graphopt.GraphoptError, match=r"plane.*DoRA of groups"):
        graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_peft_saves_is_continued(module: nn.Module, exported: Path, options: Any, tmp_path: Path) -> None:
    torch.manual_seed(1)
    own = {"use_rslora": "scaling" in options, "use_dora": "dora" in options}
    targets = [name for name in ALL if name != "plane"]
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=targets, rank_pattern={"mix": 2}, alpha_pattern={"row": 3}, **own
    )
    fresh = Mixed()
    fresh.load_state_dict(module.state_dict())
    adapted = peft.get_peft_model(fresh, config).eval()
    with torch.no_grad():
        for name, x in adapted.named_parameters():
            if "lora_" in name:
                x.add_(torch.randn_like(x) * 0.2)
        expected = adapted(tokens(9)).numpy()
    adapted.save_pretrained(tmp_path / "a")
    executor = train(exported, passes.LoRA.load(tmp_path / "a"), steps=0)
    np.testing.assert_allclose(output(executor), expected, rtol=1e-5, atol=2e-6)
    model = executor.trained(into=exported)
    feeds = {"tokens": tokens(9).numpy()}
    np.testing.assert_allclose(graphopt.run(model, feeds)["y"], expected, rtol=1e-5, atol=2e-6)
    graphopt.save_adapter(executor, tmp_path / "b", form="peft")
    np.testing.assert_allclose(reloaded(module, tmp_path / "b"), expected, rtol=1e-5, atol=2e-6)


def test_losses_continue_as_peft_s(module: nn.Module, exported: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    fresh = Mixed()
    fresh.load_state_dict(module.state_dict())
    targets = ["words", "turn", "mix", "row"]
    adapted = peft.get_peft_model(fresh, peft.LoraConfig(r=4, lora_alpha=6, target_modules=targets))
    adapted.save_pretrained(tmp_path / "a")
    optimizer = torch.optim.AdamW([x for x in adapted.parameters() if x.requires_grad], 0.01)
    expected = []
    for i in range(10):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(adapted(tokens(i)), torch.arange(6) % 3)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    step = graphopt.compile(
        exported,
        adapter=passes.LoRA.load(tmp_path / "a"),
        loss=passes.CrossEntropy(),
        optimizer=passes.AdamW(0.01, weight_decay=0.01),
    )
    executor = graphopt.Executor(step)
    feeds = ({"tokens": tokens(i).numpy(), "target": np.arange(6) % 3} for i in range(10))
    np.testing.assert_allclose([executor.step(x)["loss"] for x in feeds], expected, rtol=2e-6)


def test_modules_that_train_in_full_are_saved_and_loaded(module: nn.Module, exported: Path, tmp_path: Path) -> None:
    unfrozen = passes.Parameters(unfreeze=["head.*", "norm.weight", "mix.bias"])
    executor = train(exported, passes.LoRA(["mix.weight"], rank=4), parameters=unfrozen)
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["head", "norm"]
    expected = output(executor)
    np.testing.assert_allclose(reloaded(module, tmp_path / "a"), expected, rtol=1e-5, atol=2e-6)
    again = train(exported, passes.LoRA.load(tmp_path / "a"), steps=0)
    np.testing.assert_allclose(output(again), expected, rtol=1e-5, atol=2e-6)
    assert {"head.bias", "norm.weight"} <= {*again.parameters}


def test_names_may_differ_by_a_prefix(module: nn.Module, tmp_path: Path) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = module

        def forward(self, tokens: Any) -> Any:
            return self.m(tokens)

    path = tmp_path / "around.onnx"
    torch.onnx.export(Around().eval(), (tokens(),), path, input_names=["tokens"], output_names=["y"])
    executor = train(path, passes.LoRA(["*mix.weight", "*turn.weight"], rank=4))
    graphopt.save_adapter(executor, tmp_path / "a", form="peft", names={"m.*": "*"})
    expected = output(executor)
    np.testing.assert_allclose(reloaded(module, tmp_path / "a"), expected, rtol=1e-5, atol=2e-6)
    again = train(path, passes.LoRA.load(tmp_path / "a"))  # found without names=
    graphopt.save_adapter(again, tmp_path / "b", form="peft")
    expected = output(again)
    np.testing.assert_allclose(reloaded(module, tmp_path / "b"), expected, rtol=1e-5, atol=2e-6)
    names = [{*load_file(tmp_path / x / "adapter_model.safetensors")} for x in "ab"]
    assert names[0] == names[1]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_slots_and_their_file_compute_what_the_executor_does(exported: Path, options: Any, tmp_path: Path) -> None:
    names = [f"{name}.weight" for name in ALL]
    feeds = {"tokens": tokens(9).numpy()}
    first = train(exported, passes.LoRA(names, rank=4, **options))
    model = first.trained(into=exported, adapters="slots")
    np.testing.assert_array_equal(graphopt.run(model, feeds)["y"], graphopt.run(onnx.load(exported), feeds)["y"])
    for executor in (first, train(exported, passes.LoRA(names, rank=2, alpha=3, **options))):
        path = tmp_path / "a.onnx_adapter"
        graphopt.save_adapter(executor, path)
        found = with_adapter(model, path, feeds)
        np.testing.assert_allclose(found, output(executor), rtol=1e-5, atol=2e-6)
        again = train(exported, passes.LoRA.load(path), steps=0)
        np.testing.assert_allclose(output(again), output(executor), rtol=1e-5, atol=2e-6)


def with_adapter(model: onnx.ModelProto, path: Path, feeds: Any) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    adapter, run = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    adapter.Load(str(path))
    run.add_active_adapter(adapter)
    return session.run(None, feeds, run)[0]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: Any) -> Any:
    """Return a tiny Llama, and the folder in which onnxruntime-genai's builder has put its files by precision."""
    from test_decoders import builder

    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for x in llama.parameters():
            x.mul_(3)  # tokens that are not all alike
    llama.save_pretrained(folder / "llama")
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(96)}, unk_token="t0")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), unk_token="t0")
    fast.save_pretrained(folder / "llama")
    for precision, extra in (
        ("fp32", "hf_token=false"),
        ("int4", "int4_block_size=32 int4_accuracy_level=1"),
    ):
        arguments = ["", f"{folder}/llama", f"{folder}/{precision}", precision, "cpu", str(folder)]
        builder.create_model(*arguments, **builder.parse_extra_options(*arguments, extra.split()))
    return llama, folder


def tuned(path: Path, adapter: Any, steps: int = 10) -> graphopt.Executor:
    step = graphopt.compile(
        path,
        adapter=adapter,
        loss=passes.CrossEntropy(axis=-1, ignore_index=-100),
        optimizer=passes.AdamW(0.01),
    )
    executor = graphopt.Executor(step)
    ids = np.random.default_rng(0).integers(3, 96, (4, 9))
    for _ in range(steps):
        executor.step(input_ids=ids[:, :-1], target=ids[:, 1:])
    return executor


def greedy(*files: Path) -> list[int]:
    """Return greedy tokens of onnxruntime-genai, of a folder and perhaps an adapter."""
    from test_decoders import greedy

    return greedy(*files, prompt=np.array([5, 17, 40, 33]))


def in_folder(model: onnx.ModelProto, source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (target / path.name).write_bytes(path.read_bytes())
    graphopt.save(model, target / "model.onnx")
    return target


PROJECTIONS = ["*.attn.*", "*.mlp.*"]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [None, {"q": 64, "_k": 32, "v": 32}], ids=["packed", "parts"])
def test_a_decoder_generates_with_the_adapter_what_it_does_merged(decoder: Any, parts: Any, tmp_path: Path) -> None:
    llama, folder = decoder
    path = folder / "fp32" / "model.onnx"
    pattern = ["*.qkv_proj.*"] if parts else PROJECTIONS
    executor = tuned(path, passes.LoRA(pattern, rank=4, alpha=8, parts=parts))
    merged = in_folder(executor.trained(into=path), folder / "fp32", tmp_path / "merged")
    slots = in_folder(executor.trained(into=path, adapters="slots"), folder / "fp32", tmp_path / "slots")
    graphopt.save_adapter(executor, tmp_path / "a.onnx_adapter")
    base, expected = greedy(folder / "fp32"), greedy(merged)
    assert base != expected
    assert greedy(slots) == base
    assert greedy(slots, tmp_path / "a.onnx_adapter") == expected

    graphopt.save_adapter(executor, tmp_path / "peft", form="peft")
    ids = torch.from_numpy(np.random.default_rng(3).integers(3, 96, (2, 7)))
    fresh = transformers.LlamaForCausalLM.from_pretrained(folder / "llama")
    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(fresh, tmp_path / "peft").eval()(ids).logits.numpy()
        plain = llama(ids).logits.numpy()
    logits = executor.predict(input_ids=ids.numpy())["logits"]
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    assert abs(plain - logits).max() > 0.1
    again = tuned(path, passes.LoRA.load(tmp_path / "peft"), steps=0)
    np.testing.assert_allclose(again.predict(input_ids=ids.numpy())["logits"], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_quantized_decoder_takes_the_adapter_in_slots(decoder: Any, tmp_path: Path) -> None:
    _, folder = decoder
    path = folder / "int4" / "model.onnx"
    executor = tuned(path, passes.LoRA(PROJECTIONS, rank=4, alpha=8))
    slots = in_folder(executor.trained(into=path, adapters="slots"), folder / "int4", tmp_path / "slots")
    graphopt.save_adapter(executor, tmp_path / "a.onnx_adapter")
    base, expected = greedy(folder / "int4"), greedy(slots, tmp_path / "a.onnx_adapter")
    assert greedy(slots) == base != expected
    beside = in_folder(executor.trained(into=path), folder / "int4", tmp_path / "beside")
    assert greedy(beside) == expected
