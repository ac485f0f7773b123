"""Gradients of onnxruntime-training's builder against those of the rules, and what it refuses."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_node_tests
import onnxruntime
import pytest
import torch_models
from builders import attention, linear, mlp, model
from gradient_cases import CASES
from gradient_cases import Case as RuleCase
from onnx_node_tests import SOURCE_TOLERANCE, Case, cases, source_refusal
from test_gradient import model_of, proved, seeded

import graphopt
import passes
from graphopt import models
from graphopt.graph import roles
from graphopt.graph.metadata import RUNTIME
from graphopt.graph.roles import TRAINING_RUNTIME, Role
from graphopt.inspection.report import report
from graphopt.runtime.executor import run as execute
from graphopt.testing.gradients import FATAL, distance, finite, gradient_model
from passes import ort_gradient

TRAINS = hasattr(onnxruntime.capi._pybind_state, "GradientGraphBuilder")
training = pytest.mark.skipif(not TRAINS, reason="onnxruntime-training is not installed")
stock = pytest.mark.skipif(TRAINS, reason="onnxruntime-training is installed")

# Node tests whose gradients differ, and why.
DIFFERENT = {
    "test_attention_3d_transpose_verification": "4e-5 in float32, in which the rules' is 9e-6 from float64",
    **dict.fromkeys(
        (
            "test_attention_23_boolmask_fullymasked_row_nan_robustness",
            "test_attention_23_fullymasked_qk_matmul_output_mode3_zero",
            "test_attention_24_fullymasked_qk_matmul_output_mode3_zero",
            "test_attention_24_qk_matmul_output_mode3_softmax_precision",
            "test_attention_4d_causal_nonpad_negative_offset_structural_empty",
            "test_attention_local_window_gqa_rank4_mask",
        ),
        "a row that is masked whole: SoftmaxGrad multiplies its NaN by 0, and the gradient is NaN",
    ),
}
# Of sizes with different names it takes none to be 1, as only the run shows: a gradient then has the broadcast shape,
# which no parameter, of a known shape, can have.
STRETCHED = {"Add", "Sub", "Mul", "Max", "Min", "MatMul", "Gemm", "Expand"}
TOTAL, AGREE = 896, 462
SAMPLE, SAMPLE_AGREE = slice(None, None, 9), 55


MODELS = {
    "linear": linear,
    "mlp": mlp,
    "mlp in double": lambda: mlp(dtype=np.float64),
    "relu": lambda: mlp(activation="Relu"),
    "attention": attention,
    "built-in linear": lambda: models.linear((3,), 2),
    "built-in mlp": lambda: models.mlp((3,), 2),
    "built-in cnn": lambda: models.cnn((2, 5, 7), 3),
    "built-in transformer": lambda: models.transformer((6,), 9),
    **{
        f"{name} by {exporter}": functools.partial(torch_models.exported, name, exporter)
        for name in torch_models.MODELS
        for exporter in ("dynamo", "torchscript")
    },
}
REFUSED = {"cnn": "AveragePool", "resnet": "BatchNormalization"}


def feeds_of(step: ir.Model) -> dict[str, np.ndarray]:
    """Return random data, and the initial state."""
    random = np.random.default_rng(0)
    feeds = {}
    for x in step.graph.inputs:
        if x.const_value is not None:
            feeds[x.name] = x.const_value.numpy()
            continue
        shape = [dim if isinstance(dim, int) else 5 for dim in x.shape]
        integers = not x.dtype.is_floating_point()
        array = random.integers(0, 5, shape) if integers else random.standard_normal(shape)
        feeds[x.name] = array.astype(x.dtype.numpy())
    return feeds


def compiled(source: Any, **steps: Any) -> ir.Model:
    return graphopt.compile(source, **{"loss": passes.MeanSquaredError(), **steps})


@training
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_gradients_of_the_rules(name: str) -> None:
    source = MODELS[name]()
    expected = compiled(source)
    blocking = REFUSED.get(name.split(" by ")[0]) if " by " in name else None
    if blocking:
        with pytest.raises(graphopt.errors.NoGradient, match=blocking):
            compiled(source, gradient=passes.OrtGradient())
        return
    found = compiled(source, gradient=passes.OrtGradient())
    feeds = feeds_of(expected)
    ours, theirs = execute(expected, feeds), execute(found, feeds)
    assert list(ours) == list(theirs)
    largest = max(np.abs(array).max() for name, array in ours.items() if name.endswith(".grad"))
    for output, array in ours.items():  # a key's bias has no gradient but rounding: Softmax takes it out
        assert distance(theirs[output], array, 1e-3 * largest) <= SOURCE_TOLERANCE, output
    assert {y.name: (y.dtype, y.shape) for y in found.graph.outputs} == {
        y.name: (y.dtype, y.shape) for y in expected.graph.outputs
    }


@functools.cache
def node_tests() -> list[Case]:
    return list(cases())


def check_node_tests(some: list[Case], least: int) -> None:
    found = {case.name: source_refusal(case, passes.OrtGradient()) for case in some}
    differ = {name for name, problem in found.items() if "differs" in problem}
    assert differ == DIFFERENT.keys() & found.keys()
    assert not any(problem.startswith("Gradient:") for problem in found.values())
    assert sum(not problem for problem in found.values()) >= least


@training
def test_a_sample_of_node_tests_agrees() -> None:
    check_node_tests(node_tests()[SAMPLE], SAMPLE_AGREE)


@training
@pytest.mark.exhaustive
def test_node_tests_agree() -> None:
    assert len(node_tests()) == TOTAL
    check_node_tests(node_tests(), AGREE)


@training
def test_the_command_prints_who_refuses_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "onnx_node_tests",
        "--gradient",
        "onnxruntime",
        "Tanh",
        "Softplus",
        "ConvTranspose",
    ]
    monkeypatch.setattr("sys.argv", arguments)
    onnx_node_tests.main()
    _, transposed, softplus, tanh, total = capsys.readouterr().out.splitlines()
    assert tanh.split() == ["Tanh", "2", "2"]
    assert softplus.endswith("OrtGradient: Softplus: onnxruntime-training has none")
    assert "runtime: onnxruntime 1.19.2 refuses the graph" in transposed
    assert total.endswith("all cases of 1 of 3 operators")


def gradients_of_case(case: RuleCase, dims: str) -> dict[str, np.ndarray] | None:
    """Return the builder's gradients of a rule's case; None where it, or the runtime, refuses."""
    source = model_of(case, np.float32, dims)
    try:
        built = gradient_model(source, passes.OrtGradient())
    except graphopt.GraphoptError:
        return None
    try:
        return execute(built, seeded(case, np.float32))
    except Exception:  # noqa: BLE001 - a kernel is missing or refuses, aloud
        return None


def check_rule_case(case: RuleCase, dims: str) -> bool:
    found = gradients_of_case(case, dims)
    if found is None or case.op_type in FATAL:
        return False
    expected = execute(gradient_model(model_of(case, np.float32, dims)), seeded(case, np.float32))
    for name, gradient in proved(case).gradients.items():
        array = found.get(f"{name}.grad", np.zeros_like(gradient))
        if array.shape != gradient.shape:
            assert dims != "static" and case.op_type in STRETCHED, (str(case), name, array.shape)
            return False
        errors = [distance(finite(array), finite(x), 1e-3) for x in (gradient, expected.get(f"{name}.grad", gradient))]
        assert min(errors) <= SOURCE_TOLERANCE, (str(case), name, errors)
    return True


@training
@pytest.mark.parametrize("dims", ["static", "leading", "unknown"])
def test_a_sample_of_the_rules_cases_agrees_or_is_refused(dims: str) -> None:
    assert sum(check_rule_case(case, dims) for case in CASES[::9]) >= 10


@training
@pytest.mark.exhaustive
@pytest.mark.parametrize(("dims", "least"), [("static", 215), ("leading", 190), ("unknown", 160)])
def test_the_rules_cases_agree_or_are_refused(dims: str, least: int) -> None:
    assert sum(check_rule_case(case, dims) for case in CASES) >= least


# For each reason to refuse an operator: a graph in which the builder, unless it is kept from it, is wrong.
WRONG = [
    (
        "AveragePool",
        "auto_pad",
        "float[1,1,3,3] x",
        'AveragePool<kernel_shape=[2,2],auto_pad="SAME_LOWER">(x)',
    ),
    (
        "AveragePool",
        "ceil_mode",
        "float[1,1,5,5] x",
        "AveragePool<kernel_shape=[2,2],strides=[2,2],ceil_mode=1,count_include_pad=1>(x)",
    ),
    ("AveragePool", "dilations", "float[1,1,5,5] x", "AveragePool<kernel_shape=[2,2],dilations=[2,2]>(x)"),
    ("AveragePool", "three dimensions", "float[1,1,3,3,3] x", "AveragePool<kernel_shape=[2,2,2]>(x)"),
    ("AveragePool", "all sizes", "float[N,1,3,3] x", "AveragePool<kernel_shape=[2,2]>(x)"),
    ("Conv", "auto_pad", "float[1,1,3,3] x, float[1,1,2,2] w", 'Conv<auto_pad="SAME_UPPER">(x, w)'),
    ("Gelu", "exact", "float[2,3] x", 'Gelu<approximate="tanh">(x)'),
    ("Gemm", "scalar C", "float[2,3] x, float[3,4] w, float c", "Gemm<beta=1.3>(x, w, c)"),
    (
        "MaxPool",
        "storage_order",
        "float[1,1,4,6] x",
        "MaxPool<kernel_shape=[2,2],strides=[2,2],storage_order=1>(x)",
    ),
    ("MatMul", "matrices", "float[3] x", "MatMul(x, matrices)"),
    ("Where", "broadcasts", "float[2,3] x, float[3] w", "Where(condition, x, w)"),
    (
        "ScatterElements",
        "reduction",
        "float[2,3] x, float[2,1] w",
        'ScatterElements<reduction="mul">(x, at, w)',
    ),
    ("ScatterND", "reduction", "float[2,3] x, float[1,3] w", 'ScatterND<reduction="mul">(x, nd, w)'),
]
CONSTANTS = {
    "matrices": np.arange(24.0).reshape(2, 3, 4),
    "pads": np.array([1, 1]),
    "axes": np.array([1]),
    "condition": np.array([[True, False, True], [False, True, False]]),
    "at": np.array([[1], [0]]),
    "nd": np.array([[1]]),
}
SIZES = {"N": 2, "M": 1}


def wrong_model(inputs: str, body: str) -> onnx.ModelProto:
    used = {name: array for name, array in CONSTANTS.items() if name in body}
    proto = model(f"g ({inputs}) => (y) {{ y = {body} }}".replace("(y)", "(float y)", 1), **used)
    proto.graph.output[0].ClearField("type")
    return onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)


@training
@pytest.mark.parametrize(("op_type", "reason", "inputs", "body"), WRONG)
def test_what_the_builder_has_wrong_is_refused(
    op_type: str, reason: str, inputs: str, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = wrong_model(inputs, body)
    with pytest.raises(graphopt.errors.NoGradient, match=f"{op_type} .*{reason}"):
        gradient_model(source, passes.OrtGradient())
    monkeypatch.setattr(ort_gradient, "faults", lambda node, active: {})
    right, wrong = gradient_model(source), gradient_model(source, passes.OrtGradient())
    random = np.random.default_rng(0)
    feeds = {
        x.name: random.standard_normal([dim if isinstance(dim, int) else SIZES[str(dim)] for dim in x.shape])
        for x in right.graph.inputs
        if x.name != "y.seed"
    }
    feeds = {name: x.astype(np.float32) for name, x in feeds.items()}
    y = execute(source, feeds)["y"]
    feeds["y.seed"] = random.standard_normal(y.shape).astype(np.float32)
    expected = execute(right, feeds)
    try:
        found = execute(wrong, feeds)
    except Exception:  # noqa: BLE001 - the runtime refuses, aloud, what was built
        return
    assert max(distance(found[name], expected[name]) for name in expected) > 1e-4


@training
def test_a_pooling_gradient_that_knows_no_sizes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel reads the size of its output from the graph, takes 0 for a name, and writes past the end."""
    source = wrong_model("float[1,1,N,M] x", "MaxPool<kernel_shape=[1,1]>(x)")
    with pytest.raises(graphopt.errors.NoGradient, match=r"MaxPool .*all sizes of its input but the first"):
        gradient_model(source, passes.OrtGradient())
    monkeypatch.setattr(ort_gradient, "faults", lambda node, active: {})
    (node,) = [n for n in gradient_model(source, passes.OrtGradient()).graph if n.op_type == "MaxPoolGrad"]
    assert len(node.inputs) == 2  # the output's gradient and the mask: no size


