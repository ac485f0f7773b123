"""GroupQueryAttention that is lowered has the gradients of PyTorch's autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx_ir as ir
import pytest
import torch
from lowering_cases import (
    BY_AUTOGRAD,
    Case,
    S,
    group_query,
    lowered,
    numbers_of_its_own,  # noqa: F401
)
from torch_oracle import vector_jacobian

from graphopt.testing.gradients import prove


def group_query_of_torch(case: Case, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute GroupQueryAttention after an empty past; of chunks, each row without its padding."""
    options = {"of_keys": case.attributes["kv_num_heads"], "heads": case.attributes["num_heads"]}
    if "counts" in x:
        parts = []
        for row, count in enumerate(x["counts"].tolist()):
            part = {name: t[row : row + 1, :count] for name, t in x.items() if name in "qkv"}
            others = {name: t for name, t in x.items() if name in ("q_norm", "k_norm")}
            if "bias" in x:
                others["bias"] = x["bias"][row : row + 1, :, :count, :count]
            y = group_query_of_torch(case, part | others)["y"]
            parts.append(torch.nn.functional.pad(y, (0, 0, 0, S - count)))
        return {"y": torch.cat(parts)}
    given = {k: torch.tensor(w).double() for k, w in case.weights.items() if w.dtype == np.float32}
    q, k, v = _heads_of_torch(x, **options)
    if "q_norm" in x:
        shared = case.attributes.get("qk_norm_epsilon", 1e-6)
        q, k = (
            t * (t.square().mean(-1, keepdim=True) + case.attributes.get(f"{name}_epsilon", shared)).rsqrt() * x[name]
            for t, name in ((q, "q_norm"), (k, "k_norm"))
        )
    count = q.shape[2]
    if case.attributes.get("do_rotary"):
        cos, sin = given["cos"][:count], given["sin"][:count]
        halves = (t.chunk(2, -1) for t in (q, k))
        q, k = (torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in halves)
    groups = options["heads"] // options["of_keys"]
    keys, values = (t.repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ keys.mT * case.attributes.get("scale", q.shape[-1] ** -0.5)
    if cap := case.attributes.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    if "bias" in x:
        scores = scores + x["bias"]
    distance = torch.arange(count)[:, None] - torch.arange(count)
    window = case.attributes.get("local_window_size", count)
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    sink = given.get("sink", torch.zeros(options["heads"]).double())
    if "sink" in given or case.attributes.get("smooth_softmax"):
        scores = torch.cat([scores, sink[:, None, None].expand(len(scores), -1, count, 1)], -1)
    y = scores.softmax(-1)[..., :count] @ values
    return {"y": y.transpose(1, 2).flatten(2), "present_key": k, "present_value": v}


def _heads_of_torch(x: dict[str, torch.Tensor], heads: int, of_keys: int) -> list[torch.Tensor]:
    parts = [x["q"], x["k"], x["v"]] if "k" in x else [x["q"]]
    size = sum(t.shape[-1] for t in parts) // (heads + 2 * of_keys)
    split = torch.cat(parts, -1).split([heads * size, of_keys * size, of_keys * size], -1)
    return [t.unflatten(-1, (-1, size)).transpose(1, 2) for t in split]


@pytest.mark.parametrize("name", BY_AUTOGRAD)
def test_group_query_attention_has_the_gradient_of_autograd(name):
    case = group_query(runs=False, **BY_AUTOGRAD[name])
    if "counts" in case.feeds:
        case.outputs = ("y",)  # the cache is unspecified where rows are padded
    proto = case.model()
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
        output.type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension()] * (3 if output.name == "y" else 4))
    if "counts" in case.feeds:  # and so are the results
        rows = (np.arange(S) < case.feeds["counts"][:, None]).astype(np.float32)[..., None]
        proto.graph.node[0].output[0] = "unspecified"
        proto.graph.initializer.append(onnx.numpy_helper.from_array(rows, "rows"))
        proto.graph.node.append(onnx.helper.make_node("Mul", ["unspecified", "rows"], ["y"]))

    def autograd(_: ir.Model, point: Any, seeds: Any) -> Any:
        x = {k: torch.tensor(array) for k, array in point.items()}
        wrt = {k: t.requires_grad_() for k, t in x.items() if t.is_floating_point()}
        found = group_query_of_torch(case, x)
        weighed = [(found[k.removesuffix(".seed")], torch.tensor(seed)) for k, seed in seeds.items()]
        return {k: y.detach().numpy() for k, y in found.items()}, vector_jacobian(weighed, wrt)

    proof = prove(lowered(proto), case.feeds, oracle=autograd)
    assert proof.oracle == "autograd" and not proof.vacuous
