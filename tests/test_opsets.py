"""The trained model comes back in the opset and the IR version that it came in, and computes the same."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch_models
from builders import attention, model
from onnx.reference import ReferenceEvaluator
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

import graphopt
import passes
from graphopt.graph.opsets import rewrite_in


def trained(proto, feeds, target, loss=None, **steps):
    """Return the trained model after two steps, and what the executor predicts."""
    step = graphopt.compile(proto, loss=loss or passes.MeanSquaredError(), optimizer=passes.SGD(0.01), **steps)
    executor = graphopt.Executor(step)
    for _ in range(2):
        executor.step(**feeds, target=target)
    return executor.trained(), executor.predict(**feeds)


def check(found, proto, predicted, feeds, opset=None):
    assert {x.domain: x.version for x in found.opset_import}[""] == (opset or proto.opset_import[0].version)
    assert found.ir_version == proto.ir_version
    onnx.checker.check_model(found, full_check=True)
    outputs = graphopt.run(onnx.ModelProto.FromString(found.SerializeToString()), feeds)
    for name, y in predicted.items():
        np.testing.assert_allclose(outputs[name], y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("opset", "ir_version"),
    [(9, 3), (9, 4), (10, 3), *zip(range(11, 22), [5, 6, 7, 3, 7, *[8] * 6], strict=True)],
)
def test_a_file_comes_back_as_it_came(opset, ir_version):
    """Written in the text form, whatever changed between the opsets."""
    axes = "" if opset >= 13 else "<axes=[1], keepdims=0>"
    given = ", one" if opset >= 13 else ""
    squeeze = f"s = Unsqueeze(r{given})" if opset >= 13 else "s = Unsqueeze<axes=[1]>(r)"
    proto = model(
        f"""g (float[N,6] x) => (float[N,3] y) {{
            one = Constant<value = int64[1] {{1}}>()
            h = Gemm<transB=1>(x, w, b)
            n = BatchNormalization(h, scale, shift, mean, var)
            c = {"Clip<max=0.9, min=-0.9>(n)" if opset < 11 else "Clip(n, low, high)"}
            p = Softmax<axis=1>(c)
            a, d = {"Split<axis=1, split=[3, 3]>(p)" if opset < 13 else "Split<axis=1>(p, parts)"}
            r = ReduceSum{axes or "<keepdims=0>"}(a{given})
            {squeeze}
            q = {"ReduceMean<axes=[1]>(d)" if opset < 18 else "ReduceMean(d, one)"}
            t = Mul(a, s)
            y = Add(t, q)
        }}""",
        opset=opset,
        w=np.random.default_rng(0).standard_normal((6, 6)),
        b=np.zeros(6),
        scale=np.linspace(1, 2, 6),
        shift=np.zeros(6),
        mean=np.linspace(-1, 1, 6),
        var=np.linspace(1, 3, 6),
        low=np.array(-0.9),
        high=np.array(0.9),
        parts=np.array([3, 3]),
    )
    proto.ir_version = ir_version
    used = {name for node in proto.graph.node for name in node.input}
    kept = [x for x in proto.graph.initializer if x.name in used]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    if ir_version < 4:
        infos = [onnx.helper.make_tensor_value_info(x.name, x.data_type, x.dims) for x in kept]
        proto.graph.input.extend(infos)
    x = np.random.default_rng(1).standard_normal((5, 6)).astype(np.float32)
    found, predicted = trained(
        proto, {"x": x}, np.ones((5, 3), np.float32), parameters=passes.Parameters(pattern=["w", "b"])
    )
    check(found, proto, predicted, {"x": x})
    if opset >= 14:  # before, onnx's evaluator normalizes by the batch
        again = ReferenceEvaluator(found).run(None, {"x": x})[0]
        np.testing.assert_allclose(again, predicted["y"], rtol=1e-4, atol=1e-5)


SOME = {("cnn", 11), ("resnet", 13), ("transformer", 14)}


@pytest.mark.parametrize(
    ("name", "opset"),
    [
        pytest.param(name, opset, marks=[] if (name, opset) in SOME else pytest.mark.exhaustive)
        for name in sorted(torch_models.MODELS)
        for opset in (11, 13, 14, 17, 18)
    ],
)
@pytest.mark.slow
def test_an_export_of_pytorch_comes_back_in_its_opset(name, opset):
    network, x, labels = torch_models.build(name)
    if name == "transformer" and opset < 14:
        pytest.skip("the exporter has scaled_dot_product_attention from opset 14 on")
    buffer = io.BytesIO()
    options = {"opset_version": opset, "input_names": ["x"], "output_names": ["y"], "dynamo": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, x, buffer, dynamic_axes={"x": {0: "batch"}}, **options)
    proto = onnx.load_from_string(buffer.getvalue())
    feeds = {"x": x.numpy()}
    found, predicted = trained(proto, feeds, labels.numpy(), passes.CrossEntropy())
    check(found, proto, predicted, feeds)
    assert found.producer_name == "pytorch"


@pytest.mark.slow
def test_a_classical_model_comes_back_with_its_labels():
    from skl2onnx import to_onnx

    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 4)).astype(np.float32)
    y = rng.integers(0, 3, 30)
    for estimator in (LogisticRegression(), MLPClassifier((5,), max_iter=20)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            estimator.fit(x, y)
        for opset in (12, 15, 17):
            options = {id(estimator): {"zipmap": False}}
            proto = to_onnx(estimator, x[:1], target_opset={"": opset, "ai.onnx.ml": 1}, options=options)
            step = graphopt.compile(
                proto,
                loss=passes.CrossEntropy(output="probabilities", from_logits=False),
                optimizer=passes.SGD(0.0),
            )
            found = graphopt.Executor(step).trained()
            wanted = next((o.version for o in proto.opset_import if o.domain == ""), None)
            if wanted is not None:
                assert {o.domain: o.version for o in found.opset_import}[""] == wanted
            outputs = graphopt.run(found, {"X": x})
            np.testing.assert_array_equal(outputs["label"], estimator.predict(x))


NEEDED = {  # operators that training brings in, or that this opset has not, and the opset that they need
    "LayerNormalization": (attention(), 17),
    "Gelu": (
        model(
            """g (float[N,3] x) => (float[N,3] y) {
                h = Mul(x, w)\n d = Div(h, c)\n e = Erf(d)\n f = Add(e, one)\n g = Mul(h, f)\n y = Mul(g, half)
            }""",
            opset=14,
            w=np.ones(3),
            c=np.array(2**0.5),
            one=np.array(1.0),
            half=np.array(0.5),
        ),
        14,
    ),
}


@pytest.mark.parametrize("name", NEEDED)
def test_an_operator_without_an_older_form_keeps_the_lowest_opset_that_has_it(name):
    proto, expected = NEEDED[name]
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.0))
    if name == "LayerNormalization":
        step.metadata_props["graphopt.came_in"] = '{"opset": 13, "ir_version": 7}'
    x = np.random.default_rng(0).standard_normal((2, 6, 4) if name == "LayerNormalization" else (2, 3))
    feeds = {"x": x.astype(np.float32)}
    executor = graphopt.Executor(step)
    found = executor.trained()
    assert found.opset_import[0].version == expected
    np.testing.assert_allclose(graphopt.run(found, feeds)["y"], executor.predict(feeds)["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("y = Softmax<axis=0>(h)", "N,3"),
        ('y = Resize<mode="linear">(h, , scales)', "N,3"),
        ("y = Add(h, h)", "N,3"),
    ],
)
@pytest.mark.parametrize("opset", [9, 10, 12, 13, 18])
def test_whatever_opset_is_asked_for_the_numbers_stay(text, dims, opset):
    """What would mean something else before an opset is not rewritten into it."""
    proto = model(
        f"g (float[N,3] x) => (float[{dims}] y) {{ h = Mul(x, w)\n {text} }}",
        w=np.array([1.0, 2.0, -1.0]),
        scales=np.array([1.0, 1.0]),
    )
    rewritten = ir.from_proto(proto)
    version = rewrite_in([rewritten], opset)
    assert opset <= version <= 21
    after = ir.to_proto(rewritten)
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    before = ReferenceEvaluator(proto).run(None, {"x": x})[0]
    np.testing.assert_allclose(graphopt.run(after, {"x": x})["y"], before, rtol=1e-6)
    assert version == {"Softmax": max(opset, 13), "Resize": max(opset, 13)}.get(text.split()[2].split("<")[0], opset)
