"""Adapters in the formats of other libraries, and models with slots, against ONNX Runtime and NumPy alone."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.numpy
from builders import model
from steps import assert_equal

import graphopt
import passes
from graphopt import cli, models
from graphopt.adapters import peft
from graphopt.adapters.adapter_file import read_adapter_file, write_adapter_file
from graphopt.adapters.naming import Naming, matched
from graphopt.adapters.peft import Module, PeftAdapter
from graphopt.graph.merging import Adapted
from graphopt.testing import strict

pytestmark = pytest.mark.usefixtures("plain")
needs_files = pytest.mark.skipif(
    not hasattr(onnxruntime, "AdapterFormat"), reason="this onnxruntime has no adapter files"
)
R = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return R.standard_normal(shape).astype(np.float32)


def with_adapter(proto: onnx.ModelProto, path: Path | None, feeds: Mapping[str, Any]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    run = onnxruntime.RunOptions()
    if path is not None:
        adapter = onnxruntime.LoraAdapter()
        adapter.Load(str(path))
        run.add_active_adapter(adapter)
    return session.run(["y"], feeds, run)[0]


X = {"x": numbers(6, 8)}
IMAGES = {"x": numbers(2, 4, 8, 8)}
# Networks, their weights, and feeds: each kind of product, in each layout.
NETWORKS: dict[str, tuple[str, dict[str, np.ndarray], Mapping[str, Any]]] = {
    "MatMul": ("g (float[N,8] x) => (float[N,6] y) { y = MatMul(x, w) }", {"w": numbers(8, 6)}, X),
    "MatMul, three axes": (
        "g (float[N,4,8] x) => (float[N,4,6] y) { h = MatMul(x, w)\n y = Add(h, b) }",
        {"w": numbers(8, 6), "b": numbers(6)},
        {"x": numbers(3, 4, 8)},
    ),
    "MatMul, left": (
        "g (float[N,8,5] x) => (float[N,6,5] y) { y = MatMul(w, x) }",
        {"w": numbers(6, 8)},
        {"x": numbers(3, 8, 5)},
    ),
    "Gemm": (
        "g (float[N,8] x) => (float[N,6] y) { y = Gemm<alpha=0.5, beta=2.0, transB=1>(x, w, b) }",
        {"w": numbers(6, 8), "b": numbers(6)},
        X,
    ),
    "Gemm, transA": (
        "g (float[8,N] x) => (float[N,6] y) { y = Gemm<transA=1>(x, w, b) }",
        {"w": numbers(8, 6), "b": numbers(6)},
        {"x": numbers(8, 5)},
    ),
    "Transpose": (
        "g (float[N,8] x) => (float[N,6] y) { t = Transpose<perm=[1,0]>(w)\n y = MatMul(x, t) }",
        {"w": numbers(6, 8)},
        X,
    ),
    "Gather": (
        "g (int64[N] x) => (float[N,6] y) { y = Gather(w, x) }",
        {"w": numbers(8, 6)},
        {"x": np.array([1, 7, 2])},
    ),
    "Conv": (
        "g (float[N,4,8,8] x) => (float[N,6,4,4] y) { y = Conv<pads=[1,1,1,1], strides=[2,2]>(x, w, b) }",
        {"w": numbers(6, 4, 3, 3), "b": numbers(6)},
        IMAGES,
    ),
    "Conv, groups": (
        "g (float[N,4,8,8] x) => (float[N,6,8,8] y) { y = Conv<pads=[2,2,2,2], dilations=[2,2], group=2>(x, w) }",
        {"w": numbers(6, 2, 3, 3)},
        IMAGES,
    ),
    "ConvTranspose": (
        "g (float[N,4,8,8] x) => (float[N,6,10,10] y) { y = ConvTranspose(x, w, b) }",
        {"w": numbers(4, 6, 3, 3), "b": numbers(6)},
        IMAGES,
    ),
    "LSTM": (
        "g (float[5,N,8] x) => (float[5,1,N,6] y) { y = LSTM<hidden_size=6>(x, w, r) }",
        {"w": numbers(1, 24, 8), "r": numbers(1, 24, 6)},
        {"x": numbers(5, 2, 8)},
    ),
}


def trained(proto: onnx.ModelProto, adapter: Any, feeds: Mapping[str, Any], steps: int = 4) -> graphopt.Executor:
    step = graphopt.compile(proto, adapter=adapter, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.05))
    executor = graphopt.Executor(step)
    target = np.zeros_like(executor.predict(feeds)["y"])
    for _ in range(steps):
        executor.step({**feeds, "target": target})
    return executor


@needs_files
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_way_out_computes_what_the_executor_does(name: str, dora: bool, tmp_path: Path) -> None:
    text, weights, feeds = NETWORKS[name]
    proto = model(text, **weights)
    names = [name for name in weights if name != "b"]
    executor = trained(proto, passes.LoRA(names, rank=2, dora=dora), feeds)
    expected = executor.predict(feeds)["y"]
    plain = graphopt.run(proto, feeds)["y"]
    assert abs(expected - plain).max() > 1e-3
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(graphopt.run(executor.trained(), feeds)["y"], expected, **close)
    merged = executor.trained(into=proto)
    assert [node.op_type for node in merged.graph.node] == [node.op_type for node in proto.graph.node]
    np.testing.assert_allclose(graphopt.run(merged, feeds)["y"], expected, **close)

    slots = executor.trained(into=proto, adapters="slots")
    onnx.checker.check_model(slots)
    np.testing.assert_allclose(with_adapter(slots, None, feeds), plain, rtol=0 if not dora else 1e-6, atol=1e-6)
    path = tmp_path / "a.onnx_adapter"
    graphopt.save_adapter(executor, path)
    np.testing.assert_allclose(with_adapter(slots, path, feeds), expected, **close)
    other = trained(proto, passes.LoRA(names, rank=4, dora=dora), feeds)  # of another rank
    graphopt.save_adapter(other, path)
    np.testing.assert_allclose(with_adapter(slots, path, feeds), other.predict(feeds)["y"], **close)
    again = trained(proto, passes.LoadedLoRA(path), feeds, steps=0)
    np.testing.assert_allclose(again.predict(feeds)["y"], other.predict(feeds)["y"], **close)


class Scaled(passes.Adapter):
    """Multiply the outputs of a product by a factor each."""

    def initial(self, target: Any, generator: Any) -> dict[str, np.ndarray]:
        return {"factor": np.linspace(0.5, 2, target.outputs)}

    def delta(self, op: Any, target: Any, x: Any, *values: Any) -> Any:
        return target.product(op) * target.spread(op, values[0] - 1)

    @staticmethod
    def merge(w: np.ndarray, scale: float, *values: np.ndarray) -> np.ndarray:
        return w * values[0]


ONE, TWO, LAST = passes.LoRA("w", 1, 2), passes.LoRA("w", 2, 2), passes.LoRA("w", 2, 2, dora=True)
HALVES = {"q": 2, "k": 4}
SEVERAL: dict[str, tuple[str, list[Any]]] = {
    "LoRA, LoRA, DoRA": ("MatMul", [TWO, ONE, LAST]),
    "LoRA of parts, DoRA": ("MatMul", [replace(TWO, parts=HALVES), LAST]),
    "LoRA of a part, DoRA": ("MatMul", [replace(TWO, parts={"_q": 2, "k": 4}), LAST]),
    "LoRA, DoRA of parts": ("MatMul", [TWO, replace(LAST, parts=HALVES)]),
    "Conv: LoRA, LoRA, DoRA": ("Conv", [TWO, ONE, LAST]),
    "LoRA, another": ("MatMul", [TWO, Scaled("w")]),
    "ten LoRA, another": ("MatMul", [*[ONE] * 10, Scaled("w")]),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_adapters_of_a_weight_are_merged_in_the_order_of_their_terms(name: str, tmp_path: Path) -> None:
    """A later one is nearer to the product, whatever its name."""
    network, adapters = SEVERAL[name]
    text, weights, feeds = NETWORKS[network]
    proto = model(text, **weights)
    executor = trained(proto, adapters, feeds, steps=30)
    expected, close = executor.predict(feeds)["y"], {"rtol": 1e-4, "atol": 1e-5}
    for merged in (executor.trained(), executor.trained(into=proto)):
        np.testing.assert_allclose(with_adapter(merged, None, feeds), expected, **close)
    if "another" in name or not hasattr(onnxruntime, "AdapterFormat"):
        return
    graphopt.save_adapter(executor, path := tmp_path / "a.onnx_adapter")
    slots = executor.trained(into=proto, adapters="slots")
    np.testing.assert_allclose(with_adapter(slots, path, feeds), expected, **close)
    for given in ([passes.LoadedLoRA(path)], [TWO, passes.LoadedLoRA(path)]):
        again = trained(proto, given, feeds, steps=0)
        np.testing.assert_allclose(again.predict(feeds)["y"], expected, **close)
    with pytest.raises(graphopt.GraphoptError, match=r"one adapter of outputs with DoRA.*found several"):
        graphopt.save_adapter(executor, tmp_path / "a", form="peft")


@needs_files
def test_a_weight_that_is_folded_in_the_training_graph_has_a_slot(tmp_path: Path) -> None:
    """Whole numbers do not train, so that their transpose is a constant there."""
    text, _, feeds = NETWORKS["Transpose"]
    proto = model(text, w=(np.arange(48) % 5 - 2.0).reshape(6, 8))
    with pytest.warns(UserWarning, match="a grid, or whole numbers"):
        executor = trained(proto, passes.LoRA("w", rank=2), feeds)
    assert "w" not in executor.model.graph.initializers
    slots = executor.trained(into=proto, adapters="slots")
    graphopt.save_adapter(executor, tmp_path / "a.onnx_adapter")
    found = with_adapter(slots, tmp_path / "a.onnx_adapter", feeds)
    np.testing.assert_allclose(found, executor.predict(feeds)["y"], rtol=1e-4, atol=1e-3)


@needs_files
@pytest.mark.parametrize("dora", [False, True])
def test_a_product_in_a_body_has_a_slot(dora: bool, tmp_path: Path) -> None:
    """The product is the output of the body, and the weight lies outside."""
    text = """g (float[5,N,6] x) => (float[5,N,6] y) {
        start = Constant<value = float[1] {0}>()
        last, y = Scan<num_scan_inputs=1, body = turn (float[1] h, float[N,6] e) => (float[1] next, float[N,6] out) {
            next = Identity(h)
            t = Tanh(e)
            out = MatMul(t, w)
        }>(start, x)
    }"""
    proto, feeds = model(text, w=numbers(6, 6)), {"x": numbers(5, 2, 6)}
    executor = trained(proto, passes.LoRA("w", rank=2, dora=dora), feeds)
    expected, plain = executor.predict(feeds)["y"], graphopt.run(proto, feeds)["y"]
    assert abs(expected - plain).max() > 1e-3
    slots = executor.trained(into=proto, adapters="slots")
    onnx.checker.check_model(slots, full_check=True)
    np.testing.assert_allclose(with_adapter(slots, None, feeds), plain, rtol=1e-5, atol=1e-5)
    graphopt.save_adapter(executor, tmp_path / "a.onnx_adapter")
    np.testing.assert_allclose(with_adapter(slots, tmp_path / "a.onnx_adapter", feeds), expected, rtol=1e-5, atol=1e-5)


def in_halves(name: str, stored: np.dtype, computes: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a network whose weights are stored in 16 bits, and which multiplies in another type or in the same."""
    text, weights, feeds = NETWORKS[name]
    text = text.replace("float[", f"{computes}[")
    if computes != stored.name:
        casts = "\n".join(f"{x} = Cast<to=1>({x}_stored)" for x in weights)
        text = text.replace("{", f"{{ {casts}\n", 1)
        weights = {f"{x}_stored": w for x, w in weights.items()}
    proto = model(text)
    for x, w in weights.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(w.astype(stored), x))
    return proto, {
        x: v.astype(np.float16 if computes == "float16" else np.float32) if v.dtype.kind == "f" else v
        for x, v in feeds.items()
    }


