"""Name the modules of a network in PyTorch that the weights of a file belong to, and find them again."""

from __future__ import annotations

import collections
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphopt.adapters.targets import outputs_of, widths
from graphopt.errors import GraphoptError, kind_of, some
from graphopt.graph.model_folders import Architecture

Names = str | Mapping[str, str | Sequence[str] | Mapping[str, int]] | None
_Part = tuple[str, int | None]  # the path of a module, and the number of its outputs

# What names of weights end in, after the module
_OWN = re.compile(r"\.q?weight((_DQ)?_Q\d|_quant|_quantized)?$")
# In names of the products of files of onnxruntime-genai's builder
OF_BUILDER = re.compile(r"\.MatMul\.q?weight")

_QKV = ("*.self_attn.q_proj", "*.self_attn.k_proj", "*.self_attn.v_proj")
_O = ("*.self_attn.o_proj",)
_GATE, _UP, _DOWN = ("*.mlp.gate_proj",), ("*.mlp.up_proj",), ("*.mlp.down_proj",)
# Llama's modules in transformers by the names in files of the builder.
_FILES: dict[str, str | Sequence[str]] = {
    "*.attn.qkv_proj": _QKV,
    "*.mlp.gate_up_proj": _GATE + _UP,
    "*.attn.*_norm.layernorm": "*.self_attn.*_norm",
    "*.layers.*.final_norm_layernorm": "*.norm",
    "*.attn.*_proj": "*.self_attn.*_proj",
    **{name: name for name in ("*_layernorm", "*.mlp.*", "*.embed_tokens", "*.conv.*", "*.linear_attn.*", "lm_head")},
}
# Where modules of transformers differ from Llama's: each with the modules of Llama whose rows it has, in their order.
_Modules = Mapping[str, tuple[str, ...]]
_LLAMA: _Modules = {}
_PHI3: _Modules = {"*.self_attn.qkv_proj": _QKV, "*.mlp.gate_up_proj": _GATE + _UP}
_LFM2: _Modules = {
    "*.feed_forward.experts.*": ("*.mlp.experts.*",),
    "*.self_attn.out_proj": _O,
    **{"*.feed_forward.w1": _GATE, "*.feed_forward.w3": _UP, "*.feed_forward.w2": _DOWN},
    **{f"*.self_attn.{x}_layernorm": (f"*.self_attn.{x}_norm",) for x in "qk"},
    **{f"*.{x}_norm": (f"*.{x}_layernorm",) for x in ("operator", "ffn")},
    "*.embedding_norm": ("*.norm",),
}
_QWEN35: _Modules = {f"*.linear_attn.in_proj_{x}": (f"*.linear_attn.{x}_proj",) for x in ("qkv", "z", "b", "a")}
_HUNYUAN: _Modules = {f"*.self_attn.{x}_layernorm": (f"*.self_attn.{x[0]}_norm",) for x in ("query", "key")}
_BLOCKS = "transformer.encoder.layers.*"
# By the types of models of onnxruntime-genai 0.18's builder, in genai_config.json. Those of experts lack the experts.
_TYPES: dict[str, _Modules] = {
    **dict.fromkeys(("ernie4_5", "gemma", "gemma2", "gemma3_text", "gptoss", "granite", "llama", "mistral"), _LLAMA),
    **dict.fromkeys(("gpt_oss", "nemotron", "phimoe", "qwen2", "qwen3", "smollm3"), _LLAMA),
    **dict.fromkeys(("gemma3", "gemma3_vl_text", "mistral3", "mistral3_text"), _LLAMA),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text", "qwen3vl", "qwen3_vl_text"), _LLAMA),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _QWEN35),
    **dict.fromkeys(("phi3", "phi3v"), _PHI3),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl", "lfm2_vl_text"), _LFM2),
    "phi": {"*.self_attn.dense": _O, "*.final_layernorm": ("*.norm",)},
    "phi3small": {"*.self_attn.query_key_value": _QKV, "*.self_attn.dense": _O, "*.final_layernorm": ("*.norm",)},
    "granitemoehybrid": {"*.shared_mlp.input_linear": _GATE + _UP, "*.shared_mlp.output_linear": _DOWN},
    **dict.fromkeys(("hunyuandensev1", "hunyuan_v1_dense"), _HUNYUAN),
    "olmo": {"": ("*norm",)},  # its norms have no weights
    "internlm2": {
        **{"*.attention.wqkv": _QKV, "*.attention.wo": _O},
        **{"*.feed_forward.w1": _GATE, "*.feed_forward.w3": _UP, "*.feed_forward.w2": _DOWN},
        **{"*.attention_norm": ("*.input_layernorm",), "*.ffn_norm": ("*.post_attention_layernorm",)},
        **{"*.tok_embeddings": ("*.embed_tokens",), "output": ("lm_head",)},
    },
    "chatglm": {
        f"{_BLOCKS}.self_attention.query_key_value": tuple(x.replace("*", "model.layers.*") for x in _QKV),
        f"{_BLOCKS}.self_attention.dense": ("model.layers.*.self_attn.o_proj",),
        f"{_BLOCKS}.mlp.dense_h_to_4h": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
        f"{_BLOCKS}.mlp.dense_4h_to_h": ("model.layers.*.mlp.down_proj",),
        f"{_BLOCKS}.*_layernorm": ("model.layers.*.*_layernorm",),
        "transformer.encoder.final_layernorm": ("model.norm",),
        **{"transformer.embedding.word_embeddings": ("model.embed_tokens",), "transformer.output_layer": ("lm_head",)},
    },
}  # fmt: skip
# The text of these is model.language_model, beside what reads images.
_BESIDE_IMAGES = (
    "gemma3",
    "gemma3_vl",
    "mistral3",
    "qwen2_5_vl",
    "qwen3vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2_vl",
)
# Of these, qkv has the rows of each head of keys together: those of its queries, its own, and those of its values.
_BY_HEADS = ("internlm2", "phi3small")


