"""Fusions change how numbers are computed, not the numbers: losses of 50 steps agree with the unfused graph's."""

from __future__ import annotations

import contextlib

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import pytest
from builders import linear, model, run
from steps import assert_close, assert_equal, outputs

import graphopt
import passes
from graphopt import models
from graphopt.targets.onnxruntime.fuse import FUSIONS
from graphopt.testing import strict
from graphopt.testing.gradients import computed, gradient_model

RNG = np.random.default_rng(0)


def fused_step(*given, **steps):
    """Compile a training graph that is fused unless `fuse` says otherwise."""
    return graphopt.compile(*given, **{"fuse": passes.Fuse(), **steps})


def opened(step, **options):
    """Open a graph as it is."""
    return graphopt.Executor(step, target="plain", **options)


def batches(shape, classes, count=50):
    return [
        {"x": RNG.standard_normal(shape, np.float32), "target": RNG.integers(0, classes, shape[0])}
        for _ in range(count)
    ]


NETWORKS = {
    "mlp": (lambda: models.mlp([6], 3, hidden=[16, 8]), (20, 6), 3),
    "cnn": (lambda: models.cnn([3, 10, 12], 3, channels=[4, 20], hidden=8), (6, 3, 10, 12), 3),
}
OPTIMIZERS = {
    "descent": passes.SGD(0.02),
    "momentum": passes.SGD(0.02, momentum=0.9),
    "nesterov": passes.SGD(0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": passes.AdamW(0.002),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_losses_are_those_of_the_unfused_graph(network, optimizer):
    made, shape, classes = NETWORKS[network]
    steps = {"loss": passes.CrossEntropy(), "optimizer": OPTIMIZERS[optimizer]}
    proto = made()
    plain = opened(fused_step(proto, **steps, fuse=None), threads=1)
    fused = opened(fused_step(proto, **steps), threads=1)
    for batch in batches(shape, classes):
        assert fused.step(batch)["loss"] == pytest.approx(plain.step(batch)["loss"], rel=1e-6)
    assert_close(fused.state, plain.state, rtol=1e-3, atol=1e-5)


def test_each_fusion_is_seen_and_can_be_left_out():
    marks = {
        "widen_convolution_products": lambda step: any(
            node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1 for node in step.graph
        ),
        "fold_momentum_into_gemm": lambda step: any("beta" in node.attributes for node in _updates(step)),
    }
    elsewhere = {
        "scatter_by_element",
        "compute_bfloat16_in_float32",
        "gather_blocks",
        "join_small_vectors",
        "pool_channels_as_batch",
        "transposed_convolution_as_convolution",
        "hoist_weight_gradients",
        "unpool_first_maxima",
        "vectorize_steps",
        "fold_transpose_into_gemm",
    }
    assert {*marks, *COUNTED, *elsewhere, "column_sums_as_product"} == FUSIONS.keys()
    proto = NETWORKS["cnn"][0]()
    for name, mark in marks.items():
        optimizer = OPTIMIZERS["momentum" if name == "fold_momentum_into_gemm" else "descent"]
        steps = {"loss": passes.CrossEntropy(), "optimizer": optimizer}
        assert mark(fused_step(proto, **steps))
        assert not mark(fused_step(proto, **steps, fuse=passes.Fuse(leave_out=[name])))
    with pytest.raises(graphopt.GraphoptError, match="unknown fusion 'adam'"):
        passes.Fuse(leave_out=["adam"])


# A fusion: what it is seen without, an operator, and how many nodes of it there are without and with the fusion.
COUNTED = {
    "fold_rate_into_loss_gradient": (["fold_update_into_gemm"], "Sub", 3, 1),
    "fold_update_into_gemm": (["fold_rate_into_loss_gradient"], "Sub", 3, 2),
    "combine_scalar_factors": ([], "Mul", 4, 4),
    "fold_sum_into_gemm": ([], "Add", 4, 3),
}


@pytest.mark.parametrize("name", COUNTED)
def test_fusions_of_plain_descent_are_seen_and_change_no_loss(name):
    others, op_type, without, fused = COUNTED[name]
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.05)}
    compiled = [fused_step(linear(), **steps, fuse=passes.Fuse(leave_out=left)) for left in ([*others, name], others)]
    assert [sum(n.op_type == op_type for n in each.graph) for each in compiled] == [without, fused]
    executors = [opened(each, threads=1) for each in compiled]
    for i in range(50):
        x = RNG.standard_normal((4 + i % 3, 3)).astype(np.float32)
        losses = [executor.step(x=x, target=np.tanh(x[:, :2]))["loss"] for executor in executors]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)