@needs_files
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    ("name", "stored", "computes"),
    [
        *((name, np.dtype(np.float16), "float16") for name in NETWORKS),
        *((name, np.dtype(np.float16), "float") for name in ("MatMul", "Gemm", "Conv")),
        *((name, np.dtype(ml_dtypes.bfloat16), "float") for name in ("MatMul", "Gemm", "Conv")),
    ],
)
@pytest.mark.slow
def test_adapters_of_models_of_16_bits(name: str, stored: np.dtype, computes: str, dora: bool, tmp_path: Path) -> None:
    """ONNX Runtime's outputs with the adapter in a slot, and after each way back, are those of the executor."""
    proto, feeds = in_halves(name, stored, computes)
    adapter = passes.LoRA("w*", rank=2, dora=dora)
    executor = trained(proto, adapter, feeds)
    expected = executor.predict(feeds)["y"].astype(np.float32)
    plain = graphopt.run(proto, feeds)["y"]
    assert abs(expected - plain).max() > 1e-3
    close = {"rtol": 1e-5, "atol": 1e-5} if computes == "float" else {"rtol": 2e-2, "atol": 5e-3}
    slots = executor.trained(into=proto, adapters="slots")
    onnx.checker.check_model(slots)
    files = [(tmp_path / "a.onnx_adapter", "onnxruntime")]
    if name not in ("ConvTranspose", "LSTM", "Conv, groups"):
        files.append((tmp_path / "a", "peft"))
    for path, form in files:
        graphopt.save_adapter(executor, path, form=form)
        again = trained(proto, passes.LoRA.load(path), feeds, steps=0)
        np.testing.assert_allclose(again.predict(feeds)["y"], expected, **close)
    np.testing.assert_allclose(with_adapter(slots, files[0][0], feeds), expected, **close)


