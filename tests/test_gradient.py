"""Every gradient rule against PyTorch's autograd, or finite differences of the runtime; static and dynamic, twice."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from gradient_cases import CASES, NON_DIFFERENTIABLE, Case, model_of, point, spaced
from torch_oracle import pytorch, second

import graphopt
import passes
from graphopt import GraphoptError, models
from graphopt.derivatives import normal_form
from graphopt.testing.gradients import (
    ORACLE_TOLERANCE,
    NamedArrays,
    NoOracle,
    Proof,
    check_gradient,
    computed,
    distance,
    gradient_model,
    in_precision,
    prove,
    random_seeds,
)
from passes.gradients.registry import NO_GRADIENT, REFUSED, RULES, no_gradient, rule

each_case = pytest.mark.parametrize("case", CASES, ids=str)

# ONNX Runtime 1.19 fuses Transpose and MatMul into an operator that it has no float64 kernel for.
DISABLED = ["MatmulTransposeFusion"]


def case_of(op_type: str, inputs: list[Any], **attributes: Any) -> Case:
    return Case(op_type, tuple(np.array(x) for x in inputs), attributes)


def precision(case: Case) -> type:
    return np.float64 if case.double else np.float32


def seeded(case: Case, dtype: type) -> NamedArrays:
    """Return what its gradient model is fed: inputs, and seeds of outputs."""
    outputs = computed(normal_form(model_of(case, precision(case))), point(case, precision(case)))
    return point(case, dtype) | {name: x.astype(dtype) for name, x in random_seeds(outputs).items()}


@functools.lru_cache(maxsize=8)
def differentiated(case: Case, dtype: type, dims: str = "static") -> ir.Model:
    return gradient_model(model_of(case, dtype, dims))


def run_in_onnxruntime(model: ir.Model, feeds: NamedArrays) -> NamedArrays:
    names = [str(y.name) for y in model.graph.outputs]
    if not names:
        return {}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(),
        options,
        ["CPUExecutionProvider"],
        disabled_optimizers=DISABLED,
    )
    types = {x.name: x.dtype.numpy() for x in model.graph.inputs if x.dtype is not None}
    taken = {x.name: feeds[x.name].astype(types[x.name]) for x in session.get_inputs()}
    return dict(zip(names, session.run(names, taken), strict=True))


def has_kernel(model: ir.Model, feeds: NamedArrays) -> bool:
    try:
        run_in_onnxruntime(model, feeds)
    except Exception:  # noqa: BLE001 - the bindings of two versions raise types of their own
        return False
    return True


def proved(case: Case) -> Proof:
    """Return the proof of a case's gradients in float64."""
    options = {} if case.double else {"double": False, "step": 1e-2}
    model = model_of(case, precision(case))
    return prove(model, point(case, precision(case)), tolerance=case.tolerance, oracle=pytorch, **options)


def check_equal(what: str, found: NamedArrays, proof: Proof, tolerance: float) -> None:
    for name, expected in proof.gradients.items():
        gradient = found.get(f"{name}.grad", np.zeros_like(expected))
        assert distance(gradient, expected) <= tolerance, f"{what}, {name}: {gradient}, expected {expected}"


def check_in_float32(case: Case, proof: Proof) -> None:
    """Compare with the runtime's gradients in float32, with static dimensions, a dynamic batch and no known sizes."""
    seeds = seeded(case, np.float32)
    for dims in ("static", "leading", "unknown"):
        model = model_of(case, np.float32, dims)
        if dims == "unknown" and case.rigid:
            continue
        try:
            found = run_in_onnxruntime(differentiated(case, np.float32, dims), seeds)
        except Exception:
            if has_kernel(model, point(case, np.float32)):
                raise
            return
        check_equal(f"{dims} in float32", found, proof, 2e-5)


def check_in_float64(case: Case, proof: Proof) -> None:
    """The gradient needs no kernel for float64 that the operator itself does not."""
    model = model_of(case, np.float64)
    if has_kernel(model, point(case, np.float64)):
        found = run_in_onnxruntime(differentiated(case, np.float64), seeded(case, np.float64))
        check_equal("in float64", found, proof, 1e-6)