CONVOLUTIONS = {  # the image, the kernel, its strides
    "one dimension": ((2, 64), (4, 2, 5), [2]),
    "two dimensions": ((1, 8, 8), (4, 1, 3, 3), [1, 1]),
    "strides": ((3, 9, 9), (6, 3, 3, 3), [2, 2]),
    "many filters": ((3, 12, 12), (40, 3, 5, 5), [1, 1]),
    "three dimensions": ((2, 5, 6, 7), (4, 2, 3, 3, 3), [1, 1, 1]),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_plain_descent_moves_each_weight_against_its_gradient(name):
    image, kernel, strides = CONVOLUTIONS[name]
    torch = pytest.importorskip("torch")
    x = RNG.standard_normal((12, *image), np.float32)
    target = RNG.integers(0, 3, 12)
    convolve = [torch.conv1d, torch.conv2d, torch.conv3d][len(image) - 2]
    w = RNG.standard_normal(kernel, np.float32) * 0.3
    width = convolve(torch.tensor(x), torch.tensor(w), stride=strides).flatten(1).shape[1]
    weights = {"w": w, "m": RNG.standard_normal((width, 3), np.float32) * 0.1}
    proto = model(
        f"agraph (float[N,{','.join(map(str, image))}] x) => (float[N,3] y) {{"
        f"c = Conv<strides = {strides}>(x, w)  r = Relu(c)  f = Flatten(r)  y = MatMul(f, m) }}",
        **weights,
    )
    step = fused_step(proto, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    executor = opened(step, threads=1)
    executor.step(x=x, target=target)
    ours = {name: torch.tensor(value, requires_grad=True) for name, value in weights.items()}
    hidden = convolve(torch.tensor(x), ours["w"], stride=strides).relu().flatten(1)
    torch.nn.functional.cross_entropy(hidden @ ours["m"], torch.tensor(target)).backward()
    for name, weight in ours.items():
        expected = (weight - 0.1 * weight.grad).detach().numpy()
        np.testing.assert_allclose(executor.state[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sums_over_many_columns_are_products(optimizer):
    steps = {"loss": passes.CrossEntropy(), "optimizer": OPTIMIZERS[optimizer]}
    proto = models.mlp([6], 3, hidden=[64, 80])
    compiled = [
        fused_step(proto, **steps, fuse=passes.Fuse(leave_out=left)) for left in (["column_sums_as_product"], [])
    ]
    products = [[n for n in each.graph if n.op_type == "ConstantOfShape"] for each in compiled]
    assert [len(found) for found in products] == [0, 1]
    executors = [opened(each, threads=1) for each in compiled]
    for batch in [*batches((20, 6), 3, count=30), *batches((7, 6), 3, count=20)]:
        losses = [executor.step(batch)["loss"] for executor in executors]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(
    "steps",
    [
        {"optimizer": passes.SGD(0.05), "clip": passes.ClipGlobalNorm(0.2)},
        {"optimizer": passes.SGD(0.05, groups=(passes.Group("b", learning_rate=0.5),))},
        {"optimizer": passes.SGD(0.05, weight_decay=0.1), "regularizer": passes.L2(0.1, parameters="w")},
        {"optimizer": passes.SGD(0.05), "schedule": passes.Cosine(steps=50)},
        {"optimizer": passes.SGD(0.05), "clip": passes.ReportGradients()},
    ],
)
@pytest.mark.slow
def test_scaled_gradients_change_nothing_that_is_reported(steps):
    left_out = passes.Fuse(leave_out=["fold_rate_into_loss_gradient"])
    compiled = [
        fused_step(linear(), loss=passes.MeanSquaredError(), **steps, fuse=fuse) for fuse in (left_out, passes.Fuse())
    ]
    executors = [opened(each, threads=1) for each in compiled]
    for _ in range(50):
        x = RNG.standard_normal((8, 3)).astype(np.float32)
        plain, fused = (executor.step(x=x, target=np.tanh(x[:, :2])) for executor in executors)
        assert_close(fused, plain, rtol=1e-6)


def test_gradients_are_scaled_through_layout():
    proto = model(
        """g (float[N,8] x) => (float[N,2] y) {
            h = MatMul(x, w)
            r = Reshape(h, shape)
            d = DepthToSpace<blocksize = 2>(r)
            f = Flatten(d)
            y = MatMul(f, v)
        }""",
        w=RNG.standard_normal((8, 16)) / 4,
        v=RNG.standard_normal((16, 2)) / 4,
        shape=np.array([-1, 4, 2, 2]),
    )
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.05)}
    left_out = ["fold_update_into_gemm"]
    compiled = [
        fused_step(proto, **steps, fuse=passes.Fuse(leave_out=left))
        for left in ([*left_out, "fold_rate_into_loss_gradient"], left_out)
    ]
    updates = [sum(n.op_type == "Sub" for n in each.graph) for each in compiled]
    assert updates[0] - updates[1] == 2
    executors = [opened(each, threads=1) for each in compiled]
    for _ in range(50):
        x = RNG.standard_normal((4, 8)).astype(np.float32)
        losses = [executor.step(x=x, target=np.tanh(x[:, :2]))["loss"] for executor in executors]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gelu_takes_the_distribution_that_its_gradient_computes(approximate, no_algebra):
    proto = model(
        f"""g (float[N,4] x) => (float[N,4] y) {{
            h = MatMul(x, w)
            g = Gelu<approximate = "{approximate}">(h)
            y = MatMul(g, v)
        }}""",
        w=RNG.standard_normal((4, 8)),
        v=RNG.standard_normal((8, 4)),
    )
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.AdamW(0.01)}
    with no_algebra():
        plain = fused_step(proto, **steps)
    fused = fused_step(proto, **steps)
    assert [sum(node.op_type == "Gelu" for node in step.graph) for step in (plain, fused)] == [1, 0]
    executors = [opened(step, threads=1) for step in (plain, fused)]
    for _ in range(50):
        x = RNG.standard_normal((16, 4), np.float32)
        first, second = (executor.step(x=x, target=np.tanh(x))["loss"] for executor in executors)
        assert second == pytest.approx(first, rel=1e-5)
    x[0, :2] = 0.0, -30.0
    expected, found = (executor.predict(x=x)["y"] for executor in executors)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    operators = [node.op_type for node in executors[1].trained().graph.node]
    assert operators == ["MatMul", "Gelu", "MatMul"]


def _updates(step):
    return [y.producer() for y in step.graph.outputs if str(y.name).endswith(".next")]


WINDOWS = [
    ((3, 2, 29), (4, 2, 3), {"pads": [1, 1]}),
    ((3, 20, 60), (4, 20, 5), {"strides": [2], "pads": [2, 1]}),
    ((2, 3, 8, 9), (5, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 20, 8, 9), (5, 20, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 20, 11, 9), (5, 20, 3, 2), {"strides": [2, 1], "pads": [0, 1, 2, 0]}),
    ((2, 3, 12, 13), (5, 3, 2, 3), {"strides": [2, 3]}),
    ((2, 20, 14, 13), (5, 20, 3, 3), {"dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    ((2, 3, 14, 13), (5, 3, 3, 3), {"dilations": [2, 1], "strides": [1, 2]}),
    ((2, 18, 6, 7, 6), (3, 18, 2, 3, 2), {"pads": [0, 1, 0, 1, 1, 0]}),
    ((2, 3, 6, 7, 6), (3, 3, 2, 3, 2), {"strides": [1, 2, 1]}),
    (
        (2, 12, 9, 7, 8),
        (3, 12, 3, 2, 2),
        {"strides": [2, 1, 2], "dilations": [2, 1, 2], "pads": [2, 0, 1, 1, 0, 2]},
    ),
    ((2, 18, 9, 9), (3, 18, 1, 1), {"strides": [2, 2]}),
]


@pytest.mark.parametrize(("x", "w", "attributes"), WINDOWS)
@pytest.mark.parametrize("batch", ["N", 2])
def test_weight_gradients_of_any_window(x, w, attributes, batch):
    text = " ".join(f"{name} = {value}" for name, value in attributes.items()).replace("] ", "], ")
    proto = model(
        f"""g (float[{batch},{",".join(map(str, x[1:]))}] x) => (float[{batch},k] y) {{
            c = Conv<{text}>(x, w)
            s = Mul(c, c)
            y = Flatten(s)
        }}""",
        w=RNG.standard_normal(w),
    )
    steps = {"loss": passes.CustomLoss(lambda op, p, t: p * t)}
    plain, fused = fused_step(proto, **steps, fuse=None), fused_step(proto, **steps)
    assert len(fused.graph) != len(plain.graph)
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    assert all(y.dtype is not None and y.shape is not None for node in fused.graph for y in node.outputs)
    data = {"x": RNG.standard_normal((2, *x[1:]), np.float32)}
    columns = run(fused_step(proto, gradient=None, loss=None), 1, data)[0]["y"].shape[1]
    data["target"] = RNG.standard_normal((2, columns), np.float32)
    expected, found = run(plain, 1, data)[0]["w.grad"], run(fused, 1, data)[0]["w.grad"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


KERNELS = [
    ("N,36,19", (40, 36, 3), {"pads": [1, 1]}),
    ("N,33,9,8", (33, 33, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("N,34,9,12", (32, 34, 3, 2), {"pads": [2, 0, 1, 1]}),
    ("N,34,9,12", (32, 34, 3, 2), {"dilations": [2, 3], "pads": [1, 3, 4, 0]}),
    ("N,32,5,4,6", (32, 32, 3, 1, 2), {"pads": [0, 0, 1, 2, 0, 0]}),
    ("N,32,3,4", (64, 32, 3, 3), {"pads": [1, 1, 1, 1]}),
    ("N,32,7,8", (64, 32, 3, 3), {"strides": [2, 3], "pads": [1, 0, 1, 2]}),
]


@pytest.mark.parametrize(("image", "kernel", "attributes"), KERNELS)
@pytest.mark.parametrize("batch", ["N", "3"])
def test_convolutions_in_other_forms(image, kernel, attributes, batch):
    image = image.replace("N", batch)
    text = " ".join(f"{name} = {value}" for name, value in attributes.items()).replace("] ", "], ")
    rank, channels = len(kernel), kernel[1]
    proto = model(
        f"""g (float[{image}] x) => (float[{batch},2] y) {{
            a = Conv(x, v)
            r = Tanh(a)
            c = Conv<{text}>(r, w, b)
            s = Tanh(c)
            t = GlobalAveragePool(s)
            f = Flatten(t)
            y = MatMul(f, m)
        }}""",
        v=RNG.standard_normal((channels, channels, *[1] * (rank - 2))) / 4,
        w=RNG.standard_normal(kernel) / 8,
        b=RNG.standard_normal(kernel[0]) / 4,
        m=RNG.standard_normal((kernel[0], 2)),
    )
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.01, momentum=0.9)}
    plain, fused = fused_step(proto, **steps, fuse=None), fused_step(proto, **steps)
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    assert all(y.dtype is not None and y.shape is not None for node in fused.graph for y in node.outputs)
    assert _operators(fused) != _operators(plain)
    executors = [opened(step, threads=1) for step in (plain, fused)]
    for _ in range(50):
        x = RNG.standard_normal([3, *map(int, image.split(",")[1:])], np.float32)
        target = x.mean(axis=tuple(range(1, rank)))[:, None] * np.ones(2, np.float32)
        first, second = (executor.step(x=x, target=target)["loss"] for executor in executors)
        assert second == pytest.approx(first, rel=1e-5)
    expected, found = (executor.predict(x=x)["y"] for executor in executors)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    trained = executors[1].trained()
    assert [node.op_type for node in trained.graph.node] == [node.op_type for node in proto.graph.node]
    assert trained.graph.node[2].output == ["c"]


def test_a_transposed_convolution_of_a_model_is_one_again_in_inference():
    proto = model(
        """g (float[N,32,5,6] x) => (float[N,32,7,9] y) {
            c = ConvTranspose<dilations = [1, 2], pads = [0, 0, 0, 1]>(x, w, b)
            y = Tanh(c)
        }""",
        w=RNG.standard_normal((32, 32, 3, 3)) / 8,
        b=RNG.standard_normal(32),
    )
    step = fused_step(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01))
    assert "ConvTranspose" not in _operators(step)
    left = passes.Fuse(leave_out=["transposed_convolution_as_convolution"])
    plain = fused_step(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01), fuse=left)
    assert "ConvTranspose" in _operators(plain)
    executors = [opened(one, threads=1) for one in (plain, step)]
    for _ in range(50):
        x = RNG.standard_normal((2, 32, 5, 6), np.float32)
        target = np.full((2, 32, 7, 9), x.mean(), np.float32)
        first, second = (executor.step(x=x, target=target)["loss"] for executor in executors)
        assert second == pytest.approx(first, rel=1e-5)
    trained = executors[1].trained()
    assert [node.op_type for node in trained.graph.node] == ["ConvTranspose", "Tanh"]


def test_what_two_fusions_replace_is_the_models_own_in_inference():
    proto = model(
        """g (float[N,32,2,2] x) => (float[N,64,4,4] y) {
            c = ConvTranspose(x, w)
            y = Tanh(c)
        }""",
        w=RNG.standard_normal((32, 64, 3, 3)) / 8,
    )
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.01)}
    once, twice = (
        fused_step(proto, **steps, fuse=passes.Fuse(leave_out=names)) for names in (["widen_convolution_products"], [])
    )
    assert len(twice.graph) > len(once.graph)
    executor = opened(twice, threads=1)
    trained = executor.trained()
    assert [node.op_type for node in trained.graph.node] == ["ConvTranspose", "Tanh"]
    x = RNG.standard_normal((2, 32, 2, 2), np.float32)
    y = executor.step(x=x, target=np.zeros((2, 64, 4, 4), np.float32))["y"]
    np.testing.assert_allclose(outputs(trained, {"x": x})["y"], y, rtol=1e-4, atol=1e-5)