@needs_files
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_an_adapter_file_keeps_the_type_of_its_numbers(dtype: Any, tmp_path: Path) -> None:
    array = numbers(3, 5).astype(dtype)
    write_adapter_file({"a": array}, tmp_path / "a")
    found = read_adapter_file(tmp_path / "a")["a"]
    assert found.dtype == array.dtype and (found == array).all()


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("ConvTranspose", "LSTM", "Conv, groups")])
def test_a_folder_of_peft_is_read_as_it_was_written(name: str, dora: bool, tmp_path: Path) -> None:
    text, weights, feeds = NETWORKS[name]
    proto = model(text, **weights)
    executor = trained(proto, passes.LoRA("w", rank=2, alpha=3, dora=dora), feeds)
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    again = trained(proto, passes.LoRA.load(tmp_path / "a"), feeds, steps=0)
    np.testing.assert_allclose(again.predict(feeds)["y"], executor.predict(feeds)["y"], rtol=1e-5, atol=1e-6)
    assert not again.parameters.keys() ^ executor.parameters.keys()


@pytest.mark.parametrize(
    ("name", "problem"),
    [("ConvTranspose", "transposed convolution"), ("LSTM", "recurrence"), ("Conv, groups", "dilations")],
)
def test_what_peft_lacks_is_refused(name: str, problem: str, tmp_path: Path) -> None:
    text, weights, feeds = NETWORKS[name]
    executor = trained(model(text, **weights), passes.LoRA("w", rank=2), feeds, steps=0)
    with pytest.raises(graphopt.GraphoptError, match=problem):
        graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    assert not (tmp_path / "a").exists()


