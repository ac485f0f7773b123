"""Nodes of other domains that graphopt lowers, with numbers for their inputs and weights."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnxruntime
import pytest
from steps import normalized as lowered  # noqa: F401
from steps import outputs

RNG = np.random.default_rng(0)
OLD = onnxruntime.__version__.startswith("1.19")


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def bytes_(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def ints(*numbers: Any) -> np.ndarray:
    return np.array(numbers, np.int32)


@dataclass
class Case:
    """One node: inputs of a dynamic first axis, weights, attributes and the outputs that are compared."""

    op_type: str
    inputs: dict[str, np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("y",)
    domain: str = "com.microsoft"
    fixed_inputs: tuple[str, ...] = ()
    tolerance: float = 1e-5
    runs: bool = True  # on the CPU provider
    double: bool = True

    def model(self) -> onnx.ModelProto:
        given = {name: x for name, x in self.inputs.items() if x is not None}
        names = [name if name in given or name in self.weights else "" for name in self.inputs]
        node = onnx.helper.make_node(self.op_type, names, self.outputs, "case", domain=self.domain, **self.attributes)
        graph = onnx.helper.make_graph(
            [node],
            "case",
            [
                onnx.helper.make_tensor_value_info(
                    name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), [None, *x.shape[1:]]
                )
                for name, x in given.items()
                if name not in self.weights
            ],
            [onnx.ValueInfoProto(name=name) for name in self.outputs if name],
            [onnx.numpy_helper.from_array(x, name) for name, x in self.weights.items()],
        )
        opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in OPSETS.items()]
        proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
        first = next(iter(self.inputs.values()))
        results = outputs(proto, self.feeds) if self.runs else dict.fromkeys(self.outputs, first)
        for output in proto.graph.output:
            y = results[output.name]
            dtype = onnx.helper.np_dtype_to_tensor_dtype(y.dtype)
            shaped = onnx.helper.make_tensor_value_info(output.name, dtype, [None] * y.ndim)
            output.CopyFrom(shaped)
        return proto

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        return {k: x for k, x in self.inputs.items() if x is not None and k not in self.weights}


OPSETS = {"": 20, "com.microsoft": 1, "ai.onnx.ml": 1}
B, S, N, H = 2, 5, 2, 4
D = N * H
X, W, BIAS = floats(B, S, D), floats(D, 3 * D), floats(3 * D)
Q, K, V = floats(B, S, D), floats(B, 3, D), floats(B, 3, D)
GAMMA, BETA = floats(D), floats(D)
TABLES = dict(zip(("cos", "sin"), (f(floats(16, 8)) for f in (np.cos, np.sin)), strict=True))
COS, SIN = np.cos(floats(12, H // 2)), np.sin(floats(12, H // 2))
MASKS = {
    "lengths": ints(3, 5),
    "ends and starts": ints(4, 5, 1, 0),
    "rows": ints([1, 1, 1, 0, 0], [1, 1, 1, 1, 1]),
    "whole": (RNG.random((B, S, S)) > 0.3).astype(np.int32),
}


def attention(mask: np.ndarray | None = None, bias: np.ndarray | None = BIAS, **attributes: Any) -> Case:
    inputs = {"x": X, "w": W, "b": bias, "mask": mask}
    return Case("Attention", inputs, {"num_heads": N, **attributes}, fixed_inputs=("mask",))


def multi_head(
    q: np.ndarray = Q, k: np.ndarray | None = K, v: np.ndarray | None = V, *, runs: bool = True, **more: Any
) -> Case:
    attributes = {name: more.pop(name) for name in ("unidirectional", "scale") if name in more}
    names = ("bias", "mask", "attention_bias", "past_key", "past_value")
    inputs = {"q": q, "k": k, "v": v} | {name: more.get(name) for name in names}
    outputs = ("y", "present_key", "present_value") if "past_key" in more else ("y",)
    return Case("MultiHeadAttention", inputs, {"num_heads": N, **attributes}, outputs=outputs, runs=runs)


def rotary(x: np.ndarray, positions: np.ndarray, turned: int = H, **attributes: Any) -> Case:
    cos, sin = COS[:, : turned // 2], SIN[:, : turned // 2]
    inputs = {"x": x, "positions": positions, "cos": cos, "sin": sin}
    return Case("RotaryEmbedding", inputs, attributes, weights={"cos": cos, "sin": sin})


def group_query(
    heads: int = 4, of_keys: int = 2, size: int = 16, lengths: Any = (S, S), packed: bool = False, **more: Any
) -> Case:
    """Attention of S new positions with an empty past. Options that are arrays are inputs."""
    q, k, v = floats(B, S, heads * size), floats(B, S, of_keys * size), floats(B, S, of_keys * size)
    names = ("cos", "sin", "positions", "bias", "sink", "k_scale", "v_scale", "q_norm", "k_norm", "counts")
    past = floats(B, of_keys, 0, size) if "counts" in more else None
    given = {name: more.pop(name) for name in names if name in more}
    qkv = {"q": np.concatenate([q, k, v], axis=2), "k": None, "v": None} if packed else {"q": q, "k": k, "v": v}
    inputs = {
        **qkv,
        "past_key": past,
        "past_value": past,
        "lengths": ints(*lengths) - 1,
        "total": np.array(S, np.int32),
    }
    inputs |= {name: given.get(name) for name in names}
    runs = more.pop("runs", True)
    weights = {name: x for name, x in inputs.items() if name in ("total", "cos", "sin", "sink")}
    return Case(
        "GroupQueryAttention",
        inputs,
        {"num_heads": heads, "kv_num_heads": of_keys, **more},
        {name: x for name, x in weights.items() if x is not None},
        outputs=("y", "present_key", "present_value"),
        fixed_inputs=("lengths", "positions"),
        tolerance=2e-6,
        runs=runs,
    )


def bnb(kind: int, size: int = 12, outputs: int = 5, block: int = 16) -> Case:
    """A weight in fp4 or nf4, whose last block and byte may be filled in part."""
    count = size * outputs
    weights = {"b": bytes_(-(-count // 2)), "absmax": abs(floats(-(-count // block)))}
    attributes = {"K": size, "N": outputs, "block_size": block, "quant_type": kind}
    return Case("MatMulBnb4", {"x": floats(2, 4, size), **weights}, attributes, weights, tolerance=2e-5, double=False)


def n_bits(bits: int, points: str = "", size: int = 40, bias: bool = False, *, act_order: bool = False) -> Case:
    outputs, block, blocks = 3, 16, -(-size // 16)
    packed = -(-blocks * bits // 8)
    zeros = {"packed": bytes_(outputs * packed), "floating": floats(outputs * blocks)}.get(points)
    weights = {"b": bytes_(outputs, blocks, block * bits // 8), "scales": floats(outputs * blocks) / 8}
    weights |= {} if zeros is None else {"zeros": zeros}
    inputs: dict[str, Any] = {"x": floats(2, 4, size), **weights}
    weights |= {"bias": floats(outputs)} if bias else {}
    if act_order:
        weights["group"] = ints(*RNG.permutation(np.arange(size) // block))
    inputs |= {"zeros": zeros, "group": weights.get("group"), "bias": weights.get("bias")}
    attributes = {"K": size, "N": outputs, "bits": bits, "block_size": block}
    return Case("MatMulNBits", inputs, attributes, weights, tolerance=2e-5, double=False)


def linear_attention(
    rule: str, positions: int = S, heads: tuple[int, int, int] = (2, 2, 2), *, past: bool = False, **more: Any
) -> Case:
    """Linear attention with heads of queries, keys and values, of 4 and 3 numbers."""
    of_queries, of_keys, of_values = heads
    batch = 2 if positions < 10 else 1
    rows = {name: floats(batch, positions, n * 4) / 2 for name, n in (("q", of_queries), ("k", of_keys))}
    inputs: dict[str, Any] = {**rows, "v": floats(batch, positions, of_values * 3)}
    inputs["past"] = floats(batch, of_values, 4, 3) if past else None
    decays = of_values * (4 if more.pop("for_each", False) else 1)
    inputs["decay"] = -RNG.random((batch, positions, decays)).astype(np.float32)
    rates = 1 if more.pop("one_rate", False) else of_values
    inputs["beta"] = RNG.random((batch, positions, rates)).astype(np.float32)
    if "gated" not in rule:
        inputs["decay"] = None
    if "delta" not in rule:
        del inputs["beta"]
    attributes = {"q_num_heads": of_queries, "kv_num_heads": of_values, "update_rule": rule, **more}
    weights = {"past": inputs["past"]} if past else {}
    return Case("LinearAttention", inputs, attributes, weights, outputs=("y", "state"))


def causal(shape: tuple[int, ...] = (B, 3, S), size: int = 3, past: bool = False, **more: Any) -> Case:
    channels = shape[2] if more.get("channels_last") else shape[1]
    state = list(shape)
    state[1 if more.get("channels_last") else 2] = (size - 1) * more.get("dilation", 1)
    inputs: dict[str, Any] = {"x": floats(*shape), "w": floats(channels, 1, size)}
    inputs["b"] = floats(channels) if more.pop("bias", True) else None
    inputs |= {"past": floats(*state)} if past else {}
    weights = {"past": inputs["past"]} if past else {}
    return Case("CausalConvWithState", inputs, more, weights, outputs=("y", "state"))


def rotary_of_three(shape: tuple[int, ...], **more: Any) -> Case:
    x, cos, sin = floats(*shape), np.cos(floats(12, 4)), np.sin(floats(12, 4))
    inputs = {"x": x, "positions": RNG.integers(0, 12, (3, B, S)), "cos": cos, "sin": sin}
    return Case("MRotaryEmbedding", inputs, {"mrope_section": [2, 1, 1], **more}, weights={"cos": cos, "sin": sin})


EXPERTS, INNER = 5, 6


def experts(kind: str = "relu", *, k: int = 2, count: int = EXPERTS, biased: bool = True, **more: Any) -> Case:
    """MoE of tokens [B,S,D]. Options that are arrays are inputs."""
    fused = 2 if kind == "swiglu" and more.get("swiglu_fusion", 1) else 1
    attributes = {"swiglu_fusion": 1} if kind == "swiglu" else {}
    third = more.pop("third", False)
    weights = {
        "w1": floats(count, fused * INNER, D),
        "b1": floats(count, fused * INNER) if biased else None,
        "w2": floats(count, D, INNER),
        "b2": floats(count, D) if biased else None,
        "w3": floats(count, INNER, D) if third else None,
        "b3": floats(count, INNER) if third and biased else None,
    }
    weights |= {name: more.pop(name) for name in weights if name in more}
    x = more.pop("x", floats(B, S, D) / 2)
    inputs = {"x": x, "logits": 2 * floats(x.size // D, count), **weights}
    given = {name: w for name, w in weights.items() if w is not None}
    runs = more.pop("runs", True)
    attributes |= {"activation_type": kind, "k": k, **more}
    return Case("MoE", inputs, attributes, given, runs=runs)


def packed_experts(bits: int, block: int = 0, points: bool = False, mix: bool = False, **more: Any) -> Case:
    """QMoE of tokens [T,D], with gates beside what they multiply, as the builder writes it."""
    size, inner, count = more.pop("size", 64), 32, 4
    arrays: dict[str, np.ndarray | None] = {"x": floats(6, size) / 4, "logits": 2 * floats(6, count)}
    zeros: dict[str, np.ndarray | None] = {}
    for i, (rows, columns) in enumerate([(2 * inner, size), (size, inner)], 1):
        dims = [count, rows, columns // block] if block else [count, rows]
        padded = [*dims[:-1], -(-dims[-1] * bits // 8)]
        arrays[f"w{i}"] = bytes_(count, rows, columns * bits // 8)
        arrays[f"s{i}"] = np.abs(floats(*dims)) / 2**bits
        arrays[f"b{i}"] = floats(count, rows)
        zeros[f"z{i}"] = bytes_(*padded) if points else None
    third = dict.fromkeys(("w3", "s3", "b3"))
    inputs = {**arrays, **third, **zeros, "z3": None, "mix": np.abs(floats(6, count)) if mix else None}
    weights = {name: a for name, a in inputs.items() if a is not None and name[-1].isdecimal()}
    attributes = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "expert_weight_bits": bits}
    attributes |= {
        "activation_alpha": 1.702,
        "activation_beta": 1.0,
        **({"block_size": block} if block else {}),
    }
    return Case("QMoE", inputs, attributes | more, weights, tolerance=2e-5, double=False)


def embedding(segments: bool, mask: np.ndarray | None = None, positions: np.ndarray | None = None) -> Case:
    ids = RNG.integers(0, 7, (B, S)).astype(np.int32)
    weights = {"words": floats(7, D), "positions": floats(9, D)}
    weights |= {"segment": floats(2, D)} if segments else {}
    weights |= {"gamma": GAMMA, "beta": BETA}
    inputs: dict[str, Any] = {"ids": ids, "segments": ids % 2 if segments else None}
    inputs |= {"words": None, "positions": None, "segment": None, **weights}
    inputs |= {"mask": mask, "position_ids": positions}
    return Case("EmbedLayerNormalization", inputs, weights=weights, outputs=("y", "mask_index"))


def conv(z: bool = False, bias: bool = True, **attributes: Any) -> Case:
    inputs = {"x": floats(2, 3, 6, 6), "w": floats(4, 3, 3, 3), "b": floats(4) if bias else None}
    inputs |= {"z": floats(2, 4, 6, 6)} if z else {}
    return Case("FusedConv", inputs, {"pads": [1, 1, 1, 1], "kernel_shape": [3, 3], **attributes})


def gemm(activation: str, **attributes: Any) -> Case:
    inputs = {"a": floats(3, 4), "b": floats(4, 5), "c": floats(5)}
    return Case("FusedGemm", inputs, {"activation": activation, **attributes})


def product(a: tuple[int, ...], b: tuple[int, ...], **attributes: Any) -> Case:
    return Case("FusedMatMul", {"a": floats(*a), "b": floats(*b)}, attributes)


def skip(op_type: str, bias: bool, outputs: tuple[str, ...] = ("y",), shape: tuple[int, ...] = (B, S, D)) -> Case:
    inputs: dict[str, Any] = {"x": X, "skip": floats(*shape), "gamma": GAMMA}
    inputs |= {"beta": BETA} if op_type == "SkipLayerNormalization" else {}
    inputs |= {"bias": floats(D)} if bias else {}
    return Case(op_type, inputs, {"epsilon": 1e-3}, outputs=outputs)


CASES = {
    "gelu": Case("Gelu", {"x": X}),
    "bias gelu": Case("BiasGelu", {"x": X, "b": BETA}),
    "fast gelu": Case("FastGelu", {"x": X}, tolerance=2e-5),
    "fast gelu, bias": Case("FastGelu", {"x": X, "b": BETA}, tolerance=2e-5),
    "quick gelu": Case("QuickGelu", {"x": X}),
    "quick gelu, alpha": Case("QuickGelu", {"x": X}, {"alpha": 1.0}),
    "gemm": gemm("Relu"),
    "gemm, leaky": gemm("LeakyRelu", activation_alpha=0.2, alpha=0.5, beta=2.0),
    "gemm, hard sigmoid": gemm("HardSigmoid", activation_alpha=0.3, activation_beta=0.4),
    "gemm, none": Case(
        "FusedGemm", {"a": floats(4, 3), "b": floats(5, 4)}, {"transA": 1, "transB": 1, "activation": "Tanh"}
    ),
    "conv": conv(activation="Relu"),
    "conv, sum": conv(z=True, activation="Tanh"),
    "conv, clip": conv(activation="Clip", activation_params=[-0.5, 1.0]),
    "conv, leaky": conv(activation="LeakyRelu", activation_params=[0.3], strides=[2, 2]),
    "conv, hard sigmoid": conv(activation="HardSigmoid", activation_params=[0.3, 0.4], bias=False),
    "conv, sigmoid, auto_pad": Case(
        "FusedConv",
        {"x": floats(2, 2, 5), "w": floats(4, 1, 3)},
        {"auto_pad": "SAME_UPPER", "group": 2, "activation": "Sigmoid"},
    ),
    "product": product((2, 3, 4), (2, 4, 5), alpha=0.5),
    "product, transposed": product((2, 4, 3), (2, 5, 4), transA=1, transB=1),
    "product, vector": product((4,), (2, 4, 5), transA=1),
    "product, batch": product((3, 2, 4, 5), (5, 2, 4, 6), transBatchA=1, transBatchB=1),
    "product, batch transposed": product((3, 2, 4, 5), (2, 4, 6, 3), transBatchA=1, transA=1, transB=1),
    "layer normalization": Case(
        "LayerNormalization", {"x": X, "gamma": GAMMA, "beta": BETA}, {"epsilon": 1e-3}, domain="", runs=False
    ),
    "simplified": Case("SimplifiedLayerNormalization", {"x": X, "gamma": GAMMA}, {"epsilon": 1e-3}, domain=""),
    "skip": skip("SkipLayerNormalization", bias=False),
    "skip, bias and sum": skip("SkipLayerNormalization", bias=True, outputs=("y", "", "", "sum")),
    "skip, one for all rows": skip("SkipLayerNormalization", bias=False, shape=(S, D)),
    "skip simplified": skip("SkipSimplifiedLayerNormalization", bias=False),
    "skip simplified, bias and sum": skip("SkipSimplifiedLayerNormalization", bias=True, outputs=("y", "", "", "sum")),
    "bias softmax": Case(
        "BiasSoftmax",
        {"x": floats(2, 3, 4, 5), "b": floats(2, 1, 1, 5)},
        {"axis": 3, "is_inner_broadcast": 1},
        runs=False,
    ),
    "bias softmax, outer": Case(
        "BiasSoftmax",
        {"x": floats(2, 3, 4, 5), "b": floats(4, 5)},
        {"axis": 3, "is_inner_broadcast": 0},
        runs=False,
    ),
    "bias dropout": Case("BiasDropout", {"x": X, "b": BETA, "residual": Q}, runs=False),
    "attention": attention(),
    **{f"attention, mask of {name}": attention(mask) for name, mask in MASKS.items()},
    **{f"attention, causal, mask of {name}": attention(mask, unidirectional=1) for name, mask in MASKS.items()},
    "attention, causal": attention(unidirectional=1, scale=0.3),
    "attention, sizes": Case(
        "Attention",
        {"x": X, "w": floats(D, 20), "b": floats(20)},
        {"num_heads": N, "qkv_hidden_sizes": [8, 8, 4]},
    ),
    "attention, filter": attention(MASKS["rows"], mask_filter_value=-1.0),
    "attention, bias of scores": Case(
        "Attention",
        {"x": X, "w": W, "b": BIAS, "mask": None, "past": None, "attention_bias": floats(1, N, S, S)},
        {"num_heads": N},
    ),
    "attention, past": Case(
        "Attention",
        {"x": X, "w": W, "b": BIAS, "mask": None, "past": floats(2, B, N, 3, H)[:, :, :, :, :]},
        {"num_heads": N, "unidirectional": 1},
        outputs=("y", "present"),
    ),
    "multi-head": multi_head(),
    "multi-head, bias": multi_head(bias=BIAS),
    "multi-head, value of another size": multi_head(v=floats(B, 3, 12), bias=floats(28)),
    "multi-head, mask": multi_head(mask=ints([1, 1, 0], [1, 1, 1])),
    "multi-head, lengths": multi_head(mask=ints(2, 3)),
    "multi-head, whole mask": multi_head(k=Q, v=X, mask=MASKS["whole"]),
    "multi-head, bias of scores": multi_head(attention_bias=floats(B, N, S, 3), scale=0.3),
    "multi-head, causal": multi_head(k=Q, v=X, unidirectional=1),
    "multi-head, causal, mask": multi_head(k=Q, v=X, unidirectional=1, mask=MASKS["rows"]),
    "multi-head, past": multi_head(
        k=Q, v=X, past_key=floats(B, N, 3, H), past_value=floats(B, N, 3, H), unidirectional=1
    ),
    "multi-head, heads split": multi_head(k=floats(B, N, 3, H), v=floats(B, N, 3, H)),
    "rotary": rotary(floats(B, N, S, H), np.array([2], np.int64)),
    "rotary, positions": rotary(floats(B, N, S, H), RNG.integers(0, 12, (B, S))),
    "rotary, merged heads": rotary(X, RNG.integers(0, 12, (B, S))),
    "rotary, interleaved": rotary(X, np.array([0], np.int64), interleaved=1),
    "rotary, part of a head": rotary(
        floats(B, S, 16), np.array([1], np.int64), turned=4, rotary_embedding_dim=4, num_heads=2
    ),
    "group query": group_query(),
    "group query, as many keys": group_query(of_keys=4, scale=0.3),
    "group query, one key": group_query(of_keys=1),
    "group query, packed": group_query(packed=True),
    "group query, rotary": group_query(do_rotary=1, **TABLES),
    "group query, packed, rotary": group_query(packed=True, do_rotary=1, **TABLES),
    "group query, interleaved": group_query(do_rotary=1, rotary_interleaved=1, **TABLES),
    "group query, part of a head": group_query(size=32, do_rotary=1, **TABLES),
    "group query, positions": group_query(
        do_rotary=1, positions=np.arange(3, 3 + B * S).reshape(1, -1)[:, :S].repeat(B, 0), **TABLES
    ),
    "group query, softcap": group_query(softcap=2.0),
    "group query, bias": group_query(bias=floats(B, 4, S, S)),
    "group query, one bias for all, softcap": group_query(bias=floats(1, 1, S, S), softcap=1.5),
    "group query, window": group_query(local_window_size=2),
    "group query, window, softcap, bias": group_query(local_window_size=3, softcap=3.0, bias=floats(B, 1, S, S)),
    "group query, smooth": group_query(smooth_softmax=1),
    "group query, sink": group_query(sink=floats(4)),
    "group query, sink, window": group_query(sink=floats(4), local_window_size=2, softcap=5.0),
    "group query, not causal": group_query(causal=0),
    "group query, not causal, padded": group_query(causal=0, lengths=(3, 5)),
    "4 bits": n_bits(4),
    "4 bits, zero points": n_bits(4, "packed"),
    "4 bits, floating zero points": n_bits(4, "floating"),
    "4 bits, whole blocks, bias": n_bits(4, size=32, bias=True),
    "4 bits, act_order": n_bits(4, act_order=True),
    "4 bits, act_order, whole blocks, bias": n_bits(4, size=32, bias=True, act_order=True),
    "4 bits, act_order, floating zero points": n_bits(4, "floating", act_order=True),
    **{f"experts, {kind}": experts(kind) for kind in ("relu", "gelu", "silu", "identity", "swiglu")},
    "experts, shares": experts("silu", normalize_routing_weights=1),
    "experts, one": experts("silu", k=1),
    "experts, all": experts("silu", k=EXPERTS),
    "experts, gathered": experts("silu", count=9, normalize_routing_weights=1),
    "experts, gathered, one": experts("gelu", k=1, count=3),
    "experts, gathered, tokens": experts("swiglu", k=2, count=8, x=floats(7, D)),
    "experts, no bias": experts("swiglu", biased=False),
    "experts, limit": experts(
        "swiglu", swiglu_limit=0.5, activation_alpha=1.702, activation_beta=1.0, normalize_routing_weights=1
    ),
    "experts, as wide as a token": experts(
        "swiglu", w1=floats(EXPERTS, 2 * D, D), b1=floats(EXPERTS, 2 * D), w2=floats(EXPERTS, D, D)
    ),
    "packed experts": packed_experts(4),
    "packed experts, zero points": packed_experts(4, points=True),
    "packed experts, blocks": packed_experts(4, 32, size=128, k=1),
    "packed experts, blocks, zero points": packed_experts(4, 16, points=True, normalize_routing_weights=1),
    "packed experts, mixed": packed_experts(4, 32, mix=True),
    "packed experts, mixed, shares": packed_experts(4, mix=True, normalize_routing_weights=1, swiglu_limit=0.5),
    "packed experts, 8 bits": packed_experts(8),
    "packed experts, 8 bits, zero points": packed_experts(8, points=True),
    "packed experts, 2 bits": packed_experts(2, 16),
    "packed experts, 2 bits, zero points": packed_experts(2, points=True),
    "8 bits": n_bits(8),
    "fp4": bnb(0),
    "nf4": bnb(1, 16, 4),
    "nf4, an odd count": bnb(1, 13, 5),
    "8 bits, zero points, bias": n_bits(8, "packed", bias=True),
    **{
        f"{rule}, {positions}{', past' * past}": linear_attention(rule, positions, past=past)
        for rule in ("linear", "gated", "delta", "gated_delta")
        for positions, past in ((S, False), (40, True))
    },
    "gated_delta, more values": linear_attention("gated_delta", 34, (1, 2, 4), past=True),
    "gated_delta, more queries": linear_attention("gated_delta", 34, (4, 1, 2), past=True, scale=0.7),
    "linear, more queries": linear_attention("linear", S, (4, 2, 2)),
    "gated, a decay for each": linear_attention("gated", S, for_each=True, past=True),
    "gated_delta, a decay for each, one rate": linear_attention(
        "gated_delta", S, (2, 1, 4), for_each=True, one_rate=True
    ),
    "delta, one rate": linear_attention("delta", 9, one_rate=True, chunk_size=2),
    "causal": causal(),
    "causal, past, silu": causal(past=True, activation="silu"),
    "causal, no bias, swish": causal(size=4, bias=False, activation="swish"),
    "causal, longer than the row": causal((B, 3, 2), size=5),
    "causal, one position": causal((B, 3, 1), past=True),
    "causal, dilation, channels last": causal((B, S, 3), dilation=2, channels_last=1),
    "causal, channels last, past": causal((B, S, 3), channels_last=1, past=True, activation="silu"),
    "gate": Case(
        "LinearAttentionGate",
        {"a": floats(B, S, 3), "bias": floats(3), "scale": -(floats(3) ** 2), "b": floats(B, S, 3)},
        outputs=("decay", "beta"),
    ),
    "gate, no rate": Case("LinearAttentionGate", {"a": floats(B, S, 3), "bias": floats(3), "scale": floats(3)}),
    "gated norm": Case("GatedRMSNorm", {"x": X, "scale": BETA[:4], "gate": Q}, {"epsilon": 1e-3}, {"scale": BETA[:4]}),
    "gated norm, sigmoid": Case(
        "GatedRMSNorm", {"x": X, "scale": GAMMA, "gate": Q}, {"activation": "sigmoid"}, {"scale": GAMMA}
    ),
    "gated sum": Case("GatedAdd", {"x": X, "z": Q, "gate": floats(B, S, 1)}),
    "rotary of three": rotary_of_three((B, N, S, 8)),
    "rotary of three, alternating": rotary_of_three((B, S, 16), mrope_layout=1, num_heads=2),
    "rotary of three, neighbours": rotary_of_three((B, N, S, 8), interleaved=1),
    "rotary of three, part of a head": rotary_of_three((B, S, 24), num_heads=2, rotary_embedding_dim=8, mrope_layout=1),
    "embedding": embedding(segments=True, mask=MASKS["rows"]),
    "embedding, positions": embedding(segments=True, positions=ints([0, 1, 1, 2, 3], [4, 3, 2, 1, 0])),
    "embedding, no segments": embedding(segments=False),
}


def classical(op_type: str, x: np.ndarray, **attributes: Any) -> Case:
    outputs = ("label", "y") if op_type.endswith("Classifier") else ("y",)
    return Case(op_type, {"x": x}, attributes, outputs=outputs, domain="ai.onnx.ml")


F = floats(6, 4)
F[0] = 0
ROWS, INTERCEPTS = floats(3, 4).ravel().tolist(), floats(3).tolist()
ROW = floats(4).tolist()
MIRRORED = {"coefficients": [-w for w in ROW] + ROW, "intercepts": [-0.1, 0.1]}
GAPS = F.copy()
GAPS[1, 2] = GAPS[4, 0] = np.nan

CLASSICAL = {
    "regressor": classical("LinearRegressor", F, coefficients=ROW, intercepts=[0.5]),
    "regressor, several": classical("LinearRegressor", F, coefficients=ROWS, intercepts=INTERCEPTS, targets=3),
    "regressor, no intercepts": classical("LinearRegressor", F, coefficients=ROWS, targets=3),
    "regressor, softmax": classical(
        "LinearRegressor", F, coefficients=ROWS, intercepts=INTERCEPTS, targets=3, post_transform="SOFTMAX"
    ),
    **{
        f"classifier, {post}": classical(
            "LinearClassifier",
            F,
            coefficients=ROWS,
            intercepts=INTERCEPTS,
            classlabels_ints=[3, 1, 7],
            multi_class=1,
            post_transform=post,
        )
        for post in ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO")
    },
    **{
        f"classifier, two mirrored rows, {post}": classical(
            "LinearClassifier", F, classlabels_ints=[0, 1], post_transform=post, **MIRRORED
        )
        for post in ("NONE", "LOGISTIC", "SOFTMAX")
    },
    "classifier, two rows": classical(
        "LinearClassifier",
        F,
        coefficients=ROWS[:8],
        intercepts=INTERCEPTS[:2],
        classlabels_ints=[0, 1],
        post_transform="LOGISTIC",
    ),
    "classifier, one row": classical(
        "LinearClassifier", F, coefficients=ROW, intercepts=[0.1], classlabels_ints=[4, 2]
    ),
    "classifier, one row, logistic": classical(
        "LinearClassifier",
        F,
        coefficients=ROW,
        intercepts=[0.1],
        classlabels_ints=[4, 2],
        post_transform="LOGISTIC",
    ),
    "classifier of integers": classical(
        "LinearClassifier",
        np.arange(12).reshape(3, 4),
        coefficients=ROWS,
        intercepts=INTERCEPTS,
        classlabels_ints=[3, 1, 7],
    ),
    "scaler": classical("Scaler", F, offset=ROW, scale=[1.0, 2.0, 3.0, 4.0]),
    "scaler, one number": classical("Scaler", F, offset=[0.5], scale=[2.0]),
    "scaler of integers": classical("Scaler", np.arange(8).reshape(2, 4), offset=[0.5], scale=[2.0]),
    **{f"normalizer, {norm}": classical("Normalizer", F, norm=norm) for norm in ("MAX", "L1", "L2")},
    "imputer": classical("Imputer", GAPS, imputed_value_floats=ROW, replaced_value_float=float("nan")),
    "imputer, one number": classical("Imputer", F, imputed_value_floats=[7.0], replaced_value_float=0.0),
    "features": Case(
        "ArrayFeatureExtractor",
        {"x": F, "i": np.array([2, 0], np.int64)},
        weights={"i": np.array([2, 0], np.int64)},
        domain="ai.onnx.ml",
    ),
    "binarizer": classical("Binarizer", F, threshold=0.3),
}

ALL = CASES | CLASSICAL
HYBRID = (
    "CausalConvWithState",
    "GatedAdd",
    "GatedRMSNorm",
    "LinearAttention",
    "LinearAttentionGate",
    "MRotaryEmbedding",
)
# onnxruntime 1.19 computes these wrong, or not at all.
NEWER = {
    "classifier, one row, logistic",
    "8 bits",
    "8 bits, zero points, bias",
    "4 bits, whole blocks, bias",
    "skip, one for all rows",
    "skip simplified, bias and sum",
    "attention, bias of scores",  # of one row for the whole batch
    "multi-head, mask",  # of fewer keys than queries
    "multi-head, lengths",
    *(name for name, case in CASES.items() if case.op_type in (*HYBRID, "MoE", "QMoE")),
}


NORMS = {"q_norm": floats(16), "k_norm": floats(16)}
CHUNKS: dict[str, Any] = {"lengths": (3, S), "counts": ints(3, S)}
BY_AUTOGRAD: dict[str, Any] = {
    "plain": {},
    "window, softcap, bias, sink": {
        **{"local_window_size": 2, "softcap": 2.0, "bias": floats(B, 4, S, S), "sink": floats(4)}
    },
    "smooth": {"smooth_softmax": 1, "scale": 0.5},
    "norms": NORMS,
    "norms, epsilons": {**NORMS, "q_norm_epsilon": 0.1, "k_norm_epsilon": 0.3},
    "norms, one epsilon": {**NORMS, "qk_norm_epsilon": 0.2},
    "norms, rotary, packed": {**NORMS, **TABLES, "do_rotary": 1, "packed": True},
    "norms, rotary, one key": {**NORMS, **TABLES, "do_rotary": 1, "of_keys": 1},
    "chunks": CHUNKS,
    "chunks, norms, rotary": {**CHUNKS, **NORMS, **TABLES, "do_rotary": 1},
    "chunks, window, bias": {**CHUNKS, "local_window_size": 2, "bias": floats(B, 1, S, S)},
}
PACKED_EXPERTS = [name for name in CASES if name.startswith("packed experts")]
GATES: dict[str, Any] = {"swiglu_limit": 0.4, "activation_alpha": 1.702, "activation_beta": 1.0}
BY_SCHEMA = {  # which the CPU provider lacks
    "gate beside": experts("swiglu", third=True, swiglu_fusion=0, runs=False, **GATES),
    "gate first": experts("swiglu", swiglu_fusion=2, runs=False, **GATES),
    "gate of another kind": experts("silu", third=True, runs=False, normalize_routing_weights=1),
    "gate, gathered": experts("silu", third=True, biased=False, count=8, runs=False),
    "sparse mixer": experts("silu", third=True, use_sparse_mixer=1, runs=False),
}


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the same numbers for the cases that a test makes, alone as among others."""
    monkeypatch.setattr("lowering_cases.RNG", np.random.default_rng(zlib.crc32(request.node.name.encode())))