@training
def test_statistics_of_a_layer_normalization_have_no_gradient_there() -> None:
    text = "g (float[2,3] x) => (float[2,3] y, float[2,1] mean) { y, mean = LayerNormalization(x, scale, shift) }"
    source = model(text, scale=np.ones(3), shift=np.zeros(3))
    with pytest.raises(graphopt.errors.NoGradient, match="ignores its mean and deviation"):
        gradient_model(source, passes.OrtGradient())


@training
def test_all_operators_that_the_builder_refuses_are_named_with_what_they_block() -> None:
    text = """g (float[N,3,8] x) => (float[N,3,8] y) {
        a = Mul(x, first)
        b = Softplus(a)
        c = Mul(b, second)
        d = Elu(c)
        y = Add(d, third)
    }"""
    random = np.random.default_rng(0)
    weights = {name: random.random(8) for name in ("first", "second", "third")}
    with pytest.raises(graphopt.errors.NoGradient) as caught:
        compiled(model(text, **weights), gradient=passes.OrtGradient())
    found = {x.operator: x for x in caught.value.operators}
    assert set(found) == {"Softplus", "Elu"}
    assert found["Softplus"].blocks == ("first",)
    assert found["Elu"].blocks == ("first", "second")
    assert all(found["Elu"].nodes)
    assert "\n" not in str(caught.value)
    assert "onnxruntime-training has none): use Gradient or freeze" in str(caught.value)


