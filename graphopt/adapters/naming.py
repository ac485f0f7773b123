"""Name the modules of a network in PyTorch that the weights of a file belong to, and find them again."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from graphopt.errors import GraphoptError, kind_of

Names = Mapping[str, str | Sequence[str] | Mapping[str, int]] | None

_OWN = re.compile(r"\.weight(_Q\d|_quant|_quantized)?$")  # what names of weights end in, after the module
# Names in files of onnxruntime-genai's builder, and those of the modules of transformers.
_BUILDER: dict[str, str | Sequence[str]] = {
    "*.attn.qkv_proj.MatMul": ("*.self_attn.q_proj", "*.self_attn.k_proj", "*.self_attn.v_proj"),
    "*.attn.*.MatMul": "*.self_attn.*",
    "*.MatMul": "*",
}
Part = tuple[str, int | None]  # the path of a module, and the number of its outputs


def modules_of(weight: str, names: Names = None) -> list[Part]:
    """Return the modules that a weight belongs to: one, or those whose weights the exporter has packed into it.

    Args:
        weight: the name of the weight, such as `model.layers.0.attn.qkv_proj.MatMul.weight`.
        names: names of modules by patterns of names of weights, before the rules for files of onnxruntime-genai's
            builder. `*` stands for any text, and the text for `*` in the name. Several names are the parts of a packed
            weight; a mapping has the number of outputs of each.

    Raises:
        GraphoptError: `names` has another form.

    >>> modules_of("model.layers.0.attn.o_proj.MatMul.weight")
    [('model.layers.0.self_attn.o_proj', None)]
    >>> modules_of("m.head.weight", {"m.*": "*"})
    [('head', None)]
    """
    if not isinstance(names, Mapping | None):
        raise GraphoptError(
            f"names: expected names of modules by patterns of weights, found {kind_of(names)}"
        )
    stem = _OWN.sub("", weight)
    for pattern, target in [*(names or {}).items(), *_BUILDER.items()]:
        match = _matched(pattern, stem) or _matched(pattern, weight)
        if match:
            if not isinstance(target, str | Sequence | Mapping) or not all(
                isinstance(x, str) for x in target
            ):
                raise GraphoptError(
                    f"names: {pattern!r}: expected the name of a module, or of several, found {kind_of(target)}"
                )
            parts = {target: None} if isinstance(target, str) else dict.fromkeys(target)
            sizes = target if isinstance(target, Mapping) else parts
            return [(_filled(pattern, name, match), sizes[name]) for name in parts]
    return [(stem, None)]


def _matched(pattern: str, name: str) -> re.Match[str] | None:
    return re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name)


def _filled(pattern: str, name: str, match: re.Match[str]) -> str:
    """Return a name with the texts that the stars of a pattern stand for."""
    texts = iter(match.groups())
    if name.count("*") > pattern.count("*"):
        raise GraphoptError(
            f"names: {pattern!r}: expected a name with at most as many * as the pattern, found {name!r}"
        )
    return _OWN.sub("", re.sub(r"\*", lambda _: next(texts), name))


def sizes_of(weight: str, parts: Sequence[Part], outputs: int, widths: Sequence[int] | None) -> list[int]:
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
    one prefix.

    Args:
        place: where the adapter is, for errors.
        paths: the modules of the adapter.
        known: the modules of the file.

    Raises:
        GraphoptError: a module is not in the file.
    """
    first = paths[0] if paths else ""
    more = [name.removesuffix(first) for name in known if name.endswith(f".{first}")]
    less = [first.removesuffix(name) for name in known if first.endswith(f".{name}")]
    for added, removed in [("", ""), *((prefix, "") for prefix in more), *(("", prefix) for prefix in less)]:
        renamed = {path: f"{added}{path.removeprefix(removed)}" for path in paths}
        if all(name in known for name in renamed.values()):
            return renamed
    missing = [path for path in paths if path not in known]
    raise GraphoptError(
        f"{place}: expected modules of the model, found {', '.join(map(repr, missing[:3]))}"
        f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''} that it lacks; it has "
        f"{', '.join(map(repr, list(known)[:4])) or 'none that an adapter can change'}: give names="
    )