def test_inference_does_what_training_does_where_its_input_is_gone():
    proto = model(
        """g (float[N,4,4,32] x) => (float[N,2] y) {
            t = Transpose<perm = [0, 3, 1, 2]>(x)
            c = Conv<pads = [1, 1, 1, 1]>(t, w)
            r = Tanh(c)
            d = Conv(r, v)
            f = Flatten(d)
            y = MatMul(f, m)
        }""",
        w=RNG.standard_normal((64, 32, 3, 3)) / 9,
        v=RNG.standard_normal((64, 64, 4, 4)) / 30,
        m=RNG.standard_normal((64, 2)),
    )
    step = fused_step(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01))
    executor = opened(step, threads=1)
    x = RNG.standard_normal((3, 4, 4, 32), np.float32)
    executor.step(x=x, target=np.zeros((3, 2), np.float32))
    trained = executor.trained()
    assert [node.op_type for node in trained.graph.node][-4:] == ["Tanh", "Conv", "Flatten", "MatMul"]
    for tensor in proto.graph.initializer:
        tensor.CopyFrom(next(own for own in trained.graph.initializer if own.name == tensor.name))
    expected = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})[0]
    np.testing.assert_allclose(executor.predict(x=x)["y"], expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def no_algebra(monkeypatch):
    """Let simplification rewrite no arithmetic inside the block of the context manager that this returns."""

    @contextlib.contextmanager
    def block():
        with monkeypatch.context() as inside:
            inside.setattr("graphopt.graph.simplify.simplify_algebra", lambda model: False)
            yield

    return block


def test_a_gradient_is_masked_after_pooling_bit_for_bit(no_algebra):
    proto = models.cnn([3, 12, 12], 3, channels=[8, 16], hidden=8)
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.02, momentum=0.9)}
    with no_algebra():
        left = fused_step(proto, **steps, fuse=passes.Fuse(leave_out=["pool_channels_as_batch"]))
    fused = fused_step(proto, **steps)
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    planes = [node.outputs[0].shape[1] for node in fused.graph if node.op_type == "MaxPool"]
    assert planes == [1, 1, 1, 1]  # of the data, and of the scores of equal maxima
    sizes = [
        [node.outputs[0].shape[-1] for node in step.graph if node.op_type == "HardSigmoid"] for step in (left, fused)
    ]
    assert sizes == [[8, 6, 12], [8, 3, 6]]
    executors = [opened(step, threads=1) for step in (left, fused)]
    for batch in batches((6, 3, 12, 12), 3):
        assert len({executor.step(batch)["loss"] for executor in executors}) == 1
    first, second = ([node.op_type for node in one.trained().graph.node] for one in executors)
    assert first == second