PACKED = """g (float[N,8] x) => (float[N,12] y) {
    h = MatMul(x, w)
    q, k, v = Split<axis=1>(h, s)
    y = Concat<axis=1>(v, k, q)
}"""


@needs_files
def test_parts_of_a_packed_weight_are_modules_of_peft_and_one_slot(tmp_path: Path) -> None:
    sizes = np.array([6, 3, 3])
    name = "m.0.attn.qkv_proj.MatMul.weight"
    proto = model(PACKED, w=numbers(8, 12), s=sizes)
    for x in proto.graph.initializer:
        x.name = name if x.name == "w" else x.name
    proto.graph.node[0].input[1] = name
    feeds = {"x": X["x"]}
    for parts in (None, {"q": 6, "_": 3, "v": 3}, {"q": 6, "k": 3, "v": 3}):
        executor = trained(proto, passes.LoRA("*qkv*", rank=2, parts=parts), feeds)
        expected = executor.predict(feeds)["y"]
        graphopt.save_adapter(executor, tmp_path / "a", form="peft")
        found = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
        labels = {key.split(".")[-3] for key in found}
        assert labels == {"q_proj", "v_proj"} | (set() if parts and "_" in parts else {"k_proj"})
        assert found["base_model.model.m.0.self_attn.q_proj.lora_B.weight"].shape == (6, 2)
        again = trained(proto, passes.LoRA.load(tmp_path / "a"), feeds, steps=0)
        np.testing.assert_allclose(again.predict(feeds)["y"], expected, rtol=1e-5, atol=1e-6)
        path = tmp_path / "a.onnx_adapter"
        graphopt.save_adapter(executor, path)
        slots = executor.trained(into=proto, adapters="slots")
        assert [x.name for x in slots.graph.input] == ["x", f"{name}.lora_A", f"{name}.lora_B"]
        np.testing.assert_allclose(with_adapter(slots, path, feeds), expected, rtol=1e-5, atol=1e-5)


def test_names_of_modules() -> None:
    up, qkv = "model.layers.0.mlp.up_proj.MatMul.weight_Q4", "a.attn.qkv_proj.MatMul.weight"
    assert Naming().modules_of(up) == [("model.layers.0.mlp.up_proj", None)]
    assert [path for path, _ in Naming().modules_of(qkv)] == [f"a.self_attn.{x}_proj" for x in "qkv"]
    assert Naming(kind="phi3").modules_of(qkv) == [("a.self_attn.qkv_proj", None)]
    assert Naming(kind="phi3").modules_of(up) == [("model.layers.0.mlp.up_proj", None)]
    assert Naming({"w.*": {"*.q": 3, "*.k": 4}}).modules_of("w.c.weight") == [("c.q", 3), ("c.k", 4)]
    with pytest.raises(graphopt.GraphoptError, match="at most as many"):
        Naming({"w.c": "*"}).modules_of("w.c.weight")
    assert matched("a", ["x.q"], ["m.x.q"]) == {"x.q": "m.x.q"}
    assert matched("a", ["m.x.q"], ["x.q"]) == {"m.x.q": "x.q"}
    with pytest.raises(graphopt.GraphoptError, match=r"'y.q' that it lacks; it has 'm.x.q'"):
        matched("a", ["x.q", "y.q"], ["m.x.q"])
    with pytest.raises(graphopt.GraphoptError, match=r"found 'pooler.d' that it lacks; .*leave_out='pooler.d'"):
        matched("a", ["pooler.d", "x.q", "x.k"], ["m.x.q", "m.x.k"])