@training
def test_frozen_and_held_values_stay_so() -> None:
    parameters = passes.Parameters(freeze="fc0.*")
    step = compiled(mlp(), parameters=parameters, gradient=passes.OrtGradient())
    assert {v.name for v in roles.with_role(step, Role.GRADIENT)} == {"fc1.weight.grad", "fc1.bias.grad"}
    weight = onnx.numpy_helper.to_array(mlp().graph.initializer[0])
    assert (step.graph.initializers["fc0.weight"].const_value.numpy() == weight).all()  # nothing was folded
    text = "g (float[N,3] x) => (float[N,3] y) { h = Mul(x, a)\n r = Floor(h)\n s = Add(h, r)\n y = Mul(s, b) }"
    source = model(text, a=np.ones(3), b=np.full(3, 2.0))
    ours, theirs = compiled(source), compiled(source, gradient=passes.OrtGradient())
    feeds = feeds_of(ours)
    np.testing.assert_allclose(execute(theirs, feeds)["a.grad"], execute(ours, feeds)["a.grad"], rtol=1e-5)


@training
def test_a_loss_without_a_parameter_is_refused_as_by_the_rules() -> None:
    text = "g (float[N,3] x) => (float[N,3] y) { h = Mul(x, a)\n r = Floor(h)\n y = Add(r, b) }"
    source = model(text, a=np.ones(3), b=np.ones(3))
    steps = {"parameters": passes.Parameters(pattern=["a", "b"])}
    messages = []
    for gradient in (passes.Gradient(), passes.OrtGradient()):
        with pytest.raises(graphopt.GraphoptError, match="does not depend on 'a'") as caught:
            compiled(source, gradient=gradient, **steps)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@training