@dataclass(frozen=True)
class Naming:
    """Name modules by names of weights.

    Args:
        own: names of modules by patterns of names of weights, before all rules. `*` stands for any text, and the text
            for `*` in the name. Several names are the parts of a packed weight; a mapping has the outputs of each.
        kind: the type of the model in genai_config.json; None for Llama's modules.
        heads: the number of heads of keys, 0 if it is unknown.
        is_builders: whether onnxruntime-genai's builder has named all weights.

    >>> Naming().modules_of("model.layers.0.attn.o_proj.MatMul.weight")
    [('model.layers.0.self_attn.o_proj', None)]
    >>> Naming({"m.*": "*"}).modules_of("m.head.weight")
    [('head', None)]
    >>> Naming(kind="phi3").modules_of("model.layers.0.attn.qkv_proj.MatMul.weight")
    [('model.layers.0.self_attn.qkv_proj', None)]
    """

    own: Mapping[str, str | Sequence[str] | Mapping[str, int]] = field(default_factory=dict)
    kind: str | None = None
    heads: int = 0
    is_builders: bool = False

    @classmethod
    def of(cls, model: ir.Model, names: Names | Naming) -> Naming:
        """Return how the weights of a model are named.

        Raises:
            GraphoptError: `names` has another form, or is no type of model.
        """
        if isinstance(names, Naming):
            return names
        if isinstance(names, str) and names not in _TYPES:
            raise GraphoptError(f"names: expected a type of model, {_known()}, found {names!r}")
        if not isinstance(names, str | Mapping | None):
            raise GraphoptError(
                f"names: expected names of modules by patterns of weights, or a type of model, found {kind_of(names)}"
            )
        found = Architecture.read(model) or Architecture("")
        values = [*model.graph.inputs, *model.graph.initializers.values()]
        is_builders = any(OF_BUILDER.search(x.name or "") for x in values)
        kind = names if isinstance(names, str) else found.type or None
        if is_builders and kind is None and not names:
            warnings.warn(
                "names: the model has names of onnxruntime-genai's builder, and no genai_config.json or config.json "
                "beside it tells its type: modules are named as Llama's: give names='llama', or another such as 'phi3'",
                stacklevel=2,
            )
        return cls({} if isinstance(names, str | None) else names, kind, found.heads, is_builders)

    @property
    def adds_one(self) -> bool:
        """Return whether the weights of norms are 1 more in the file than in the module."""
        return self.is_builders and Architecture(self.kind or "").adds_one

    def modules_of(self, weight: str) -> list[_Part]:
        """Return the modules that a weight belongs to: one, or those whose weights the exporter has packed into it.

        A module is that of the type of model, or Llama's if it has only some rows of that; see `holder`. The path is
        empty if it is unknown.

        Raises:
            GraphoptError: `own` has another form.
        """
        stem = _OWN.sub("", weight)
        for pattern, target in self.own.items():
            match = _matched(pattern, stem) or _matched(pattern, weight)
            if match:
                if not isinstance(target, str | Sequence | Mapping) or not all(isinstance(x, str) for x in target):
                    raise GraphoptError(
                        f"names: {pattern!r}: expected the name of a module, or of several, found {kind_of(target)}"
                    )
                parts = {target: None} if isinstance(target, str) else dict.fromkeys(target)
                sizes = target if isinstance(target, Mapping) else parts
                return [(_filled(pattern, name, match), sizes[name]) for name in parts]
        if not (self.is_builders or stem.endswith(".MatMul")):
            return [(stem, None)]
        if self.kind is not None and self.kind not in _TYPES:
            return [("", None)]
        stem = re.sub(r"\.(MatMul|Add)$", "", stem)
        for pattern, target in _FILES.items():
            if match := _matched(pattern, stem):
                names = [target] if isinstance(target, str) else target
                paths = tuple(_filled(pattern, name, match) for name in names)
                path, parts_of = self._of_type(paths[0])
                is_whole = parts_of == paths and self.order(path, ()) is None
                return [(path, None)] if is_whole else [(x, None) for x in paths]
        return [("", None)]

    def holder(self, path: str) -> tuple[str, tuple[str, ...]]:
        """Return the module that has the rows of one of `modules_of` and of others, and all whose rows it has."""
        module, parts = self._of_type(path)
        return (module, parts) if len(parts) > 1 else (path, (path,))

    def _of_type(self, path: str) -> tuple[str, tuple[str, ...]]:
        """Return the module of the type that has the rows of one of Llama's, and all of Llama's whose rows it has."""
        found = path
        those: tuple[str, ...] = (path,)
        for module, parts in _TYPES.get(self.kind or "", {}).items():
            match = next((x for part in parts if (x := _matched(part, path))), None)
            if match:
                found, those = _with(module, match.groups()), tuple(_with(x, match.groups()) for x in parts)
                break
        if (self.kind or "").removesuffix("_text") in _BESIDE_IMAGES and self.kind != "gemma3_text":
            found = re.sub(r"^model\.", "model.language_model.", found)
        return found, those

    def order(self, path: str, sizes: Sequence[int]) -> np.ndarray | None:
        """Return for each row of a module its row among those of the parts in turn, or None if it is the same.

        Raises:
            GraphoptError: the number of heads is unknown.
        """
        if self.kind not in _BY_HEADS or not path.endswith(("wqkv", "query_key_value")):
            return None
        if sizes and not self.heads:
            raise GraphoptError(
                f"module {path!r}: expected the number of heads of keys in genai_config.json beside the file, found "
                "none: compile the file where it lies"
            )
        ends = np.cumsum(sizes).tolist()
        rows = [np.arange(end - size, end).reshape(self.heads, -1) for end, size in zip(ends, sizes, strict=True)]
        return np.concatenate(rows, axis=1).ravel() if rows else np.zeros(0, int)

    def refusal(self, weight: str) -> GraphoptError:
        """Return the error for a weight whose module is unknown."""
        if self.kind is None or self.kind in _TYPES:
            return GraphoptError(
                f"names: weight {weight!r}: expected one whose module in transformers is known, found another: leave "
                f"it out by leave_out={weight!r}, or give names={{{weight!r}: 'MODULE'}}"
            )
        return GraphoptError(
            f"names: expected a type of model in genai_config.json whose modules are known, {_known()}, found "
            f"{self.kind!r}: give names='llama' if it has Llama's modules, or names={{{weight!r}: 'MODULE'}}"
        )


