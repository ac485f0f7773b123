"""MoE and QMoE that are lowered have the gradients of PyTorch's autograd, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from lowering_cases import (
    BY_SCHEMA,
    CASES,
    NEWER,
    OLD,
    Case,
    lowered,
    numbers_of_its_own,  # noqa: F401
)
from torch_oracle import vector_jacobian

from graphopt.testing.gradients import prove


def dequantized_of_torch(case: Case, i: int) -> torch.Tensor:
    """Return a packed weight as numbers, [experts, outputs, inputs]."""
    q, scales, zeros = (case.inputs[f"{name}{i}"] for name in "wsz")
    bits, block = case.attributes["expert_weight_bits"], case.attributes.get("block_size", 0)

    def numbers(packed: np.ndarray) -> np.ndarray:
        parts = [packed >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
        return np.stack(parts, -1).reshape(*packed.shape[:-1], -1).astype(np.float64)

    zero = numbers(zeros)[..., : scales.shape[-1]] if zeros is not None else np.full(scales.shape, 2.0 ** (bits - 1))
    w = numbers(q)
    repeats = block or w.shape[-1]
    columns = (x if block else x[..., None] for x in (zero, scales))
    zero, scale = (np.repeat(x, repeats, -1) for x in columns)
    return torch.tensor((w - zero) * scale)


def experts_of_torch(case: Case, x: dict[str, torch.Tensor]) -> torch.Tensor:
    """Compute MoE and QMoE token by token, in the way of transformers' experts."""
    given, is_packed = case.attributes, case.op_type == "QMoE"
    w, bias = (
        {i: torch.tensor(a).double() for i in (1, 2, 3) if (a := case.inputs.get(f"{name}{i}")) is not None}
        for name in "wb"
    )
    w = {i: dequantized_of_torch(case, i) for i in w} if is_packed else w
    logits, k, kind = x["logits"], given["k"], given["activation_type"]
    if given.get("use_sparse_mixer"):
        scores, chosen = sparse_mixer_of_torch(logits)
    elif is_packed and "mix" in x:
        chosen = logits.topk(k).indices
        scores = x["mix"].gather(1, chosen)
    elif is_packed:
        scores, chosen = logits.topk(k)
        scores = scores.softmax(-1)
    else:
        scores, chosen = logits.softmax(-1).topk(k)
    if given.get("normalize_routing_weights"):
        scores = scores / scores.sum(-1, keepdim=True)
    rows = []
    for token, factors, places in zip(x["x"].flatten(0, -2), scores, chosen, strict=True):
        total = 0 * token
        for factor, e in zip(factors, places.tolist(), strict=True):

            def product(i: int, t: torch.Tensor, e: int = e) -> torch.Tensor:
                return w[i][e] @ t + (bias[i][e] if i in bias else 0)

            h = product(1, token)
            if kind == "swiglu":
                fusion = given["swiglu_fusion"]
                g, up = [(h, None), (h[::2], h[1::2]), h.chunk(2)][fusion]
                up = product(3, token) if up is None else up
                limit = given.get("swiglu_limit", torch.inf)
                g, up = g.clamp(max=limit), up.clamp(-limit, limit)
                h = g * (given.get("activation_alpha", 1.0) * g).sigmoid()
                h = h * (up + given.get("activation_beta", 0.0))
            else:
                act = {
                    "gelu": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
                    "identity": lambda t: t,
                }
                h = act.get(kind, getattr(torch.nn.functional, kind, None))(h)
                h = h * product(3, token) if 3 in w else h
            total = total + factor * product(2, h)
        rows.append(total)
    return torch.stack(rows).reshape(x["x"].shape)


def sparse_mixer_of_torch(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose two experts as Phi-3.5-MoE does in evaluation."""
    left, factors, chosen = logits, [], []
    for _ in range(2):
        best, expert = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 0.02
        factors.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, expert))
        chosen.append(expert)
        left = left.scatter(1, expert, -torch.inf)
    return torch.cat(factors, 1), torch.cat(chosen, 1)


@pytest.mark.parametrize("name", [*(name for name in CASES if "experts, " in name), *BY_SCHEMA])
def test_experts_have_the_gradient_of_autograd(name):
    case = (CASES | BY_SCHEMA)[name]
    case.runs &= not (OLD and name in NEWER)
    if case.op_type == "MoE":
        close = case.inputs["logits"]
        close[:, 1] = close[:, 0] * 1.005  # for the sparse mixer, which compares ratios
    proto = case.model()

    def autograd(_: ir.Model, point: Any, seeds: Any) -> Any:
        x = {k: torch.tensor(array).double() for k, array in point.items()}
        wrt = {k: t.requires_grad_() for k, t in x.items()}
        y = experts_of_torch(case, x)
        (seed,) = seeds.values()
        return {"y": y.detach().numpy()}, vector_jacobian([(y, torch.tensor(seed).double())], wrt)

    double = {} if case.op_type == "MoE" else {"double": False, "tolerance": 1e-4}
    proof = prove(lowered(proto), case.feeds, oracle=autograd, **double)
    assert proof.oracle == "autograd" and not proof.vacuous
