"""Turn the adapters of stacked weights of experts into those of peft's `target_parameters`, and back.

Source: `ParamWrapper` of peft 0.21. It has A of all experts as one matrix [experts r, inputs], and B as one matrix
[outputs, r experts], in this order of the rows and of the columns. The wrappers of a module's parameters are nested in
their order: the first parameter has the innermost, and each wrapper around it adds `base_layer` to its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from graphopt.errors import GraphoptError

# In files of onnxruntime-genai's builder, and in transformers
_FILE, _MODULE = (".moe.experts.", ".mlp.experts.")
_FUSED = "gate_up_proj"
_GPT_OSS = ".moe.router.Add.bias"  # the only model of the builder whose router has one


def parameter_of_experts(weight: str) -> str:
    """Return the name of the parameter in transformers that stacked weights of a file are."""
    if _FILE not in weight:
        return weight
    layer, _, own = weight.partition(_FILE)
    return f"{layer}{_MODULE}{own.removesuffix('.qweight').removesuffix('.weight')}"


def order_of_experts(weight: str, known: Iterable[str], outputs: int) -> np.ndarray | None:
    """Return for each output of a parameter its place in a file; None if it is the same.

    The builder puts each gate beside what it multiplies, as gpt-oss itself has them.

    Args:
        weight: the name of the weight.
        known: the names of all values of the file.
        outputs: the number of outputs of an expert.
    """
    layer, _, own = weight.partition(_FILE)
    if not own.startswith(f"{_FUSED}.") or f"{layer}{_GPT_OSS}" in {*known}:
        return None
    return np.arange(outputs).reshape(-1, 2).T.ravel()


def to_parameter(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return A [experts, inputs, r] and B [experts, r, outputs] as peft has them."""
    experts, inputs, rank = a.shape
    flat = b.transpose(2, 1, 0).reshape(b.shape[2], rank * experts)
    return a.transpose(0, 2, 1).reshape(experts * rank, inputs), flat


def from_parameter(a: np.ndarray, b: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B of peft as [experts, inputs, r] and [experts, r, outputs]."""
    down = a.reshape(experts, -1, a.shape[1]).transpose(0, 2, 1)
    return down, b.reshape(len(b), -1, experts).transpose(2, 1, 0)


def wrappers(parameters: Sequence[str]) -> dict[str, str]:
    """Return the names of the wrappers of parameters, which are given in the order that their modules have."""
    owners = [path.rpartition(".")[0] for path in parameters]
    return {
        path: owner + ".base_layer" * owners[i + 1 :].count(owner)
        for i, (path, owner) in enumerate(zip(parameters, owners, strict=True))
    }


def wrapped_parameters(
    place: str, names: Sequence[str], targets: Sequence[str], known: Sequence[str]
) -> dict[str, str]:
    """Return the parameters that wrappers in a folder are of, by the names of the wrappers.

    Args:
        place: where the folder is, for errors.
        names: the names of everything that has an adapter in the folder.
        targets: its `target_parameters`: the ends of names.
        known: the parameters of the model, in the order that their modules have.

    Raises:
        GraphoptError: a module has another number of wrappers than the model has parameters for them.
    """
    found: dict[str, str] = {}
    bare = {name: name.replace(".base_layer", "") for name in names}
    owners = {target.rpartition(".")[0] for target in targets}
    for owner in dict.fromkeys(x for x in bare.values() if any(f".{x}".endswith(f".{y}") for y in owners)):
        own = sorted((name for name in names if bare[name] == owner), key=len, reverse=True)
        ends = [x.rpartition(".")[2] for x in known if _ends_alike(x.rpartition(".")[0], owner)]
        ends = [x for x in dict.fromkeys(ends) if any(f".{owner}.{x}".endswith(f".{y}") for y in targets)]
        if len(own) != len(ends):
            raise GraphoptError(
                f"{place}: module {owner!r}: expected adapters of {', '.join(ends) or 'stacked weights'}, as the model "
                f"and target_parameters name them, found {len(own)}"
            )
        found |= {name: f"{owner}.{end}" for name, end in zip(own, ends, strict=True)}
    return found


def _ends_alike(a: str, b: str) -> bool:
    """Return whether one name ends with the other: modules differ by a prefix."""
    return f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}")
