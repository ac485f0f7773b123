"""Adapters against PEFT: the same losses from the same initial values, on files of both exporters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import graphopt
import passes

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
nn = torch.nn

STEPS = 20
SUFFIXES = {
    "lora_A": ("lora_A.default.weight", "lora_embedding_A.default"),
    "lora_B": ("lora_B.default.weight", "lora_embedding_B.default"),
    "lora_magnitude": ("lora_magnitude_vector.default.weight",) * 2,
}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lora": ({}, {}),
    "rank-stabilized": ({"scaling": "rank_stabilized"}, {"use_rslora": True}),
    "dora": ({"dora": True}, {"use_dora": True}),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.v_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        rows, tokens, width = x.shape
        split = (rows, tokens, self.heads, width // self.heads)
        q, k, v = (f(x).reshape(split).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.softmax(q @ k.transpose(-1, -2) / split[-1] ** 0.5, -1)
        return self.o_proj((scores @ v).transpose(1, 2).reshape(rows, tokens, width))


class Transformer(nn.Module):
    """A block with an embedding, linear layers and GPT-2's Conv1D."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(20, width), Attention(width, 2)
        self.up, self.c_proj, self.head = (
            nn.Linear(width, 2 * width),
            conv1d(width, 2 * width),
            nn.Linear(width, 5),
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        x = x + self.attn(self.norm(x))
        return self.head((x + self.c_proj(torch.tanh(self.up(x)))).mean(1))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Conv2d(6, 8, (1, 2))
        self.rows, self.head = nn.Conv1d(8, 6, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(self.rows(x.mean(3)).mean(2))


MODELS: dict[str, tuple[type[nn.Module], Callable[[], Any], list[str]]] = {
    "transformer": (
        Transformer,
        lambda: torch.randint(0, 20, (6, 7)),
        ["q_proj", "k_proj", "v_proj", "o_proj", "up", "c_proj", "embed"],
    ),
    "images": (Images, lambda: torch.randn(6, 3, 8, 8), ["first", "second", "rows", "head"]),
}


def exported(network: nn.Module, x: Any, dynamo: bool, path: Path) -> Path:
    if dynamo:
        sizes: dict[str, Any] = {"dynamic_shapes": ({0: "N"},)}
    else:
        sizes = {"dynamic_axes": {"x": {0: "N"}}, "opset_version": 17}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = {"input_names": ["x"], "output_names": ["y"]}
        torch.onnx.export(network, (x,), path, dynamo=dynamo, verbose=False, **names, **sizes)
    return path


def with_values(network: nn.Module, values: dict[str, np.ndarray], **options: Any) -> nn.Module:
    """Return PEFT's model with the initial values of graphopt's adapters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fan_in_fan_out
        adapted = peft.get_peft_model(copy.deepcopy(network), peft.LoraConfig(r=4, lora_alpha=8, **options))
    known = dict(adapted.named_parameters())
    with torch.no_grad():
        for name, array in values.items():
            module, suffix = name.split(".weight.")
            keys = (f"base_model.model.{module}.{end}" for end in SUFFIXES[suffix])
            parameter = next(known[key] for key in keys if key in known)
            is_matrix = suffix != "lora_magnitude" and array.ndim == 2
            array = array.T if is_matrix else array
            if suffix == "lora_magnitude":
                assert np.allclose(array, parameter.flatten().numpy(), rtol=1e-6)
            parameter.copy_(torch.tensor(array.reshape(parameter.shape).copy()))
    return adapted


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_equal_peft_s(name: str, dynamo: bool, method: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    kind, data, targets = MODELS[name]
    network, x, labels = kind().eval(), data(), torch.randint(0, 5, (6,))
    path = exported(network, x, dynamo, tmp_path / "model.onnx")
    ours, options = METHODS[method]
    adapter = passes.LoRA([f"*{target}.weight" for target in targets], 4, 8, **ours)
    step = graphopt.compile(path, adapter=adapter, loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-2))
    executor = graphopt.Executor(step, native=False)
    assert len(executor.parameters) == (3 if method == "dora" else 2) * len(targets)
    theirs = with_values(network, executor.parameters, target_modules=targets, **options)
    optimizer = torch.optim.AdamW([x for x in theirs.parameters() if x.requires_grad], 1e-2)
    losses, expected = [], []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(theirs(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
        losses.append(executor.step({"x": x.numpy(), "target": labels.numpy()})["loss"])
    assert np.allclose(losses, expected, rtol=1e-6, atol=1e-6)
    y = executor.predict({"x": x.numpy()})["y"]
    assert np.allclose(y, theirs(x).detach().numpy(), rtol=1e-5, atol=2e-5)
    session = onnxruntime.InferenceSession(executor.trained().SerializeToString())
    assert np.allclose(session.run(None, {"x": x.numpy()})[0], y, rtol=1e-5, atol=1e-5)
