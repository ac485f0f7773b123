"""Write and read folders of the library peft: adapter_config.json and adapter_model.safetensors.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint, and peft 0.21 itself. peft loads a folder with
wrong names without an error and then computes the base model, so everything is checked here.
"""

from __future__ import annotations

import collections
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors
import safetensors.numpy

from graphopt.adapters.stacked import wrapped_parameters, wrappers
from graphopt.errors import GraphoptError, kind_of, line
from graphopt.files import check_file, json_of, read_file

_N = TypeVar("_N", int, float)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MOST_CONFIG_BYTES = 2**22  # bytes
_PATTERN = re.compile(r"\^?(?:[\w-]|\.\*?|\\\.|\\d\+)+", re.ASCII)
_BASE = "base_layer."
_OUT = ".base_layer.out_proj"  # of a MultiheadAttention, whose change peft adds twice
# What a tensor of a module is, by the end of its name.
_A, _B, _MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
_ROWS, _WIDTH = ".lora_embedding_A", ".lora_embedding_B"
_PARTS = re.compile(r"(?P<path>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?")
# That peft 0.21 takes for parts of fused experts (`peft.utils.transformers_weight_conversion`)
_PARTS_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
# Fields of a config that do not change what its adapter computes.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules", "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora", "alpha_pattern", "rank_pattern",
    "lora_alpha", "r", "ephemeral_gpu_offload", "ensure_weight_tying", "target_parameters",
}  # fmt: skip
# Initializations that change the base model, some of them with a number of iterations after the name.
_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")