def check_valid(case: Case) -> None:
    """The gradient is valid, standard ONNX, of operators with gradients of their own."""
    for dtype in (np.float16, np.float32) if case.double else (np.float32,):
        model = differentiated(case, dtype, "leading")
        if all(x.shape is not None for x in model.graph.inputs):  # the checker has no unknown rank
            onnx.checker.check_model(ir.to_proto(model), full_check=True)
        assert {(node.domain, node.op_type) for node in model.graph} <= {*RULES, *NO_GRADIENT}
        assert all(node.domain == "" for node in model.graph)


@each_case
@pytest.mark.slow
def test_gradient(case: Case) -> None:
    if case.newer and onnxruntime.__version__.startswith("1.19"):
        pytest.skip(f"onnxruntime 1.19: {case.newer}")
    proof = proved(case)
    assert not proof.vacuous or proof.by_nature, "a rule that returns zeros would pass"
    assert proof.compared == proof.total
    if case.runtime:
        check_in_float32(case, proof)
    if case.runtime and case.double and case.op_type != "Sin":  # ONNX Runtime 1.19 has Sin in float64, and Cos not
        check_in_float64(case, proof)
    check_valid(case)


@each_case
@pytest.mark.sample(150)
def test_gradient_of_a_gradient(case: Case) -> None:
    first = differentiated(case, np.float64) if case.double else None
    if first is None or case.once or not first.graph.outputs:
        pytest.skip(case.once or case.quirk or "the gradient is 0")
    feeds = seeded(case, np.float64)
    further = random_seeds(computed(first, feeds))
    try:
        model = in_precision(normal_form(model_of(case, np.float64)), ir.DataType.DOUBLE)
        expected = second(model, feeds, further)
    except NoOracle:
        check_gradient(first, feeds, tolerance=2e-6)
        return
    found = computed(gradient_model(first), feeds | further)
    for name, gradient in expected.items():
        error = distance(found.get(f"{name}.grad", np.zeros_like(gradient)), gradient, 1e-3)
        assert error <= ORACLE_TOLERANCE[ir.DataType.DOUBLE], f"{name} by {error:.1e}"


TINY = [1e-25, 1e-10, -1e-10, 0.0, 3.0]
KINKS: list[tuple[type, Case, list[Any]]] = [
    *(
        (dtype, case, expected)
        for dtype in (np.float32, np.float64)
        for case, expected in [
            (case_of("Relu", [TINY]), [[1, 1, 0, 0, 1]]),
            (case_of("LeakyRelu", [TINY], alpha=0.25), [[1, 1, 0.25, 0.25, 1]]),
            (case_of("Abs", [TINY]), [[1, 1, -1, 0, 1]]),
            (case_of("ThresholdedRelu", [[0.5, 0.75]], alpha=0.5), [[0, 1]]),
            (case_of("PRelu", [TINY, [0.25]]), [[1, 1, 0.25, 1, 1], [-1e-10]]),
            (case_of("HardSigmoid", [[-1.0, 0.0, 1.0]], alpha=0.5, beta=0.5), [[0, 0.5, 0]]),
            (case_of("Clip", [[-1.0, 0.5, 2.0, 3.0], -1.0, 2.0]), [[1, 1, 1, 0], 0, 1]),
            (case_of("Max", [[1.0, 2.0], [1.0, 3.0], [1.0, 3.0]]), [[1, 0], [0, 1], [0, 0]]),
            (case_of("Min", [[1.0, 4.0], [1.0, 3.0], [1.0, 3.0]]), [[1, 0], [0, 1], [0, 0]]),
            (case_of("LpNormalization", [[[0.0, 0.0], [3.0, 4.0]]]), [[[1, 1], [0.032, -0.024]]]),
            (case_of("LpNormalization", [[[0.0, 0.0], [1.0, -3.0]]], p=1), [[[1, 1], [0.375, 0.125]]]),
        ]
    ),
    (
        np.float32,
        case_of("MaxPool", [[[[1.0, 1, 0, 2, 5, 5, 5]]]], kernel_shape=[3], strides=[3]),
        [[[[1, 0, 0, 0, 1, 0, 0]]]],
    ),
]