def test_ranks_and_alphas_that_differ_are_exceptions() -> None:
    modules = [
        Module("a.fc", numbers(2, 8), numbers(6, 2), 1.5),
        Module("b.fc", numbers(2, 8), numbers(6, 2), 1.5),
        Module("c", numbers(4, 8), numbers(6, 4), 0.5),
    ]
    config = json.loads(peft.folder_contents(PeftAdapter(modules))["adapter_config.json"])
    assert (config["r"], config["lora_alpha"]) == (2, 3.0)
    assert (config["rank_pattern"], config["alpha_pattern"]) == ({"^c": 4}, {"^c": 2.0})
    assert config["target_modules"] == ["a.fc", "b.fc", "c"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    arrays = {"lora_A": numbers(2, 8), "lora_B": numbers(6, 2)}
    files = peft.folder_contents(PeftAdapter([Module("w", arrays["lora_A"], arrays["lora_B"])]))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def tensors(folder: Path, **arrays: np.ndarray) -> None:
    safetensors.numpy.save_file(
        {f"base_model.model.{name.replace('__', '.')}": x for name, x in arrays.items()},
        folder / "adapter_model.safetensors",
    )


A, B = numbers(2, 8), numbers(6, 2)
# What is done to a folder, and what the error says.
WRONG: dict[str, tuple[Any, str]] = {
    "no config": (
        lambda f: (f / "adapter_config.json").unlink(),
        "adapter_config.json: expected a folder of peft",
    ),
    "no tensors": (
        lambda f: (f / "adapter_model.safetensors").unlink(),
        "expected the file of an adapter, found none",
    ),
    "pickled": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "adapter_model.bin, which may run code",
    ),
    "not JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "expected JSON"),
    "deep": (lambda f: (f / "adapter_config.json").write_text("[" * 10**6), "expected JSON"),
    "a list": (
        lambda f: (f / "adapter_config.json").write_text("[]"),
        "expected peft_type 'LORA', found None",
    ),
    "large": (
        lambda f: (f / "adapter_config.json").write_text(" " * 2**23),
        "expected a file of at most 4,194,304 bytes",
    ),
    "another kind": (lambda f: config(f, peft_type="IA3"), "found 'IA3'"),
    "an option": (lambda f: config(f, lora_bias=True), "expected no 'lora_bias'"),
    "a changed base": (lambda f: config(f, init_lora_weights="pissa"), "which changes the base"),
    "a changed base, after steps": (
        lambda f: config(f, init_lora_weights="pissa_niter_4"),
        "which changes the base",
    ),
    "an initialization": (
        lambda f: config(f, init_lora_weights=["pissa"]),
        "init_lora_weights: expected a word",
    ),
    "another rank": (lambda f: config(f, r=9), "module 'w': expected rank 9, that of the config, found 2"),
    "not finite": (
        lambda f: tensors(f, w__lora_A__weight=A, w__lora_B__weight=B * np.nan),
        "'w.lora_B': expected finite numbers",
    ),
    "alpha": (lambda f: config(f, lora_alpha="8"), "lora_alpha: expected a finite number, found '8'"),
    "alphas": (lambda f: config(f, alpha_pattern=[1]), "alpha_pattern: expected names and numbers"),
    "a slow pattern": (lambda f: config(f, alpha_pattern={"(a+)+$": 1}), "expected names of modules"),
    "an alpha of 401 digits": (
        lambda f: config(f, lora_alpha=10**400),
        "lora_alpha: expected a number of at most",
    ),
    "half of a character": (lambda f: config(f, revision="\ud800"), "revision: expected text"),
    "a pipe": (
        lambda f: ((f / "adapter_config.json").unlink(), os.mkfifo(f / "adapter_config.json")),
        "found a pipe",
    ),
    "a pipe of tensors": (
        lambda f: ((f / "adapter_model.safetensors").unlink(), os.mkfifo(f / "adapter_model.safetensors")),
        "found a device or a pipe",
    ),
    "not safetensors": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b"x" * 99),
        "safetensors form",
    ),
    "pickle as safetensors": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(pickle.dumps({"a": A})),
        "safetensors form",
    ),
    "empty": (lambda f: tensors(f), "expected tensors of an adapter, found none"),
    "a missing tensor": (lambda f: tensors(f, w__lora_A__weight=A), "expected lora_A, lora_B, found lora_A"),
    "no magnitude": (lambda f: config(f, use_dora=True), "lora_magnitude_vector, found"),
    "ranks": (
        lambda f: tensors(f, w__lora_A__weight=A, w__lora_B__weight=numbers(6, 3)),
        "expected matrices of one rank",
    ),
    "integers": (
        lambda f: tensors(f, w__lora_A__weight=A.astype(int), w__lora_B__weight=B),
        "expected matrices of one rank",
    ),
    "rank 0": (
        lambda f: tensors(f, w__lora_A__weight=A[:0], w__lora_B__weight=B[:, :0]),
        "expected matrices of one rank",
    ),
    "another shape": (
        lambda f: tensors(f, w__lora_A__weight=numbers(2, 9), w__lora_B__weight=B),
        r"module 'w': expected an adapter of the product by 'w'.*\[2, 9\]",
    ),
    "another module": (
        lambda f: tensors(f, v__lora_A__weight=A, v__lora_B__weight=B),
        "found 'v' that it lacks; it has 'w'",
    ),
    "another name": (lambda f: tensors(f, w__lora_E=A), "graphopt reads LoRA alone"),
    "a saved module": (
        lambda f: tensors(f, w__lora_A__weight=A, w__lora_B__weight=B, head__weight=A),
        "found 'head.weight' that it lacks",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_is_an_error_of_one_line(name: str, folder: Path) -> None:
    spoil, message = WRONG[name]
    proto = model(NETWORKS["MatMul"][0], **NETWORKS["MatMul"][1])
    trained(proto, passes.LoRA.load(folder), X, steps=0)
    spoil(folder)
    with pytest.raises(graphopt.GraphoptError, match=message) as error:
        trained(proto, passes.LoRA.load(folder), X, steps=0)
    assert "\n" not in str(error.value)


def test_no_path_in_a_config_is_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config(folder, base_model_name_or_path="/nonexistent", auto_mapping={"base_model_class": "os.system"})
    proto = model(NETWORKS["MatMul"][0], **NETWORKS["MatMul"][1])
    with strict(False):  # it lowers anew, through the cache
        trained(proto, passes.LoRA.load(folder), X, steps=0)  # which the cache keeps
        opened: list[str] = []
        real = Path.open
        monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened.append(str(self)) or real(self, *a, **k))
        trained(proto, passes.LoRA.load(folder), X, steps=0)
    of_machine = ("/proc/", "/sys/")
    assert not [path for path in opened if str(folder) not in path and not path.startswith(of_machine)]


