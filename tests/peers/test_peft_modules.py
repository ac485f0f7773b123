"""Modules whose names or numbers a file does not tell plainly: peft computes the same, or a folder is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphopt
import passes

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

from torch import nn  # noqa: E402

pytestmark = [pytest.mark.usefixtures("plain"), pytest.mark.filterwarnings("ignore")]
EXPORTERS = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)


class Nested(nn.Module):
    """Products in a Sequential and in modules whose lists have the same names, with biases and without."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8))
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), inner)
        self.lists = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Sequential(nn.Linear(8, 8))])
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), 2)
        self.bias = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        x = self.layers(self.layer(x))
        for module in self.lists:
            x = torch.tanh(module(x) + self.bias)
        return self.head(x.mean(1))


class Normalized(nn.Module):
    """A convolution into which both exporters fold the normalization after it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU())
        self.mid, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(self.mid(self.features(x).mean(2))))


def exported(kind: type[nn.Module], dynamo: bool, path: Path) -> tuple[nn.Module, Path]:
    torch.backends.mha.set_fastpath_enabled(False)  # it passes peft's modules by
    torch.manual_seed(0)
    module = kind().eval()
    with torch.no_grad():
        for x in module.parameters():
            x.add_(torch.randn_like(x) * 0.2)
    options: Any = {} if dynamo else {"opset_version": 17}
    names = {"input_names": ["x"], "output_names": ["y"]}
    torch.onnx.export(module, (torch.tensor(X),), path, dynamo=dynamo, verbose=False, **names, **options)
    return module, path


def trained(path: Path, adapter: Any, steps: int = 5) -> graphopt.Executor:
    step = graphopt.compile(path, adapter=adapter, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step)
    for _ in range(steps):
        executor.step(x=X, target=np.array([1, 3]))
    return executor


def by_peft(module: nn.Module, folder: Path) -> np.ndarray:
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(copy.deepcopy(module), folder).eval()(torch.tensor(X)).numpy()


@EXPORTERS
def test_modules_have_their_own_names(dynamo: bool, tmp_path: Path) -> None:
    module, path = exported(Nested, dynamo, tmp_path / "model.onnx")
    executor = trained(path, passes.LoRA("*", 2, leave_out="*out_proj*"))
    adapted = {name.rpartition(".weight.")[0] for name in executor.parameters} - {""}
    linear = {name for name, x in module.named_modules() if isinstance(x, nn.Linear)}
    assert adapted == {name for name in linear if not name.endswith("out_proj")}
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    expected = executor.predict(x=X)["y"]
    np.testing.assert_allclose(by_peft(module, tmp_path / "a"), expected, rtol=1e-5, atol=2e-6)
    assert abs(module(torch.tensor(X)).detach().numpy() - expected).max() > 0.1
    again = trained(path, passes.LoRA.load(tmp_path / "a"), steps=0)
    np.testing.assert_allclose(again.predict(x=X)["y"], expected, rtol=1e-5, atol=2e-6)


@EXPORTERS
def test_a_convolution_with_a_folded_normalization_is_refused(dynamo: bool, tmp_path: Path) -> None:
    _, path = exported(Normalized, dynamo, tmp_path / "model.onnx")
    executor = trained(path, passes.LoRA(rank=2))
    with pytest.raises(graphopt.GraphoptError, match="folded into it, such as BatchNormalization: save it by"):
        graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    assert not (tmp_path / "a").exists()


@EXPORTERS
def test_the_last_product_of_attention_is_refused(dynamo: bool, tmp_path: Path) -> None:
    """peft computes W + 2 B A with it, or W if it is the only one."""
    module, path = exported(Nested, dynamo, tmp_path / "model.onnx")
    executor = trained(path, passes.LoRA("*out_proj*", 2), steps=0)
    with pytest.raises(graphopt.GraphoptError, match="that of a MultiheadAttention, whose change peft adds"):
        graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    adapted = peft.get_peft_model(copy.deepcopy(module), peft.LoraConfig(r=2, target_modules=["self_attn"]))
    adapted.save_pretrained(tmp_path / "b")
    again = trained(path, passes.LoRA.load(tmp_path / "b"), steps=0)
    expected = by_peft(module, tmp_path / "b")
    np.testing.assert_allclose(again.predict(x=X)["y"], expected, rtol=1e-5, atol=2e-6)
    with torch.no_grad():
        adapted.base_model.model.layers.layers[0].self_attn.base_layer.out_proj.lora_B.default.weight[0] = 1.0
    adapted.save_pretrained(tmp_path / "b")
    with pytest.raises(graphopt.GraphoptError, match="expected no change of the last product of a"):
        passes.LoRA.load(tmp_path / "b")(graphopt.load(path))