@pytest.mark.parametrize(("dtype", "case", "expected"), KINKS, ids=str)
def test_gradient_at_a_kink(dtype: type, case: Case, expected: list[Any]) -> None:
    """A slope of one of its sides, equal extremes share or the first has it all, and a norm of 0 counts as 1."""
    model = gradient_model(model_of(case, dtype))
    feeds = seeded(case, dtype)
    found = computed(model, {name: np.ones_like(x) if name == "y0.seed" else x for name, x in feeds.items()})
    for i, gradient in enumerate(expected):
        np.testing.assert_allclose(found[f"x{i}.grad"], gradient, rtol=1e-5, atol=1e-12)


def test_every_rule_has_a_case() -> None:
    elsewhere = {"If", "Scan", "Loop", "RNN", "GRU", "LSTM"}  # test_control_flow, test_recurrent
    elsewhere |= {"QuantizeLinear", "DynamicQuantizeLinear"}  # test_quantization
    assert {op_type for domain, op_type in RULES if domain == ""} - elsewhere == {case.op_type for case in CASES}


@pytest.mark.parametrize("case", NON_DIFFERENTIABLE, ids=str)
def test_no_gradient_flows_through(case: Case) -> None:
    assert not gradient_model(model_of(case, np.float64)).graph.outputs
    assert ("", case.op_type) in NO_GRADIENT


def test_no_operator_is_named_twice_and_all_exist() -> None:
    assert not NO_GRADIENT & RULES.keys() | NO_GRADIENT & REFUSED.keys() | REFUSED.keys() & RULES.keys()
    for domain, op_type in NO_GRADIENT | RULES.keys() | REFUSED.keys():
        assert onnx.defs.has(op_type, domain), op_type


def parsed(text: str) -> onnx.ModelProto:
    header = '<ir_version: 10, opset_import: ["": 21, "user": 1]>'
    return onnx.parser.parse_model(header + text)


def test_rows_that_are_added_to_one_are_not_lost() -> None:
    """ONNX Runtime splits a ScatterND that adds among threads, and loses rows of any width (tests/faults.py)."""
    step = graphopt.compile(models.transformer((8,), 20, width=8, layers=1), loss=passes.CausalLanguageModel())
    kinds = {node.op_type for node in step.graph.all_nodes()}
    assert "ScatterElements" in kinds and "ScatterND" not in kinds


@pytest.mark.parametrize(("shape", "count"), [((0, 5, 3), 2), ((2, 5, 0), 2), ((2, 5, 3), 0)])
def test_gathered_axes_of_no_elements_have_gradients(shape: tuple[int, ...], count: int) -> None:
    graph = parsed("g (float[N, 5, W] x, int64[K] i) => (float[N, K, W] y) { y = Gather<axis=1>(x, i) }")
    feeds = {"x": np.ones(shape, np.float32), "i": np.arange(count)}
    expected = np.zeros(shape, np.float32)
    expected[:, :count] = 1
    found = graphopt.run(graphopt.grad(graph, ["x"]), feeds)["y.grad.x"]
    np.testing.assert_array_equal(found, expected)


def test_gathered_numbers_of_16_bits_have_gradients() -> None:
    graph = parsed("g (float16[3] x, int64[K] i) => (float16[K] y) { y = Gather(x, i) }")
    feeds = {"x": np.ones(3, np.float16), "i": np.array([0, -1, 0])}
    found = graphopt.run(graphopt.grad(graph, ["x"]), feeds)["y.grad.x"]
    np.testing.assert_array_equal(found, np.array([2, 0, 1], np.float16))


def test_an_output_that_nothing_uses_has_a_zero_gradient() -> None:
    model = parsed("g (float[4] x) => (float[2] y) { a, b = Split<axis = 0, num_outputs = 2>(x) y = Mul(a, a) }")
    found = check_gradient(model, {"x": spaced(4)})
    assert found["x"][2:].tolist() == [0, 0]


def test_gradients_of_several_uses_and_of_inputs_on_the_way_add_up() -> None:
    check_gradient(
        parsed("g (float[2, 3] x, float[3] w) => (float[2, 3] y, float[2, 3] z) { y = Mul(x, w) z = Div(y, x) }"),
        {"x": spaced(2, 3), "w": spaced(3)},
    )


def test_a_further_output_that_its_rule_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, ("", "LayerNormalization"), lambda op, dy, x, w: [dy])
    model = parsed(
        "g (float[4, 3] x, float[3] w) => (float[4, 3] y, float[4, 1] m) { y, m = LayerNormalization(x, w) }"
    )
    with pytest.raises(GraphoptError, match="'m'"):
        gradient_model(model)