@pytest.mark.parametrize(
    ("shape", "window"),
    [((3, 2, 6, 8), (2, 2)), ((2, 3, 9, 4), (3, 4)), ((4, 1, 12), (3,)), ((2, 2, 4, 2, 6), (2, 1, 3))],
)
def test_an_unpooled_gradient_goes_to_the_first_of_equal_maxima_as_in_torch(shape, window):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    small = (*shape[:2], *(n // k for n, k in zip(shape[2:], window, strict=True)))
    large, pooled, kernel = (",".join(map(str, sizes)) for sizes in (shape[1:], small[1:], window))
    pool = f"MaxPool<kernel_shape=[{kernel}], strides=[{kernel}]>(x)"
    proto = model(f"g (float[N,{large}] x) => (float[N,{pooled}] y) {{ y = {pool} }}")
    gradient = gradient_model(graphopt.load(proto))
    passes.Fuse().rewrite(gradient)
    assert _operators(gradient).count("MaxUnpool") == 1
    x = rng.integers(-2, 2, shape).astype(np.float32)
    x[rng.random(shape) < 0.3] = -np.inf
    x = np.maximum(x, np.where(np.indices(shape)[-1] % window[-1] == 0, -9, x))  # no window has only -inf
    x[0] = 1.0  # ties everywhere
    dy = rng.standard_normal(small, np.float32)
    ours = computed(gradient, {"x": x, "y.seed": dy})["x.grad"]
    theirs = torch.from_numpy(x).requires_grad_()
    getattr(torch.nn.functional, f"max_pool{len(window)}d")(theirs, window).backward(torch.from_numpy(dy))
    np.testing.assert_array_equal(ours, theirs.grad)
    x[0, 0] = np.nan  # its windows have no maximum: others are as they were
    np.testing.assert_array_equal(computed(gradient, {"x": x, "y.seed": dy})["x.grad"][1:], ours[1:])


def test_a_network_that_pools_large_images_is_lowered_once(monkeypatch):
    step = graphopt.compile(
        models.cnn((1, 28, 28), 3, channels=2), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1)
    )
    with strict(False):
        lowered = graphopt.lower(step, "onnxruntime")
        assert _operators(lowered).count("MaxUnpool") == 1
        monkeypatch.setattr(graphopt.Pipeline, "rewrite", None)
        assert _operators(graphopt.lower(step, "onnxruntime")) == _operators(lowered)


def _operators(step):
    return [node.op_type for node in step.graph]


@pytest.mark.parametrize(
    "optimizer", [*OPTIMIZERS.values(), passes.RMSprop(0.002, momentum=0.8, centered=True)], ids=str
)
def test_vectors_updated_end_to_end_are_the_same_bit_for_bit(optimizer):
    proto = models.mlp([6], 3, hidden=[16, 8])
    executors = [
        opened(
            fused_step(
                proto,
                loss=passes.CrossEntropy(),
                optimizer=optimizer,
                fuse=passes.Fuse(leave_out=left),
            )
        )
        for left in (["join_small_vectors"], [])
    ]
    for batch in batches((20, 6), 3, 10):
        assert len({executor.step(batch)["loss"] for executor in executors}) == 1
    assert_equal(executors[1].state, executors[0].state)


LAYERS = """g (float[4,8] x) => (float[4,3] y, float[4,8] a, float[4,8] b, float[4,8] c) {
    p = MatMul(x, w) a = Tanh(p) q = MatMul(a, w) b = Tanh(q) r = MatMul(b, w) c = Tanh(r) y = MatMul(c, v)
}"""
LAYERS_IN_A_SCAN = """g (float[T,8] x) => (float[1,3] y) {
    fa, fb = Scan <num_scan_inputs=1, body = s (float[8] ha, float[8] hb, float[8] i) => (float[8] na, float[8] nb) {
        pa = MatMul(i, w) qa = Add(pa, ha) na = Tanh(qa) pb = MatMul(na, w) qb = Add(pb, hb) nb = Tanh(qb)
    }> (start, start, x)
    z = MatMul(fb, v) y = Unsqueeze(z, first)
}"""


@pytest.mark.parametrize("target", ["onnxruntime", "cuda", "webgpu", "portable"])
@pytest.mark.parametrize("text", [LAYERS, LAYERS_IN_A_SCAN], ids=["outputs", "states"])
def test_what_is_computed_from_each_other_is_not_joined(text, target):
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((8, 8)) / 3, "v": rng.standard_normal((8, 3))}
    arrays |= {"start": np.zeros(8, np.float32), "first": np.array([0])} if "Scan" in text else {}
    proto = model(text, **arrays)
    step = graphopt.compile(
        proto,
        parameters=passes.Parameters(["w", "v"]),
        loss=passes.CrossEntropy(output="y"),
        optimizer=passes.SGD(0.1),
    )
    x, rows = rng.standard_normal((4, 8)).astype(np.float32), 1 if "Scan" in text else 4
    losses = []
    for form in (step, graphopt.lower(step, target)):
        executor = graphopt.Executor(form, target="plain")
        losses.append([executor.step(x=x, target=np.arange(rows) % 3)["loss"] for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("target", ["onnxruntime", "cuda", "portable"])
def test_a_fusion_that_fails_is_left_out(target, monkeypatch):
    def fail(model):
        raise ValueError("Graph contains a cycle")

    step = graphopt.compile(models.linear((3,), 2), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    monkeypatch.setitem(FUSIONS, "column_sums_as_product", fail)
    monkeypatch.setattr("graphopt.targets.target.read_model", lambda *_: None)
    with pytest.warns(UserWarning, match=f"the fusions for {target} failed: .*cycle: the graph is lowered without"):
        lowered = graphopt.lower(step, target)
    executor = graphopt.Executor(lowered, target="plain")
    assert executor.step(x=np.ones((2, 3), np.float32), target=np.ones((2, 2), np.float32))["loss"] > 0


@pytest.mark.filterwarnings("error")
def test_what_a_form_says_of_the_graph_is_not_blamed_on_the_fusions(monkeypatch):
    tried = []

    def refuse(self, model):
        tried.append(model)
        raise graphopt.GraphoptError("expected another graph")

    step = graphopt.compile(models.linear((3,), 2), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    monkeypatch.setattr(passes.Portable, "rewrite", refuse)
    monkeypatch.setattr("graphopt.targets.target.read_model", lambda *_: None)
    with pytest.raises(graphopt.GraphoptError, match="expected another graph"):
        graphopt.lower(step, "portable")
    assert len(tried) == 1


def test_no_transpose_that_a_gemm_can_do():
    proto = model(
        """g (float[N,5,4] x) => (float[N,5,3] y) {
            v = Transpose(w)
            y = MatMul(x, v)
        }""",
        w=RNG.standard_normal((3, 4)),
    )
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1, momentum=0.9)}
    fused, plain = (
        fused_step(proto, **steps, fuse=passes.Fuse(leave_out=names)) for names in ([], ["fold_transpose_into_gemm"])
    )
    assert [sum(n.op_type == "Transpose" for n in step.graph) for step in (fused, plain)] == [1, 2]
    feeds = {"x": RNG.standard_normal((7, 5, 4)), "target": RNG.standard_normal((7, 5, 3))}
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
    executors = [opened(step, threads=1) for step in (plain, fused)]
    for _ in range(50):
        first, second = (executor.step(feeds)["loss"] for executor in executors)
        assert second == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_transpose_that_a_gemm_can_do_turns_both_operands(first, second):
    x = RNG.standard_normal((4, 5)[:: 1 - 2 * first]).astype(np.float32)
    w = RNG.standard_normal((5, 3)[:: 1 - 2 * second]).astype(np.float32)
    dims = ",".join(map(str, x.shape))
    proto = model(
        f"""g (float[{dims}] x) => (float[3,4] y) {{
            p = Gemm<transA = {first}, transB = {second}>(x, w)
            y = Transpose<perm = [1, 0]>(p)
        }}""",
        w=w,
    )
    fused = graphopt.Pipeline(normalize=passes.Normalize(), fuse=passes.Fuse())(proto)
    assert [node.op_type for node in fused.graph] == ["Gemm"]
    expected = ((x.T if first else x) @ (w.T if second else w)).T
    np.testing.assert_allclose(graphopt.run(fused, {"x": x})["y"], expected, rtol=1e-5, atol=1e-6)


LOOKALIKES = {  # a graph of x, w and v, which looks like what a fusion replaces, and PyTorch's function
    "a Gemm with a factor": (
        "p = Gemm<alpha = 0.5>(x, w)  s = Add(x, p)  y = MatMul(s, v)",
        lambda x, w, v: (x + 0.5 * x @ w) @ v,
    ),
    "a cube": ("p = MatMul(x, w)  q = Pow(p, three)  y = MatMul(q, v)", lambda x, w, v: (x @ w) ** 3 @ v),
    "a sum over many columns": (
        "p = MatMul(x, w)  t = Tanh(p)  q = ReduceSum<keepdims = 0>(t, last)  r = Unsqueeze(q, last)  "
        "u = Mul(r, x)  y = MatMul(u, v)",
        lambda x, w, v: ((x @ w).tanh().sum(1, keepdim=True) * x) @ v,
    ),
}


@pytest.mark.parametrize("optimizer", ["descent", "momentum"])
@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_looks_like_what_a_fusion_replaces_trains_as_in_pytorch(name, optimizer):
    torch = pytest.importorskip("torch")
    text, function = LOOKALIKES[name]
    weights = {"w": RNG.standard_normal((64, 64)) / 16, "v": RNG.standard_normal((64, 2)) / 8}
    constants = {"three": np.array(3.0), "last": np.array([1])}
    proto = model(
        f"g (float[N,64] x) => (float[N,2] y) {{ {text} }}",
        **weights,
        **{name: array for name, array in constants.items() if name in text},
    )
    step = fused_step(proto, loss=passes.MeanSquaredError(), optimizer=OPTIMIZERS[optimizer])
    executor = opened(step, threads=1)
    twins = {name: torch.tensor(np.float32(w), requires_grad=True) for name, w in weights.items()}
    reference = torch.optim.SGD(twins.values(), 0.02, momentum=OPTIMIZERS[optimizer].momentum)
    for rows in (20, 20, 64):
        x, target = (RNG.standard_normal((rows, n), np.float32) for n in (64, 2))
        executor.step(x=x, target=target)
        reference.zero_grad()
        torch.nn.functional.mse_loss(function(torch.tensor(x), **twins), torch.tensor(target)).backward()
        reference.step()
    for name, twin in twins.items():
        moved, right = executor.state[name] - weights[name], twin.detach().numpy() - weights[name]
        np.testing.assert_allclose(moved, right, atol=1e-4 * np.abs(right).max(), err_msg=name)


PLACES = {  # the array, the rows that are added, and their places, some of which are equal
    "rows": ((5, 3), np.array([[[4], [-5]], [[4], [1]]])),
    "numbers": ((5,), np.array([[4], [-5], [4], [0]])),
    "rows of two columns": ((4, 2, 3), np.array([[3, -1], [0, 1], [-1, 1], [-4, -2]])),
    "elements of three columns": ((4, 2, 3), np.array([[[3, -1, 0]], [[-1, 1, -3]], [[0, 0, 2]]])),
    "no rows": ((5, 3), np.zeros((0, 1), np.int64)),
    "rows of no numbers": ((5, 0, 3), np.array([[4], [1]])),
}


REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.mark.parametrize(("how", "dtype"), [("add", "float"), ("mul", "double"), ("max", "int64"), ("min", "int32")])
@pytest.mark.parametrize("name", PLACES)
def test_a_scatter_that_reduces_is_one_of_elements_on_cpus(name, how, dtype):
    """ONNX Runtime's ScatterND loses rows on several threads (tests/faults.py: ScatterND-threads)."""
    shape, places = PLACES[name]
    columns = places.shape[-1]
    sizes = [*places.shape[:-1], *shape[columns:]]
    wheres, rows = (f"[{', '.join(['N', *map(str, more)])}]" for more in (places.shape[1:], sizes[1:]))
    array = f"{dtype}{list(shape)}"
    proto = model(
        f"""g ({array} x, bool c, int64{wheres} i, {dtype}{rows} r) => ({array} y, {array} z) {{
            h = ScatterND<reduction="{how}">(x, i, r) z = Neg(h) y = If(c) <
            then_branch = yes () => ({array} p) {{ p = ScatterND<reduction="{how}">(x, i, r) }},
            else_branch = no () => ({array} q) {{ q = Neg(x) }}> }}"""
    )
    feeds = {"x": RNG.integers(-9, 9, shape), "i": places, "r": RNG.integers(-9, 9, sizes)}
    kind = {"float": np.float32, "double": np.float64}.get(dtype, dtype)
    feeds = {"c": np.array(True), **{k: x if k == "i" else x.astype(kind) for k, x in feeds.items()}}
    expected = feeds["x"].copy()
    REDUCTIONS[how].at(expected, tuple(np.moveaxis(places, -1, 0)), feeds["r"])
    lowered = {target: graphopt.lower(proto, target) for target in ("native", "onnxruntime", "portable")}
    for written in lowered.values():
        assert ("ScatterND" in {node.op_type for node in written.graph.all_nodes()}) == (0 in shape)
    for written in (lowered["onnxruntime"], lowered["portable"]):
        found = graphopt.run(ir.to_proto(written), feeds)
        np.testing.assert_array_equal([found["y"], -found["z"]], [expected, expected])
        if len(places) and expected.size:
            beyond = places.copy()
            beyond.flat[0] = shape[0]
            with pytest.raises(Exception, match=r"(?i)indic|index"):
                graphopt.run(ir.to_proto(written), {**feeds, "i": beyond})


def test_rows_of_one_number_are_added_on_two_threads():
    """Of 40 such steps, and of 40 evaluations, 10 to 22 lost rows."""
    proto = model(
        """g (float[N,1] x, int64[N,1] i) => (float[1,1] y) {
            h = MatMul(x, w) y = ScatterND<reduction="add">(z, i, h) }""",
        w=np.ones((1, 1)),
        z=np.zeros((1, 1)),
    )
    steps = {"parameters": passes.Parameters(["w"]), "loss": passes.MeanAbsoluteError(), "optimizer": passes.SGD(0.0)}
    executor, n = graphopt.Executor(graphopt.compile(proto, **steps), threads=2, native=False), 400_000
    feeds = {"x": np.ones((n, 1), "f"), "i": np.zeros((n, 1), np.int64), "target": np.zeros((1, 1), "f")}
    for compute in (executor.step, executor.evaluate):
        assert [float(compute(feeds)["loss"]) for _ in range(10)] == [n] * 10