def _known() -> str:
    return some([*map(repr, sorted(_TYPES))])


def _with(name: str, texts: Sequence[str]) -> str:
    """Return a name with texts in place of its stars."""
    given = iter(texts)
    return re.sub(r"\*", lambda _: next(given), name)


def _matched(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name)


def _filled(pattern: str, name: str, match: re.Match[str]) -> str:
    """Return a name with the texts that the stars of a pattern stand for."""
    if name.count("*") > pattern.count("*"):
        raise GraphoptError(
            f"names: {pattern!r}: expected a name with at most as many * as the pattern, found {name!r}"
        )
    return _OWN.sub("", _with(name, match.groups()))


def part_sizes(weights: Mapping[str, ir.Value], naming: Naming) -> dict[str, int]:
    """Return the number of outputs of each of Llama's modules of which a module of the type has the rows, by path."""
    sizes: dict[str, int] = {}
    for name, weight in weights.items():
        parts = naming.modules_of(name) if naming.is_builders and OF_BUILDER.search(name) else []
        if any(naming.holder(path)[0] != path for path, _ in parts):
            outputs = outputs_of(weight)
            found = widths_of(name, parts, outputs, widths(weight))
            sizes |= {path: size for (path, _), size in zip(parts, found, strict=True)}
    return sizes