def test_all_operators_without_a_rule_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, ("", "Tanh"))
    monkeypatch.delitem(RULES, ("", "Exp"))
    with pytest.raises(GraphoptError, match=r"Exp .*blocks 'x'.*Tanh .*blocks 'x'"):
        gradient_model(parsed("g (float[4] x) => (float[4] y) { a = Exp(x) y = Tanh(a) }"))


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, ("", "Tanh"), lambda op, dy, x, *, y: [dy * y])
    with pytest.raises(GraphoptError, match=r"gradients differ .* 'x' by"):
        check_gradient(parsed("g (float[4] x) => (float[4] y) { y = Tanh(x) }"), {"x": spaced(4)})


def test_users_register_rules_of_their_own() -> None:
    @rule("Foo", domain="user.test")
    def foo(op: Any, dy: ir.Value, x: ir.Value, *, y: ir.Value) -> list[ir.Value]:
        return [dy * y]

    no_gradient("Bar", domain="user.test")
    try:
        assert RULES["user.test", "Foo"] is foo
        assert ("user.test", "Bar") in NO_GRADIENT
    finally:
        del RULES["user.test", "Foo"]
        NO_GRADIENT.remove(("user.test", "Bar"))


@pytest.mark.parametrize("outputs", ["y, m", "y, m, s"])
def test_statistics_of_a_layer_normalization_have_gradients(outputs: str) -> None:
    results = ", ".join(f"float[4, {3 if name == 'y' else 1}] {name}" for name in outputs.split(", "))
    model = parsed(f"g (float[4, 3] x, float[3] w) => ({results}) {{ {outputs} = LayerNormalization(x, w) }}")
    check_gradient(model, {"x": spaced(4, 3), "w": spaced(3)}, oracle=pytorch)


def test_an_operator_that_is_a_function_is_differentiated_through_its_body() -> None:
    model = parsed(
        "g (float[2, 4, 3] x, float[4] w, float[4] b) => (float[2, 4, 3] y)"
        "{ y = GroupNormalization<num_groups = 2>(x, w, b) }"
    )
    check_gradient(model, {"x": spaced(2, 4, 3), "w": spaced(4), "b": spaced(4)})


def test_a_loss_that_is_a_function_of_functions_has_a_gradient() -> None:
    model = parsed(
        "g (float[3, 4] x, float[4] w) => (float y) {"
        "t = Constant<value = int64[3] {1, 3, 0}>() y = SoftmaxCrossEntropyLoss(x, t, w) }"
    )
    check_gradient(model, {"x": spaced(3, 4), "w": np.arange(1.0, 5.0)})


PARTS = [
    [(0, 4), (4, 8), (8, 12)],  # all of it
    [(8, 12), (0, 4), (4, 8)],
    [(0, 5), (5, 9)],  # the rest stays 0
    [(1, 4), (4, 8)],
    [(0, 4), (5, 12)],  # apart
    [(0, 6), (3, 9)],  # overlapping
    [(0, 6), (0, 6), (6, 12)],  # two of which are joined
]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_gradients_of_parts_add_up(parts: list[tuple[int, int]], axis: int) -> None:
    """Those that lie side by side are joined."""
    shape = [12, 3] if axis == 0 else [3, 12]
    nodes = [f"axes = Constant<value_ints=[{axis}]>()"]
    for i, (start, end) in enumerate(parts):
        nodes += [f"a{i} = Constant<value_ints=[{start}]>()", f"b{i} = Constant<value_ints=[{end}]>()"]
        nodes += [f"p{i} = Slice(x, a{i}, b{i}, axes)", f"t{i} = Sin(p{i})", f"s{i} = ReduceSum(t{i})"]
    sums = ", ".join(f"s{i}" for i in range(len(parts)))
    model = parsed(f"g (float[{shape[0]},{shape[1]}] x) => (float[1,1] y) {{ {' '.join(nodes)} y = Sum({sums}) }}")
    check_gradient(model, {"x": spaced(*shape)})
    operators = [node.op_type for node in gradient_model(model).graph]
    assert ("Concat" in operators) == (parts not in PARTS[4:6])