@needs_files
def test_a_wrong_adapter_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    proto = model(NETWORKS["MatMul"][0], **NETWORKS["MatMul"][1])
    path = tmp_path / "a.onnx_adapter"
    graphopt.save_adapter(trained(proto, passes.LoRA("w", rank=2), X, steps=0), path)
    good = path.read_bytes()
    draw = random.Random(0)
    for i in range(200):
        content = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content[: draw.randrange(len(content))] if i % 3 == 0 else content)
        with contextlib.suppress(graphopt.GraphoptError):  # and no other error
            trained(proto, passes.LoRA.load(path), X, steps=0)
    other = model("g (float[N,8] x) => (float[N,6] y) { y = MatMul(x, v) }", v=numbers(8, 6))
    path.write_bytes(good)
    with pytest.raises(graphopt.GraphoptError, match=r"found 'w'.*the model has 'v'"):
        trained(other, passes.LoRA.load(path), X, steps=0)
    with pytest.raises(graphopt.GraphoptError, match="found none"):
        trained(proto, passes.LoRA.load(tmp_path / "none"), X, steps=0)


def test_mistakes_of_a_call(tmp_path: Path) -> None:
    text, weights, feeds = NETWORKS["MatMul"]
    proto = model(text, **weights)
    executor = trained(proto, passes.LoRA("w", rank=2), feeds, steps=0)
    mistakes = {
        "unknown form 'hf'": lambda: graphopt.save_adapter(executor, tmp_path / "a", form="hf"),  # type: ignore[arg-type]
        "expected an executor first": lambda: graphopt.save_adapter(proto, tmp_path / "a"),  # type: ignore[arg-type]
        "expected 'merged' or 'slots'": lambda: executor.trained(into=proto, adapters="slot"),  # type: ignore[arg-type]
        "name its file": lambda: executor.trained(adapters="slots"),
        "the name of a module, or of several, found an int": lambda: graphopt.save_adapter(
            executor,
            tmp_path / "a",
            form="peft",
            names={"*": 5},  # type: ignore[dict-item]
        ),
        "expected none for an adapter file": lambda: graphopt.save_adapter(executor, tmp_path / "a", names={"*": "*"}),
        "with the weight 'w'": lambda: executor.trained(
            into=model("g (float[N,8] x) => (float[N,6] y) { y = MatMul(x, v) }", v=weights["w"]),
            adapters="slots",
        ),
        "one with slots": lambda: executor.trained(
            into=executor.trained(into=proto, adapters="slots"), adapters="slots"
        ),
        "training graph with adapters": lambda: graphopt.save_adapter(
            graphopt.Executor(graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))),
            tmp_path / "a",
        ),
    }
    if hasattr(onnxruntime, "AdapterFormat"):
        mistakes["a file to write, found a folder"] = lambda: graphopt.save_adapter(executor, tmp_path)
    for message, call in mistakes.items():
        with pytest.raises(graphopt.GraphoptError, match=message):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", [pytest.param("slots", marks=needs_files), "packed"])
def test_a_file_with_adapters_takes_others(form: str) -> None:
    """Slots are inputs, and adapters of packed weights stay beside them, with names that new adapters must not take."""
    proto = model(NETWORKS["MatMul"][0], w=numbers(16, 16))
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 16
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 16
    feeds = {"x": numbers(3, 16)}
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.05), "adapter": passes.LoRA("w", 2)}
    quantize = passes.QuantizeWeights(block=16) if form == "packed" else None
    executor = graphopt.Executor(graphopt.compile(proto, quantize=quantize, **steps))
    executor.step({**feeds, "target": np.zeros((3, 16), np.float32)})
    adapted = executor.trained() if form == "packed" else executor.trained(into=proto, adapters="slots")
    before = adapted.SerializeToString()
    again = graphopt.Executor(graphopt.compile(adapted, **steps))
    assert adapted.SerializeToString() == before
    expected = graphopt.run(adapted, feeds)["y"]
    np.testing.assert_allclose(again.predict(feeds)["y"], expected, rtol=1e-6, atol=1e-6)
    assert again.step({**feeds, "target": np.zeros((3, 16), np.float32)})["loss"] > 0
    merged = again.trained(into=adapted) if form == "slots" else again.trained()
    np.testing.assert_allclose(graphopt.run(merged, feeds)["y"], again.predict(feeds)["y"], rtol=1e-5, atol=1e-5)


def test_notes_survive_saving(tmp_path: Path) -> None:
    text, weights, feeds = NETWORKS["MatMul"]
    executor = trained(model(text, **weights), passes.LoRA("w", rank=2), feeds)
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    step = graphopt.compile(
        model(text, **weights),
        adapter=passes.LoRA("w", rank=2),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.05),
    )
    graphopt.save(step, tmp_path / "step.onnx")
    again = graphopt.Executor(tmp_path / "step.onnx")
    again.state = executor.state
    graphopt.save_adapter(again, tmp_path / "b", form="peft")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert Adapted.is_on(next(x for x in again.model.graph.inputs if x.name == "w.lora_A"))