@pytest.mark.parametrize("name", ["mlp", "attention", "built-in cnn", "built-in transformer"])
def test_a_step_takes_the_steps_of_the_rules_and_survives_saving(name: str, tmp_path: Any) -> None:
    losses = []
    for gradient in (passes.Gradient(), passes.OrtGradient()):
        step = compiled(MODELS[name](), optimizer=passes.AdamW(0.01), gradient=gradient)
        graphopt.save(step, tmp_path / "step.onnx")
        executor = graphopt.Executor(tmp_path / "step.onnx", threads=1)
        feeds = {key: array for key, array in feeds_of(step).items() if key in executor.inputs}
        losses.append([executor.step(feeds)["loss"] for _ in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    loaded = graphopt.load(tmp_path / "step.onnx")
    assert RUNTIME.read(loaded) == TRAINING_RUNTIME
    assert {node.domain for node in executor.trained().graph.node} == {""}


@training
@pytest.mark.parametrize("name", ["mlp", "built-in cnn", "built-in transformer"])
def test_mixed_precision_takes_the_steps_of_the_rules(name: str) -> None:
    mixed = {"precision": passes.MixedPrecision(), "loss_scale": passes.DynamicLossScale()}
    losses = []
    for source in (passes.Gradient, passes.OrtGradient):
        gradient = source(loss_scale=2.0**10)
        step = compiled(MODELS[name](), gradient=gradient, optimizer=passes.SGD(1e-3), **mixed)
        executor = graphopt.Executor(step)
        feeds = {key: array for key, array in feeds_of(step).items() if key in executor.inputs}
        losses.append([executor.step(feeds)["loss"] for _ in range(5)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-3)


@training
def test_a_loss_in_blocks_of_tokens_is_refused() -> None:
    tokens, losses = np.random.default_rng(0).integers(0, 20, (4, 6)), []
    for gradient, blocks in ((passes.OrtGradient(), None), (passes.Gradient(), 3)):
        loss = passes.CausalLanguageModel(blocks=blocks)
        step = compiled(models.transformer((6,), 20), loss=loss, gradient=gradient, optimizer=passes.SGD(0.1))
        executor = graphopt.Executor(step, threads=1)
        losses.append([executor.step(x=tokens)["loss"] for _ in range(5)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    for loss in (passes.CausalLanguageModel(blocks=3), passes.CrossEntropy(axis=-1, blocks=2)):
        with pytest.raises(graphopt.GraphoptError, match=r"found one in blocks of tokens, .*: set blocks=None"):
            compiled(models.transformer((6,), 20), loss=loss, gradient=passes.OrtGradient())


@training
def test_the_pipeline_can_be_cut_after_the_gradient(tmp_path: Any) -> None:
    pipeline = graphopt.standard(
        loss=passes.MeanSquaredError(),
        gradient=passes.OrtGradient(),
        clip=passes.ClipGlobalNorm(),
        optimizer=passes.SGD(0.1),
    )
    graphopt.save(pipeline.until("gradient")(mlp()), tmp_path / "prefix.onnx")
    step, whole = pipeline.after("gradient")(tmp_path / "prefix.onnx"), pipeline(mlp())
    ours, theirs = execute(whole, feeds_of(whole)), execute(step, feeds_of(whole))
    assert all((ours[name] == theirs[name]).all() for name in ours)


@training
def test_a_model_compiles_alike_twice() -> None:
    steps = [compiled(attention(), gradient=passes.OrtGradient()) for _ in range(2)]
    assert len({graphopt.listing(step) for step in steps}) == 1


@training
def test_names_of_the_builder_may_be_taken() -> None:
    text = "g (float[N,3] x) => (float[N,3] y, float[N,3] w_grad) { y = Mul(x, w)\n w_grad = Neg(x) }"
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(output="y"), gradient=passes.OrtGradient())
    step = pipeline(model(text, w=np.ones(3)))
    feeds = feeds_of(step)
    found = execute(step, feeds)
    np.testing.assert_array_equal(found["w_grad"], -feeds["x"])
    expected = execute(graphopt.standard(loss=passes.MeanSquaredError(output="y"))(model(text, w=np.ones(3))), feeds)
    np.testing.assert_allclose(found["w.grad"], expected["w.grad"], rtol=1e-5)


@training
def test_a_newer_opset_is_refused() -> None:
    text = "g (float[N,4] x, int64 axis) => (float[N,4] y) { h = Mul(x, w)\n y = CumProd(h, axis) }"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(graphopt.GraphoptError, match=r"opset 21 and IR version 10 or older, found 26"):
            compiled(model(text, opset=26, w=np.ones(4)), gradient=passes.OrtGradient())


@training
def test_the_report_says_what_a_step_needs() -> None:
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), gradient=passes.OrtGradient(), optimizer=passes.SGD())
    assert f"needs      {TRAINING_RUNTIME}\n" in report(mlp(), pipeline).summary()


@stock
def test_without_onnxruntime_training_the_pass_says_what_to_install() -> None:
    with pytest.raises(
        graphopt.GraphoptError,
        match=r"^OrtGradient needs onnxruntime-training.*pip install onnxruntime-training",
    ):
        compiled(mlp(), gradient=passes.OrtGradient())


@stock
def test_without_onnxruntime_training_a_graph_that_needs_it_says_so() -> None:
    step = compiled(mlp(), optimizer=passes.SGD(fused=True))
    with pytest.raises(graphopt.GraphoptError, match=r"^the graph needs onnxruntime-training, found onnxruntime 1"):
        graphopt.Executor(step)
