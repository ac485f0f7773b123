"""Operators of other domains compute and train as ONNX Runtime computes them."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import model
from lowering_cases import (
    ALL,
    BETA,
    BIAS,
    EXPERTS,
    INNER,
    NEWER,
    OLD,
    PACKED_EXPERTS,
    ROW,
    ROWS,
    B,
    Case,
    D,
    F,
    H,
    K,
    N,
    Q,
    S,
    V,
    W,
    X,
    attention,
    bnb,
    bytes_,
    causal,
    classical,
    experts,
    floats,
    gemm,
    ints,
    linear_attention,
    lowered,
    multi_head,
    n_bits,
    numbers_of_its_own,  # noqa: F401
    packed_experts,
    rotary,
    rotary_of_three,
)
from steps import outputs

import graphopt
import passes
from graphopt.testing.gradients import check_gradient
from passes.lowering import qoperators
from passes.lowering.registry import LOWERINGS


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.runs])
def test_a_lowering_computes_what_the_runtime_does(name):
    if OLD and name in NEWER:
        pytest.skip("onnxruntime 1.19 lacks it")
    case = ALL[name]
    proto = case.model()
    model = lowered(proto)
    assert {node.domain for node in model.graph} == {""}
    found, expected = outputs(ir.to_proto(model), case.feeds), outputs(proto, case.feeds)
    for output in set(expected) - {"label"}:
        np.testing.assert_allclose(found[output], expected[output], rtol=1e-4, atol=case.tolerance)
        assert found[output].dtype == expected[output].dtype


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case.runs])
def test_a_lowering_has_the_gradient_of_what_it_computes(name):
    if name in ("simplified", "binarizer") or "integers" in name or name in PACKED_EXPERTS:
        pytest.skip("without a gradient, known to the checker under another name, or proved by autograd below")
    case = ALL[name]
    case.runs &= not (OLD and name in NEWER)
    point = {k: x for k, x in case.feeds.items() if k not in case.fixed_inputs}
    for k, x in point.items():
        if x.dtype == np.float32:
            spread = np.linspace(0.5, 0.9, x.size).reshape(x.shape)  # off the kinks at 0 and at equal numbers
            point[k] = np.where((x == 0) | np.isnan(x), spread, x).astype(np.float32)
    precision = {} if case.double else {"double": False, "step": 0.1, "tolerance": 1e-4}
    check_gradient(lowered(case.model()), case.feeds | point, sample=12, **({"tolerance": 1e-5} | precision))


def test_every_lowering_has_a_case():
    named = {case.op_type for case in ALL.values()} | {"TransposeMatMul", "SVMClassifier", "SVMRegressor"}
    named |= {"QuantizeLinear", "DequantizeLinear"}  # test_masters
    named |= {"GatherBlockQuantized"}  # test_packed_weights
    named |= {
        "ConvInteger",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
    }  # test_integer_products
    named |= {*qoperators.FORMS, "DynamicQuantizeLSTM"}  # test_integer_files
    assert {op_type for _, op_type in LOWERINGS} == named


def outputs_of(case: Case) -> np.ndarray:
    """Return what a lowered case computes, where the CPU provider has no such operator or form of it."""
    case.runs = False
    proto = case.model()
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    proto.graph.output[0].type.tensor_type.shape.dim.extend([onnx.TensorShapeProto.Dimension()] * 3)
    return outputs(ir.to_proto(lowered(proto)), case.feeds)["y"]


@pytest.mark.slow
def test_forms_that_the_cpu_provider_lacks_compute_what_their_parts_do():
    q, k, v = (floats(B, S, N, H) for _ in range(3))
    flat = [x.reshape(B, S, D) for x in (q, k, v)]
    whole = outputs(multi_head(*flat, bias=BIAS).model(), multi_head(*flat, bias=BIAS).feeds)["y"]
    packed = multi_head(np.stack([q, k, v], axis=3), None, None, bias=BIAS)
    half = multi_head(flat[0], np.stack([k, v], axis=3), None, bias=BIAS)
    for case in (packed, half):
        np.testing.assert_allclose(outputs_of(case), whole, rtol=1e-4, atol=1e-5)
    unbiased = outputs(attention(bias=0 * BIAS).model(), attention().feeds | {"b": 0 * BIAS})["y"]
    np.testing.assert_allclose(outputs_of(attention(bias=None)), unbiased, rtol=1e-4, atol=1e-5)
    x, residual = floats(B, S, D), floats(B, S, D)
    dropout = Case("BiasDropout", {"x": x, "b": BETA, "residual": residual})
    np.testing.assert_allclose(outputs_of(dropout), x + BETA + residual, rtol=1e-6)
    softmax = Case("BiasSoftmax", {"x": x, "b": floats(1, 1, D)}, {"axis": 2})
    exponents = np.exp(x + softmax.inputs["b"])
    np.testing.assert_allclose(outputs_of(softmax), exponents / exponents.sum(-1, keepdims=True), rtol=1e-4)


REFUSED = {
    "attribute do_rotary=1": attention(do_rotary=1),
    "its attribute novel=3 is not covered": Case("QuickGelu", {"x": X}, {"novel": 3}),
    "its input 8, 'more', is not covered": Case(
        "MultiHeadAttention",
        dict.fromkeys(("q", "k", "v", "bias", "mask", "attention_bias", "none"))
        | {"q": Q, "k": K, "v": V, "past_key": Q, "more": Q},
        {"num_heads": N},
    ),
    "its input 2, 'c', is not covered": Case("BiasGelu", {"x": X, "b": BETA, "c": BETA}),
    "expected attributes or inputs num_heads, found none": Case("Attention", {"x": X, "w": W, "b": BIAS}),
    "attribute scale=2.0": rotary(X, ints(0), scale=2.0),
    "attribute is_packed_batching=1": rotary(X, ints(0), is_packed_batching=1),
    "attribute bits=3": n_bits(3),
    "packed zero points 'zeros' beside groups are not covered": n_bits(4, "packed", act_order=True),
    "quant_type=2": bnb(2),
    "to be initializers of 30 bytes": replace(
        bnb(1), inputs=bnb(1).inputs | {"b": bytes_(7)}, weights=bnb(1).weights | {"b": bytes_(7)}
    ),
    "attribute state_window=2": causal(state_window=2),
    "ndim=2": causal(ndim=2),
    "activation='relu'": causal(activation="relu"),
    "update_rule='novel'": linear_attention("novel"),
    "expected inputs decay and beta as update_rule='delta'": replace(
        linear_attention("gated"), attributes={**linear_attention("gated").attributes, "update_rule": "delta"}
    ),
    "mrope_section=[1, 1, 1]": rotary_of_three((B, S, 16), mrope_section=[1, 1, 1], num_heads=2),
    "to be an initializer": Case(
        "MatMulNBits",
        {"x": floats(2, 32), "b": bytes_(3, 2, 8), "scales": floats(6)},
        {"K": 32, "N": 3, "block_size": 16},
    ),
    "activation 'Nothing' is not covered": gemm("Nothing"),
    "axis=1 is not covered: expected the last axis": Case("BiasSoftmax", {"x": X, "b": X}, {"axis": 1}),
    "of 4 axes is not covered": attention(np.ones((B, 1, 6, 6), np.int32)),
    "expected query, key and value": multi_head(Q, None, None),
    "post_transform='PROBIT'": classical("LinearRegressor", F, coefficients=ROWS, targets=3, post_transform="PROBIT"),
    "post_transform='LOGISTIC' of one target": classical(
        "LinearRegressor", F, coefficients=ROW, post_transform="LOGISTIC"
    ),
    "norm='L3'": classical("Normalizer", F, norm="L3"),
    "3 labels are not covered": classical(
        "LinearClassifier", F, coefficients=ROW, intercepts=[0.1], classlabels_ints=[1, 2, 3]
    ),
    "attribute k=6: expected 1 to 5, the number of experts": experts(k=EXPERTS + 1),
    "attribute k=-1: expected 1 to 5": experts(k=-1),
    "attribute k=0: expected 1 to 5": experts(k=0),
    "activation_type='geglu' and swiglu_fusion=0": experts("geglu"),
    "swiglu_fusion=3": experts("swiglu", swiglu_fusion=3),
    "attribute swiglu_limit=-1.0: expected a number above 0": experts("swiglu", swiglu_limit=-1.0),
    "fc3_experts_weights: expected one with": experts("swiglu", swiglu_fusion=0),
    "fc3_experts_weights: expected none with": experts("swiglu", third=True),
    "use_sparse_mixer=1 is not covered with k=2 and no third product": experts(use_sparse_mixer=1),
    "use_sparse_mixer=1 is not covered with k=1": experts(use_sparse_mixer=1, k=1, third=True),
    "swiglu_limit_after_activation=1 is not covered": experts("swiglu", swiglu_limit_after_activation=1),
    "'w1' of shape [5, 6, 8], found [5, 8, 6]": experts(w1=floats(EXPERTS, D, INNER), biased=False),
    "'w2' of shape [5, 8, 6], found [5, 7, 6]": experts(w2=floats(EXPERTS, D - 1, INNER), biased=False),
    "'b2' of shape [5, 8], found [5, 9]": experts(b2=floats(EXPERTS, D + 1)),
    "'b1' of shape [5, 12], found [5, 6]": experts("swiglu", b1=floats(EXPERTS, INNER)),
    "block_size=24": packed_experts(4, 32, block_size=24),
    "block_size=-32": packed_experts(4, 32, block_size=-32),
    "'s1' of shape [4, 64, 4], found [4, 64, 2]": packed_experts(4, 32, block_size=16),
    "'w1' of shape [4, 32, 64], found [4, 64, 32]": packed_experts(4, expert_weight_bits=8),
    "weights of [3, 3] bits": packed_experts(4, expert_weight_bits=3),
    "quant_type='fp4'": packed_experts(4, quant_type="fp4"),
    "weights_prepacked=1": packed_experts(4, weights_prepacked=1),
    "attribute k=9223372036854775807": packed_experts(4, k=2**63 - 1),
    "kernel machine": classical("SVMRegressor", F, coefficients=[1.0]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_lowering_does_not_cover_is_refused(message):
    case = REFUSED[message]
    case.runs = False
    case.outputs = ("label", "y") if case.op_type == "LinearClassifier" else ("y",)
    node = case.model()
    with pytest.raises(graphopt.GraphoptError, match=f"cannot lower .*{case.op_type} node 'case': ") as raised:
        lowered(node)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_users_own_rule_comes_before_a_lowering(monkeypatch):
    from passes.gradients.registry import RULES

    monkeypatch.setitem(RULES, ("com.microsoft", "QuickGelu"), lambda op, dy, x: [dy])
    proto = Case("QuickGelu", {"x": X}).model()
    model = graphopt.load(proto)
    model.graph.node("case").outputs[0].type = model.graph.inputs[0].type
    passes.Normalize()(model)
    assert [node.op_type for node in model.graph] == ["QuickGelu"]


def test_operators_in_bodies_are_lowered():
    proto = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 20, "com.microsoft" : 1]>
        g (bool c, float[N,4] x) => (float[N,4] y) {
            y = If (c) <then_branch = t () => (float[N,4] a) { a = com.microsoft.QuickGelu(x) },
                else_branch = e () => (float[N,4] b) { b = com.microsoft.Gelu(x) }>
        }"""
    )
    for c in (True, False):
        feeds = {"c": np.array(c), "x": floats(3, 4)}
        model = lowered(proto)
        assert {node.domain for node in model.graph.all_nodes()} == {""}
        np.testing.assert_allclose(
            outputs(ir.to_proto(model), feeds)["y"], outputs(proto, feeds)["y"], rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("name", ["4 bits", "4 bits, floating zero points", "rotary", "scaler", "imputer"])
def test_packed_weights_caches_and_statistics_do_not_train(name):
    model = lowered(ALL[name].model())
    with pytest.raises(graphopt.GraphoptError, match="nothing to train"):
        passes.Parameters()(model)


WRITTEN_OUT = {
    "(x p) / 2": ("s = Div(x, r2) e = Erf(s) p = Add(e, one) m = Mul(x, p) y = Mul(m, half)", ["Gelu"]),
    "x (p / 2)": ("s = Mul(x, r) e = Erf(s) p = Add(one, e) m = Mul(half, p) y = Mul(x, m)", ["Gelu"]),
    "(x / 2) p": ("s = Div(x, r2) e = Erf(s) p = Add(one, e) m = Mul(half, x) y = Mul(p, m)", ["Gelu"]),
    "not quite": (
        "s = Mul(x, half) e = Erf(s) p = Add(e, one) m = Mul(x, p) y = Mul(m, half)",
        ["Mul", "Erf", "Add", "Mul", "Mul"],
    ),
}


@pytest.mark.parametrize("form", WRITTEN_OUT)
def test_a_gelu_that_is_written_out_is_one(form):
    text, operators = WRITTEN_OUT[form]
    numbers = {"r2": 2**0.5, "r": 0.5**0.5, "one": 1.0, "half": 0.5}
    used = {name: np.array(number) for name, number in numbers.items() if re.search(rf"\b{name}\b", text)}
    proto = model(f"g (float[N,5] x) => (float[N,5] y) {{ {text} }}", **used)
    normalized = graphopt.load(proto)
    passes.Normalize()(normalized)
    assert [node.op_type for node in normalized.graph] == operators
    x = np.linspace(-6, 6, 50, dtype=np.float32).reshape(10, 5)
    expected, found = (outputs(m, {"x": x})["y"] for m in (proto, normalized))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