def test_a_checkpoint_has_adapters_alone_and_knows_their_base(tmp_path: Path) -> None:
    def compiled(seed: int) -> ir.Model:
        network = models.mlp((4,), 3, hidden=[64, 64], seed=seed)
        return graphopt.compile(
            network, adapter=passes.LoRA(rank=1), loss=passes.CrossEntropy(), optimizer=passes.AdamW(0.01)
        )

    data = {"x": numbers(12, 4), "target": np.arange(12) % 3}
    executor = graphopt.Executor(compiled(0))
    executor.step(data)
    path = tmp_path / "a.safetensors"
    executor.save(path)
    assert path.stat().st_size < 8_000 < 64 * 64 * 4
    graphopt.Executor(compiled(0)).load(path)
    other = graphopt.Executor(compiled(1))
    before = other.state
    with pytest.raises(graphopt.GraphoptError, match="expected adapters of this model"):
        other.load(path)
    assert_equal(other.state, before)
    graphopt.fit(executor, data, epochs=1, batch_size=4, checkpoint=tmp_path / "run", verbose=False)
    (state,) = (tmp_path / "run").glob("step-*/state.safetensors")
    assert state.stat().st_size < 8_000
    with pytest.raises(graphopt.GraphoptError, match="that of another training graph"):
        graphopt.fit(other, data, epochs=2, batch_size=4, checkpoint=tmp_path / "run", resume=True, verbose=False)


@needs_files
@pytest.mark.slow
def test_the_command_trains_continues_and_evaluates_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str) -> str:
        assert cli.main([*arguments]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    graphopt.save(models.mlp((1, 8, 8), 10, hidden=[32]), tmp_path / "base.onnx")
    common = ["base.onnx", "data=digits", "fit.epochs=1"]
    said = command(*common, "adapter=lora", "adapter.rank=2", "folder=first")
    assert "adapter.onnx_adapter" in said
    command("run=evaluate", "folder=first")
    measured = json.loads((tmp_path / "first" / "metrics.json").read_text())
    epoch = json.loads((tmp_path / "first" / "metrics.jsonl").read_text().splitlines()[-1])
    assert measured["accuracy"] == pytest.approx(epoch["accuracy"], abs=1e-6)
    merged = graphopt.load(tmp_path / "first" / "trained.onnx")
    assert not [name for name in merged.graph.initializers if "lora" in name]
    command(*common, "adapter=loaded", "adapter.path=first/adapter.onnx_adapter", "folder=second")
    shutil.rmtree(tmp_path / "first")


def test_patterns_of_modules_match_as_regular_expressions_do() -> None:
    draws = np.random.default_rng(0)
    tokens = [".*", ".", r"\.", r"\d+", "a", "b", "1", "a.b", "-"]
    for _ in range(5000):
        pattern = "".join(draws.choice(tokens, draws.integers(1, 6)))
        pattern = f"^{pattern}" if draws.random() < 0.3 else pattern
        name = "".join(draws.choice([*"ab1.-", "12"], draws.integers(0, 8)))
        assert peft._ends_with(pattern, name) == bool(re.match(rf"(.*\.)?({pattern})$", name)), (
            pattern,
            name,
        )


def test_a_pattern_of_many_wildcards_ends() -> None:
    """Regular expressions would take longer than the age of the universe."""
    assert not peft._ends_with(20 * ".*a" + "x", 2000 * "a")
    assert peft._ends_with(r".*\d+.*\d+.*\d+", 2000 * "1")


def test_a_module_that_no_output_needs_is_left_out(tmp_path: Path) -> None:
    text, weights, feeds = NETWORKS["MatMul"]
    executor = trained(model(text, **weights), passes.LoRA(rank=2), feeds)
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    pooler = {f"base_model.model.pooler.dense.lora_{x}.weight": numbers(2, 2) for x in "AB"}
    safetensors.numpy.save_file({**pooler, **tensors}, path)
    with pytest.raises(graphopt.GraphoptError, match=r"leave_out='pooler.dense'"):
        trained(model(text, **weights), passes.LoRA.load(tmp_path / "a"), feeds, steps=0)
    again = trained(model(text, **weights), passes.LoRA.load(tmp_path / "a", leave_out="pooler.*"), feeds, steps=0)
    np.testing.assert_allclose(again.predict(feeds)["y"], executor.predict(feeds)["y"], rtol=1e-5, atol=1e-6)


BUILT = """g (float[N,8] x) => (float[N,22] y) {
    h = MatMul(x, "model.layers.0.attn.qkv_proj.MatMul.weight")
    q, k, v = Split<axis=1>(h, s)
    gate = MatMul(x, "model.layers.0.mlp.gate_proj.MatMul.weight")
    up = MatMul(x, "model.layers.0.mlp.up_proj.MatMul.weight")
    z = Mul(gate, up)
    y = Concat<axis=1>(v, k, q, z)
}"""
BUILT_WEIGHTS = {
    f"model.layers.0.{name}_proj.MatMul.weight": size
    for name, size in (("attn.qkv", 16), ("mlp.gate", 6), ("mlp.up", 6))
}


def built(folder: Path, kind: str) -> Path:
    """Write a file with names of onnxruntime-genai's builder, of two heads of keys, each read by two of queries."""
    proto = model(
        BUILT,
        s=np.array([8, 4, 4]),
        **{name: numbers(8, size) for name, size in BUILT_WEIGHTS.items()},
    )
    onnx.save(proto, folder / "model.onnx")
    config = {"model": {"type": kind, "decoder": {"num_key_value_heads": 2}}}
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder / "model.onnx"


def by_heads(w: np.ndarray) -> np.ndarray:
    """Return the rows of queries, keys and values of InternLM2's wqkv in turn, as the builder takes them apart."""
    groups = w.reshape(2, 2 + 2, 2, -1)
    return np.concatenate([groups[:, i].reshape(-1, w.shape[1]) for i in (slice(0, 2), -2, -1)])


# The modules of a type, and the weights of the file that their rows are.
OF_TYPES = {
    "llama": {f"self_attn.{x}_proj": (f"qkv {i}",) for i, x in enumerate("qkv")},
    "phi3": {"self_attn.qkv_proj": ("qkv",), "mlp.gate_up_proj": ("gate", "up")},
    "internlm2": {"attention.wqkv": ("qkv",), "feed_forward.w1": ("gate",), "feed_forward.w3": ("up",)},
    "granitemoehybrid": {"shared_mlp.input_linear": ("gate", "up")},
}


@needs_files
@pytest.mark.parametrize("kind", OF_TYPES)
@pytest.mark.parametrize("parts", [None, {"q": 8, "k": 4, "v": 4}], ids=["whole", "parts"])
def test_modules_of_a_builder_s_file_have_the_rows_of_its_weights(kind: str, parts: Any, tmp_path: Path) -> None:
    path = built(tmp_path, kind)
    adapters = [passes.LoRA("*qkv*", rank=2, parts=parts), passes.LoRA("*mlp*", rank=2)]
    executor = graphopt.Executor(
        graphopt.compile(path, adapter=adapters, loss=passes.MeanSquaredError(), optimizer=passes.AdamW(0.05))
    )
    for _ in range(3):
        executor.step(x=X["x"], target=np.ones((len(X["x"]), 22), np.float32))
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    tensors = safetensors.numpy.load_file(tmp_path / "a" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    weights = {x.name: onnx.numpy_helper.to_array(x) for x in onnx.load(path).graph.initializer}
    merged = executor.trained(into=path).graph.initializer
    change = {
        x.name.split(".")[4].removesuffix("_proj"): (onnx.numpy_helper.to_array(x) - weights[x.name]).T
        for x in merged
        if "MatMul" in x.name
    }
    change |= {f"qkv {i}": x for i, x in enumerate(np.split(change["qkv"], [8, 12]))}
    for module, names in OF_TYPES[kind].items():
        a, b = (tensors[f"base_model.model.model.layers.0.{module}.lora_{x}.weight"] for x in "AB")
        alpha = config["alpha_pattern"].get(f"^model.layers.0.{module}", config["lora_alpha"])
        found = b @ a * (alpha / len(a))
        found = by_heads(found) if module == "attention.wqkv" else found
        np.testing.assert_allclose(found, np.concatenate([change[x] for x in names]), atol=1e-4)
    again = graphopt.Executor(
        graphopt.compile(
            path,
            adapter=passes.LoRA.load(tmp_path / "a"),
            loss=passes.MeanSquaredError(),
            optimizer=passes.AdamW(0.05),
        )
    )
    feeds = {"x": X["x"]}
    expected = executor.predict(feeds)["y"]
    np.testing.assert_allclose(again.predict(feeds)["y"], expected, rtol=1e-4, atol=1e-4)
    assert {x.shape for name, x in again.parameters.items() if ".mlp." in name} == {(8, 2), (2, 6)}


def test_config_json_tells_the_type_of_a_builder_s_file(tmp_path: Path) -> None:
    path = built(tmp_path, "llama")
    (tmp_path / "genai_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", "num_key_value_heads": 2}))
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    executor = graphopt.Executor(graphopt.compile(path, adapter=passes.LoRA("*mlp*", rank=2), **steps))
    graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.0.mlp.gate_up_proj"]