@dataclass(frozen=True)
class Module:
    """Hold the adapter of one module as peft has it: the change of its weight is `scale * b @ a`.

    Args:
        path: the module, such as `model.layers.0.self_attn.q_proj`.
        a: `[r, in]`, of a convolution `[r, in, *kernel]`, of an embedding `[r, rows]`.
        b: `[out, r]`, of a convolution `[out, r / groups, 1, ...]`, of an embedding `[width, r]`.
        scale: alpha / r, or alpha / sqrt(r) if `rank_stabilized`.
        magnitude: the norms of DoRA, `[out]`.
        is_embedding: whether the module is an embedding.
        keeps_inputs_first: whether the base keeps its weight as `[in, out]`, as GPT-2's Conv1D does.
        experts: the number of stacked weights, if the path is that of a parameter; see `graphopt.adapters.stacked`.
    """

    path: str
    a: np.ndarray
    b: np.ndarray
    scale: float = 1.0
    magnitude: np.ndarray | None = None
    is_embedding: bool = False
    keeps_inputs_first: bool = False
    rank_stabilized: bool = False
    experts: int = 0

    @property
    def rank(self) -> int:
        return len(self.a) // (self.experts or 1)

    @property
    def alpha(self) -> float:
        """Return the numerator of the scale."""
        return self.scale * (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclass(frozen=True)
class PeftAdapter:
    """Hold what a folder has: the adapters of modules, and the parameters of modules that trained in full.

    `base` is the name of the base, and `task` the task of peft; they are empty if they are unknown.
    """

    modules: Sequence[Module]
    saved: Mapping[str, np.ndarray] = field(default_factory=dict)
    base: str = ""
    task: str = ""


def folder_contents(adapter: PeftAdapter) -> dict[str, bytes]:
    """Return the files of a folder by name.

    Raises:
        GraphoptError: the modules have something of which a folder holds one for all.
    """
    modules = list(adapter.modules)
    with_magnitude = {module.magnitude is not None for module in modules}
    if len(with_magnitude) > 1:
        plain = next(module.path for module in modules if module.magnitude is None)
        raise GraphoptError(
            f"{CONFIG}: expected DoRA in all modules or in none, found {plain!r} without: save "
            "the adapters of each kind to a folder of its own"
        )
    stabilized = bool(modules) and all(module.rank_stabilized for module in modules)
    modules = [replace(module, rank_stabilized=stabilized) for module in modules]
    names = wrappers([module.path for module in modules if module.experts])
    alike = [x.path for x in modules if not x.experts and x.path.rpartition(".")[2] in _PARTS_OF_EXPERTS]
    if alike and (names or any("shared_expert" in path for path in alike)):
        warnings.warn(
            f"{CONFIG}: peft 0.21 takes {alike[-1]!r} for a part of the experts in models that it converts, such as "
            "deepseek_v3, and then refuses the folder or leaves the module out: compare its outputs, or leave such "
            "modules out by leave_out= of LoRA",
            stacklevel=2,
        )
    named = [replace(module, path=names.get(module.path, module.path)) for module in modules]
    arrays = {f"{_PREFIX}{name}": x for module in named for name, x in _tensors(module)}
    if len(arrays) < sum(3 if module.magnitude is not None else 2 for module in modules):
        twice, _ = collections.Counter(module.path for module in modules).most_common(1)[0]
        raise GraphoptError(f"{CONFIG}: expected one adapter of a module, found several of {twice!r}: give names=")
    arrays |= {f"{_PREFIX}{_saved(name, modules)}": x for name, x in adapter.saved.items()}
    config = _config(modules, adapter.saved, dora=True in with_magnitude, stabilized=stabilized)
    config |= {"task_type": adapter.task or None, "base_model_name_or_path": adapter.base or None}
    contiguous = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    return {
        CONFIG: json.dumps(config, indent=2).encode(),
        WEIGHTS: safetensors.numpy.save(contiguous, metadata={"format": "pt"}),
    }


def _tensors(module: Module) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a module with their names."""
    yield module.path + (_ROWS if module.is_embedding else _A), module.a
    yield module.path + (_WIDTH if module.is_embedding else _B), module.b
    if module.magnitude is not None:
        dims = [1, -1] + [1] * (module.a.ndim - 2) if module.a.ndim > 2 else [-1]
        yield module.path + _MAGNITUDE, module.magnitude.reshape(dims)


def _saved(name: str, modules: Sequence[Module]) -> str:
    """Return the name in a folder of a parameter that trained in full; beside an adapter, it is its base's."""
    path, _, own = name.rpartition(".")
    return f"{path}.{_BASE}{own}" if path in {module.path for module in modules} else name


def _config(
    modules: Sequence[Module], saved: Mapping[str, np.ndarray], *, dora: bool, stabilized: bool
) -> dict[str, object]:
    """Return the config: the most frequent rank and alpha, and the exceptions by module."""
    ranks = {module.path: module.rank for module in modules}
    alphas = {module.path: float(f"{module.alpha:.7g}") for module in modules}
    rank, alpha = _most_common(ranks), _most_common(alphas)
    others = {name.rpartition(".")[0] for name in saved} - ranks.keys()
    return {
        "peft_type": "LORA",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{path}": r for path, r in ranks.items() if r != rank},
        "alpha_pattern": {f"^{path}": x for path, x in alphas.items() if x != alpha},
        "target_modules": sorted(module.path for module in modules if not module.experts),
        "target_parameters": sorted(module.path for module in modules if module.experts) or None,
        "modules_to_save": sorted(others) or None,
        "use_rslora": stabilized,
        "use_dora": dora,
        "fan_in_fan_out": any(module.keeps_inputs_first for module in modules),
        "lora_dropout": 0.0,
        "bias": "none" if all(name.rpartition(".")[0] in others for name in saved) else "lora_only",
        "init_lora_weights": True,
    }


def _most_common(numbers: Mapping[str, _N]) -> _N:
    return collections.Counter(numbers.values()).most_common(1)[0][0]


def read_folder(folder: str | os.PathLike[str], parameters: Sequence[str] = ()) -> PeftAdapter:
    """Return what a folder has; its config and its tensors are checked, and it names no other file.

    Args:
        parameters: the stacked weights of the model, in the order that their modules have.

    Raises:
        GraphoptError: a file is missing, is malformed or too large, or the adapter is of another kind than LoRA.
    """
    config = _read_config(Path(folder) / CONFIG)
    path = Path(folder) / WEIGHTS
    parts: dict[str, dict[str, np.ndarray]] = {}
    saved: dict[str, np.ndarray] = {}
    for key, array in _read_tensors(path).items():
        name = key.removeprefix(_PREFIX)
        match = _PARTS.fullmatch(name)
        if match:
            parts.setdefault(match["path"], {})[match["part"]] = array
        elif name == key or ".lora_" in name:
            raise GraphoptError(
                f"{path}: expected tensors named like {_PREFIX}MODULE{_A}, found {key!r}: graphopt reads LoRA alone"
            )
        else:
            saved[name.replace(f".{_BASE}", ".")] = array
    if not parts and not saved:
        raise GraphoptError(f"{path}: expected tensors of an adapter, found none")
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(x, str) for x in targets):
        raise GraphoptError(f"{path}: target_parameters: expected names of parameters, found {targets!r}")
    stacked = wrapped_parameters(str(path), [*parts], targets, parameters)
    modules = [
        _module(path, stacked.get(name, name), found, config, is_stacked=name in stacked)
        for name, found in parts.items()
    ]
    for module in modules:
        if module.path.endswith(_OUT) and module.b.any():
            raise GraphoptError(
                f"{path}: module {module.path.removesuffix(_OUT)!r}: expected no change of the last product of a "
                "MultiheadAttention, which peft adds twice, found one: merge it in peft, and export the model anew"
            )
    own = [module for module in modules if not module.path.endswith(_OUT)]
    base, task = (x if isinstance(x, str) else "" for x in map(config.get, ("base_model_name_or_path", "task_type")))
    return PeftAdapter(own, saved, base, task)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json_of(read_file(path.resolve(), _MOST_CONFIG_BYTES), str(path))
    except OSError as error:
        raise GraphoptError(f"{path}: expected a folder of peft with this file: {error.strerror}") from error
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise GraphoptError(f"{path}: expected peft_type 'LORA', found {kind!r}: graphopt reads LoRA and DoRA alone")
    for name, value in config.items():
        if value and name not in _HARMLESS:
            raise GraphoptError(f"{path}: expected no {name!r}, which graphopt does not know, found {value!r}")
    initialization = config.get("init_lora_weights", True)
    if not isinstance(initialization, bool | str | None):
        raise GraphoptError(
            f"{path}: init_lora_weights: expected a word, true or false, found {kind_of(initialization)}"
        )
    if isinstance(initialization, str) and initialization.startswith(_CHANGED):
        raise GraphoptError(
            f"{path}: expected an adapter of the base model, found init_lora_weights="
            f"{initialization!r}, which changes the base: convert it with peft's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)"
        )
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            raise GraphoptError(f"{path}: {name}: expected names and numbers, found {kind_of(config[name])}")
    for name, value in [
        ("lora_alpha", config.get("lora_alpha", 8)),
        *(config.get("alpha_pattern") or {}).items(),
    ]:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise GraphoptError(f"{path}: {name}: expected a finite number, found {value!r}")
    return {**config, "file": path}


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file by name."""
    check_file(path)
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is not a mapping
    except FileNotFoundError as error:
        pickled = path.with_suffix(".bin").exists()
        found = f"{path.with_suffix('.bin').name}, which may run code: save it anew with peft" if pickled else "none"
        raise GraphoptError(f"{path}: expected the file of an adapter, found {found}") from error
    except (OSError, AttributeError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise GraphoptError(f"{path}: expected tensors in safetensors form: {line(error)}") from error


def _module(
    path: Path,
    name: str,
    found: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    *,
    is_stacked: bool = False,
) -> Module:
    """Return the adapter of a module, or of a parameter with stacked weights, from its tensors."""
    is_embedding = "embedding_A" in found
    names = ("embedding_A", "embedding_B") if is_embedding else ("A", "B")
    expected = {*names, *(("magnitude_vector",) if config.get("use_dora") else ())}
    if found.keys() != expected:
        raise GraphoptError(
            f"{path}: module {name!r}: expected lora_{', lora_'.join(sorted(expected))}, found lora_"
            f"{', lora_'.join(sorted(found))}"
        )
    a, b = (found[part] for part in names)
    magnitude = found.get("magnitude_vector")
    if (
        a.ndim < 2
        or a.ndim != b.ndim
        or 0 in (*a.shape, *b.shape)
        or len(a) % b.shape[1]
        or any(size != 1 for size in b.shape[2:])
        or (is_embedding and a.ndim != 2)
        or (magnitude is not None and magnitude.size != len(b))
        or any(x.dtype.kind not in "fV" for x in found.values())
    ):
        shapes = ", ".join(f"lora_{part} {x.dtype}{list(x.shape)}" for part, x in found.items())
        raise GraphoptError(f"{path}: module {name!r}: expected matrices of one rank, found {shapes}")
    rank: Any = len(a)
    if is_stacked:
        rank = _of_module(config, "rank_pattern", name, config.get("r", 8))
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1 or len(a) % rank or len(a) != b.shape[1]:
            raise GraphoptError(
                f"{path}: parameter {name!r}: expected A and B of {rank!r} numbers for each of its stacked weights, "
                f"found {list(a.shape)} and {list(b.shape)}"
            )
    elif not config.get("rank_pattern") and config.get("r", len(a)) != len(a):
        raise GraphoptError(
            f"{path}: module {name!r}: expected rank {config['r']!r}, that of the config, found {len(a)}: take both "
            "files from one folder"
        )
    alpha = float(_of_module(config, "alpha_pattern", name, config.get("lora_alpha", 8)))
    stabilized = config.get("use_rslora") is True
    scale = alpha / (math.sqrt(rank) if stabilized else rank)
    flat, experts = None if magnitude is None else magnitude.reshape(-1), len(a) // rank if is_stacked else 0
    return Module(name, a, b, scale, flat, is_embedding, rank_stabilized=stabilized, experts=experts)


def _of_module(config: Mapping[str, Any], field: str, name: str, default: float) -> float:
    """Return the exception of a module, or the default: the first pattern that matches the end of its name."""
    for pattern, number in (config.get(field) or {}).items():
        if not _PATTERN.fullmatch(pattern):
            raise GraphoptError(f"{config['file']}: {field}: expected names of modules, found {pattern!r}")
        if _ends_with(pattern, name):
            return number
    return default


def _ends_with(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the end of a name after a dot, or all of it, in linear time."""
    places = {0} | (set() if pattern.startswith("^") else {i + 1 for i, c in enumerate(name) if c == "."})
    for token in re.findall(r"\.\*|\\d\+|\\\.|[^^]", pattern):
        if not places:
            return False
        if token == ".*":
            places = {*range(min(places), len(name) + 1)}
        elif token == r"\d+":
            ends: set[int] = set()
            for i, c in enumerate(name):
                if c.isdecimal() and (i in places or i in ends):
                    ends.add(i + 1)
            places = ends
        else:
            c = token[-1]
            places = {i + 1 for i in places if i < len(name) and (token == "." or name[i] == c)}
    return len(name) in places