def widths_of(weight: str, parts: Sequence[_Part], outputs: int, widths: Sequence[int] | None) -> list[int]:
    """Return the number of outputs of each part of a packed weight.

    Args:
        weight: the name of the weight, for errors.
        parts: what `modules_of` returns.
        outputs: the number of outputs of the weight.
        widths: what the graph splits the outputs into, if it does.
    """
    sizes = [size for _, size in parts if size is not None]
    if len(sizes) != len(parts):
        sizes = [*widths] if widths and len(widths) == len(parts) else []
    if len(parts) == 1:
        sizes = [outputs]
    if sum(sizes) != outputs:
        found = f"parts of {sizes}" if sizes else "a graph that does not split them"
        raise GraphoptError(
            f"names: {weight!r}: expected the parts of its {outputs} outputs, found {found}: name the outputs of each, "
            f"such as {{{weight!r}: {{{parts[0][0]!r}: {outputs // len(parts)}, ...}}}}"
        )
    return sizes


def matched(place: str, paths: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Return for each module of an adapter its name among those of a file.

    The file may have been exported from a module around that of the adapter, or from one in it: all names may differ by
    one prefix, that which most modules share.

    Args:
        place: where the adapter is, for errors.
        paths: the modules of the adapter.
        known: the modules of the file.

    Raises:
        GraphoptError: a module is not in the file.
    """
    prefixes: collections.Counter[tuple[str, str]] = collections.Counter()  # to add and to remove
    for path in paths:
        for name in known:
            if name == path:
                prefixes["", ""] += 1
            elif name.endswith(f".{path}"):
                prefixes[name.removesuffix(path), ""] += 1
            elif path.endswith(f".{name}"):
                prefixes["", path.removesuffix(name)] += 1
    ((added, removed), _), *_ = prefixes.most_common(1) or [(("", ""), 0)]
    renamed = {path: f"{added}{path.removeprefix(removed)}" for path in paths}
    missing = [path for path, name in renamed.items() if name not in known]
    if not missing:
        return renamed
    raise GraphoptError(
        f"{place}: expected modules of the model, found {', '.join(map(repr, missing[:3]))}"
        f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''} that it lacks; it has "
        f"{', '.join(map(repr, list(known)[:4])) or 'none that an adapter can change'}: give names=, or "
        f"leave_out={missing[0]!r} if no output of the file needs it"
    )


def prefix_of(renamed: Mapping[str, str]) -> tuple[str, str]:
    """Return what `matched` has added to the names of all modules, and what it has removed from them."""
    path, own = next(iter(renamed.items()), ("", ""))
    added = own.removesuffix(path) if own.endswith(f".{path}") else ""
    removed = path.removesuffix(own) if path.endswith(f".{own}") else ""
    return added, removed