def test_an_unknown_type_of_model_is_refused(tmp_path: Path) -> None:
    path = built(tmp_path, "new")
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    executor = graphopt.Executor(graphopt.compile(path, adapter=passes.LoRA("*mlp*", rank=2), **steps))
    with pytest.raises(graphopt.GraphoptError, match="found 'new': give names='llama'"):
        graphopt.save_adapter(executor, tmp_path / "a", form="peft")
    graphopt.save_adapter(executor, tmp_path / "a", form="peft", names="llama")
    with pytest.raises(graphopt.GraphoptError, match="found 'new': give names='llama'"):
        graphopt.compile(path, adapter=passes.LoRA.load(tmp_path / "a"), **steps)
    with pytest.raises(graphopt.GraphoptError, match=r"expected a type of model, 'chatglm'.*found 'lama'"):
        graphopt.save_adapter(executor, tmp_path / "b", form="peft", names="lama")


def test_modules_that_peft_takes_for_parts_of_experts_are_told() -> None:
    """In DeepSeek-V3 of transformers 5, peft looks for their adapters in the fused experts."""
    array = np.ones((2, 2), np.float32)
    path = "layers.1.mlp.{}_proj"
    experts = Module(path.format("experts.down"), array, array, experts=1)
    with pytest.warns(UserWarning, match=r"takes 'layers.1.mlp.shared.gate_proj' for a part of the experts"):
        peft.folder_contents(PeftAdapter([experts, Module(path.format("shared.gate"), array, array)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peft.folder_contents(PeftAdapter([experts, Module("layers.1.self_attn.q_proj", array, array)]))
