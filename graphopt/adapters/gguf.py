"""Write adapters in the format of llama.cpp: a file of GGUF with the A and B of each tensor.

Source: `convert_lora_to_gguf.py` and the classes of `conversion/` in llama.cpp, with which tests/peers compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.adapters.peft import Module, PeftAdapter
from graphopt.errors import GraphoptError, some
from graphopt.files import replacing
from graphopt.graph.model_folders import CONFIG, GENAI_CONFIG, config_in, place_of

_MOST_BLOCKS = 1000
# Architectures of llama.cpp by the model's type in transformers.
_ARCHITECTURES = {
    "ernie4_5": "ernie4_5",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "llama": "llama",
    "mistral": "llama",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "phi": "phi2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}
# Architectures in which llama.cpp rotates neighbours, where transformers rotates halves.
_NEIGHBOURS = ("granite", "llama", "olmo", "smollm3")
_EMBEDDING = "token_embd"


@dataclass(frozen=True)
class DecoderConfig:
    """Hold what the config of a program that serves a language model says.

    Args:
        file: the config.
        kind: the type of the model in transformers.
        layers, heads, key_heads: the numbers of layers, of heads of queries, and of keys.
        is_tied: whether the head is the embedding.
    """

    file: Path
    kind: object
    layers: int
    heads: int
    key_heads: int
    is_tied: bool


def config_beside(model: Path) -> DecoderConfig:
    """Return what the config beside a model's file says.

    Raises:
        GraphoptError: no config lies there, or it lacks a field or has a wrong one.
    """
    place = place_of(model)
    path = next((place / name for name in (CONFIG, GENAI_CONFIG) if (place / name).is_file()), None)
    if path is None:
        raise GraphoptError(
            f"{model}: expected {CONFIG} of transformers or {GENAI_CONFIG} beside it, which tells the type of the "
            "model, found neither"
        )
    found = config_in(path)
    kind = found.get("model_type")
    if path.name == GENAI_CONFIG:
        own = found.get("model")
        decoder = own.get("decoder") if isinstance(own, dict) else None
        kind = own.get("type") if isinstance(own, dict) else None
        found = decoder if isinstance(decoder, dict) else {}

    def number(name: str, default: object = None) -> int:
        value = found.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST_BLOCKS:
            raise GraphoptError(f"{path}: {name}: expected a number from 1 to {_MOST_BLOCKS:,}, found {value!r}")
        return value

    layers, heads = number("num_hidden_layers"), number("num_attention_heads")
    key_heads = number("num_key_value_heads", heads)
    is_tied = found.get("tie_word_embeddings") is True
    return DecoderConfig(path, kind, layers, heads, key_heads, is_tied)


def write_gguf(adapter: PeftAdapter, path: Path, config: DecoderConfig) -> None:
    """Write an adapter to a file of GGUF atomically.

    A file has one alpha for all tensors: where the modules have several, B takes the rest of the scale.

    Args:
        adapter: the adapters by the modules of transformers.
        config: what `config_beside` returns.

    Raises:
        GraphoptError: llama.cpp does not know the type of the model or a module, or the format lacks something. Nothing
            is written.
    """
    gguf = _package(path)
    name = _ARCHITECTURES.get(config.kind) if isinstance(config.kind, str) else None
    if name is None:
        raise GraphoptError(
            f"{config.file}: expected a type of model whose names in llama.cpp are known "
            f"({', '.join(_ARCHITECTURES)}), found {config.kind!r}: export form=peft, and convert it by llama.cpp's "
            "convert_lora_to_gguf.py"
        )
    if adapter.saved or not adapter.modules:
        found = f"{some(list(adapter.saved), 3)}, which trained in full" if adapter.saved else "none"
        raise GraphoptError(f"{path}: expected adapters of low rank, found {found}: export form=merged")
    architecture = next(x for x, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(architecture, config.layers)
    tensors = {_name_in(names, module, config): module for module in adapter.modules}
    # llama.cpp multiplies by alpha / rank, also where PEFT divides by the root of the rank.
    alphas = [module.scale * module.rank for module in adapter.modules]
    alpha = next((x for x in alphas if x), 1.0)
    with replacing(path) as temporary:
        writer = gguf.GGUFWriter(temporary, name)
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        for tensor, module in tensors.items():
            b = module.b * np.asarray(module.scale * module.rank / alpha, module.b.dtype)
            if name in _NEIGHBOURS and module.path.endswith(("q_proj", "k_proj")):
                b = _interleaved(b, config.heads if module.path.endswith("q_proj") else config.key_heads)
            a = module.a.T if tensor.startswith(_EMBEDDING) else module.a
            writer.add_tensor(f"{tensor}.lora_a", np.ascontiguousarray(a, np.float32))
            writer.add_tensor(f"{tensor}.lora_b", np.ascontiguousarray(b, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _package(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise GraphoptError(
            f"{path}: expected the package gguf, which writes such files, found none: pip install gguf"
        ) from error
    return gguf


def _name_in(names: Any, module: Module, config: DecoderConfig) -> str:
    """Return the tensor of llama.cpp that a module changes."""
    found = names.get_name(module.path)
    is_tied = config.is_tied and module.path == "lm_head"
    if found is None or module.magnitude is not None or module.a.ndim != 2 or is_tied:
        what = "DoRA" if module.magnitude is not None else "a convolution" if module.a.ndim != 2 else ""
        what = what or ("the tied head" if is_tied else "no tensor of that name")
        raise GraphoptError(
            f"{module.path}: expected a product that llama.cpp adapts in a model of type {config.kind}, found "
            f"{what}: leave it out by adapter.leave_out, or export form=merged or form=peft"
        )
    return f"{found}.weight"


def _interleaved(b: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of B in the order in which llama.cpp rotates neighbours: those of two halves take turns."""
    outputs, rank = b.shape
    if outputs % (2 * heads):
        raise GraphoptError(f"expected outputs of {heads} heads with two halves each, found {outputs}")
    return b.reshape(heads, 2, -1, rank).swapaxes(1, 2).reshape(outputs, rank)
