"""Pruning in the training graph, against PyTorch's masks and loops, and removing channels that are 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import steps
import torch
from builders import mlp, model, run
from planted_mistakes import images
from steps import weights
from test_optimizers import T, X, torch_loss, torch_mlp
from torch.nn.utils import prune

import graphopt
import passes
from graphopt import cli, models
from graphopt.errors import GraphoptError

RNG = np.random.default_rng(5)
FEEDS = {"x": X.astype(np.float32), "target": T.astype(np.float32)}
WEIGHTS = ("fc0.weight", "fc1.weight")


def masks_of(step: Any) -> dict[str, np.ndarray]:
    """Return the initial masks of a training graph."""
    found = {x.name: x.const_value.numpy() for x in step.graph.inputs if x.name.endswith(".mask")}
    return {name.removesuffix(".mask"): mask for name, mask in found.items()}


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.55, 0.9])
def test_masks_are_those_of_pytorch(sparsity: float) -> None:
    proto = mlp((9, 13, 5))
    modules = []
    for name in WEIGHTS:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.tensor(weights(proto)[name]))
        modules.append(module)
    found = masks_of(steps.compiled(proto, prune=passes.Prune(sparsity, scope="global")))
    prune.global_unstructured([(m, "weight") for m in modules], prune.L1Unstructured, amount=sparsity)
    assert all(np.array_equal(found[n], m.weight_mask.numpy() > 0) for n, m in zip(WEIGHTS, modules, strict=True))
    step = steps.compiled(proto, prune=passes.Prune(sparsity))
    for name in WEIGHTS:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.tensor(weights(proto)[name]))
        prune.l1_unstructured(module, "weight", amount=sparsity)
        assert np.array_equal(masks_of(step)[name], module.weight_mask.numpy() > 0)
        initial = next(x for x in step.graph.inputs if x.name == name).const_value.numpy()
        np.testing.assert_array_equal(initial, module.weight.detach().numpy())


def test_channels_are_those_of_pytorch_and_their_biases_and_normalization_follow() -> None:
    step = steps.compiled(images(), prune=passes.Prune(0.5, structure="channel"))
    found = masks_of(step)
    assert found.keys() == {
        "k0",
        "c0",
        "scale",
        "shift",
        "k1",
        "c1",
    }  # the channels of m are the model's outputs
    for name, others in (("k0", ("c0", "scale", "shift")), ("k1", ("c1",))):
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.tensor(weights(images())[name]))
        prune.ln_structured(module, "weight", amount=0.5, n=2, dim=0)
        due = module.weight_mask.numpy().any((1, 2, 3))
        assert all(np.array_equal(found[each].ravel(), due) for each in (name, *others))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 2), (3, 8)])
def test_the_largest_n_of_m_neighbours_that_a_product_sums_over_are_kept(n: int, m: int, transposed: bool) -> None:
    w = RNG.standard_normal((16, 6))
    node = "y = Gemm<transB=1>(x, w)" if transposed else "y = MatMul(x, w)"
    proto = model(f"g (float[N,16] x) => (float[N,6] y) {{ {node} }}", w=w.T.copy() if transposed else w)
    (mask,) = masks_of(steps.compiled(proto, prune=passes.Prune(structure=f"{n}:{m}"))).values()
    rows = np.abs(w.T).reshape(6, 16 // m, m)
    due = rows >= np.sort(rows, axis=-1)[..., -n, None]
    np.testing.assert_array_equal(mask if transposed else mask.T, due.reshape(6, 16))


OPTIMIZERS: dict[str, Any] = {
    "momentum": (passes.SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "decay": (passes.AdamW(0.02, weight_decay=0.3), lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.3)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_training_with_a_cubic_schedule_is_that_of_a_loop_in_pytorch(name: str, scope: Any) -> None:
    """The loop updates, decides by what is not pruned yet, and sets the rest to 0, in this order."""
    proto, (ours, theirs) = mlp(dtype=np.float64), OPTIMIZERS[name]
    pruning = passes.Prune(0.8, start=2, end=12, every=3, scope=scope)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=ours, prune=pruning)
    parameters = {n: torch.nn.Parameter(w.detach()) for n, w in torch_mlp(proto).items()}
    optimizer = theirs(list(parameters.values()))
    masks = {n: torch.ones_like(parameters[n]) for n in WEIGHTS}
    for t, outputs in enumerate(run(step, 16, {"x": X, "target": T}), 1):
        optimizer.zero_grad()
        loss = torch_loss(parameters)
        loss.backward()
        optimizer.step()
        assert float(outputs["loss"]) == pytest.approx(loss.item(), rel=1e-9)
        share = np.float32(0.8 * (1 - (1 - (t - 2) / 10) ** 3))
        with torch.no_grad():
            for names in [WEIGHTS] if scope == "global" else [[n] for n in WEIGHTS]:
                kept = [parameters[n].abs() * masks[n] for n in names]
                flat = torch.cat([x.ravel() for x in kept])
                if t in (5, 8, 11, 12):
                    smallest = flat.topk(round(float(share) * len(flat)), largest=False).values.max()
                    masks.update({n: (x > smallest).double() for n, x in zip(names, kept, strict=True)})
            for n in WEIGHTS:
                parameters[n].mul_(masks[n])
        for n, w in parameters.items():
            np.testing.assert_allclose(outputs[f"{n}.next"], w.detach().numpy(), rtol=1e-8, atol=1e-12)
            if n in WEIGHTS:
                assert np.array_equal(outputs[f"{n}.mask.next"], masks[n].numpy() > 0)
    assert sum(int((m == 0).sum()) for m in masks.values()) == (45 if scope == "global" else 26 + 19)


ALL = [
    *(
        passes.SGD(0.1, momentum=0.9, nesterov=True),
        passes.AdamW(0.01),
        passes.Adagrad(0.1),
        passes.RMSprop(0.01),
    ),
    *(
        passes.Lion(0.01),
        passes.LAMB(0.01),
        passes.Muon(0.02),
        passes.Adafactor(0.01),
        passes.ScheduleFreeAdamW(0.02),
    ),
    passes.AdamW(0.01, slot_bits=8),
]


@pytest.mark.parametrize("average", [None, passes.EMA(0.9), passes.SWA(start=3)], ids=["own", "ema", "swa"])
@pytest.mark.parametrize("optimizer", ALL, ids=lambda x: f"{type(x).__name__}{x.slot_bits}")
def test_zeros_stay_zeros_in_the_file(optimizer: Any, average: Any) -> None:
    options = {"optimizer": optimizer, "average": average, "prune": passes.Prune(0.75, end=5, every=2)}
    executor = steps.trained(mlp(), FEEDS, 8, **options)
    file = weights(executor.trained())
    for name, pruned in zip(WEIGHTS, (24, 18), strict=True):
        mask = executor.state[f"{name}.mask"]
        assert (mask.size - mask.sum(), file[name][~mask].any()) == (pruned, False)
        assert file[name][mask].all()
        copies = [f"{name}{end}" for end in ("", ".average", ".z") if f"{name}{end}" in executor.state]
        assert not any(executor.state[copy][~mask].any() for copy in copies)
    found = executor.predict(x=FEEDS["x"])["y"]
    np.testing.assert_allclose(found, steps.outputs(executor.trained(), FEEDS)["y"], rtol=1e-5, atol=1e-6)


COMPOSED: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": passes.Accumulate(2), "average": passes.EMA(0.9)},
    "clipped": {"clip": passes.ClipGlobalNorm(0.1), "regularizer": passes.L2(1e-2)},
    "16 bits": {
        "precision": passes.MixedPrecision(),
        "gradient": passes.Gradient(loss_scale=1024.0),
        "loss_scale": passes.DynamicLossScale(),
    },
    "recomputed": {"recompute": passes.Recompute()},
    "frozen": {"parameters": passes.Parameters(freeze="fc0.*")},
    "scheduled": {"schedule": passes.Cosine(steps=20)},
    "fused": {"fuse": passes.Fuse()},
}


@pytest.mark.parametrize("name", COMPOSED)
def test_pruning_composes(name: str) -> None:
    pruning = passes.Prune(0.75, end=4, every=2)
    options = {"optimizer": passes.SGD(0.1, momentum=0.9), "prune": pruning, **COMPOSED[name]}
    executor = steps.trained(mlp(), FEEDS, 12, **options)
    file = weights(executor.trained())
    pruned = {n: int((file[n] == 0).sum()) for n in WEIGHTS}
    assert pruned == {"fc0.weight": 0 if name == "frozen" else 24, "fc1.weight": 18}
    assert not [n for n in WEIGHTS if np.array_equal(file[n], weights(mlp())[n])] or name == "frozen"


def test_a_step_that_overflows_leaves_the_masks() -> None:
    options = {"gradient": passes.Gradient(loss_scale=2.0**90), "loss_scale": passes.DynamicLossScale()}
    options |= {"prune": passes.Prune(0.5, start=1), "optimizer": passes.SGD(0.1)}
    executor = steps.executor(mlp(), **options)
    executor.step({"x": FEEDS["x"], "target": FEEDS["target"] * np.float32(1e13)})
    assert executor.steps == 0
    assert all(executor.state[f"{name}.mask"].all() for name in WEIGHTS)
    steps.losses(executor, {name: x * np.float32(1e-3) for name, x in FEEDS.items()})
    assert executor.steps == 1
    assert [int((executor.state[f"{name}.mask"]).sum()) for name in WEIGHTS] == [16, 12]


def test_a_lottery_ticket_starts_from_its_masks() -> None:
    first = steps.trained(mlp(), FEEDS, 8, prune=passes.Prune(0.5, end=4, every=2))
    masks = {name: first.state[f"{name}.mask"] for name in WEIGHTS}
    again = steps.executor(mlp(), prune=passes.Prune(masks=masks))
    for name, mask in masks.items():
        np.testing.assert_array_equal(again.parameters[name], np.where(mask, weights(mlp())[name], 0))
    steps.losses(again, FEEDS, 3)
    assert all(np.array_equal(again.state[name] != 0, mask) for name, mask in masks.items())


def test_weights_are_chosen_by_name() -> None:
    chosen = passes.Prune(0.5, parameters=["fc1.weight", "fc1.bias"], leave_out="*.bias")
    assert masks_of(steps.compiled(mlp(), prune=chosen)).keys() == {"fc1.weight"}
    assert masks_of(steps.compiled(models.transformer((5,), 7, width=8, layers=1), prune=passes.Prune(0.5)))


def test_what_n_of_m_does_not_divide_is_named_and_left() -> None:
    with pytest.warns(UserWarning, match=r"leaves 'fc0.weight', since a product sums over 6 numbers"):
        step = steps.compiled(mlp((6, 8, 3)), prune=passes.Prune(structure="2:4"))
    assert masks_of(step).keys() == {"fc1.weight"}


def test_a_layer_that_loses_all_numbers_is_named() -> None:
    proto = mlp()
    small = next(x for x in proto.graph.initializer if x.name == "fc1.weight")
    small.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(small) / 1000, small.name))
    with pytest.warns(UserWarning, match=r"leaves nothing of 'fc1\.weight'.*leave_out"):
        steps.compiled(proto, prune=passes.Prune(0.5, scope="global"))


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "expected a sparsity or masks, found neither": (lambda: passes.Prune(), {}),
    "Prune(structure='4:2'): expected 'element', 'channel', or N:M": (
        lambda: passes.Prune(structure="4:2"),
        {},
    ),
    "expected structure='2:4' without sparsity": (lambda: passes.Prune(0.5, structure="2:4"), {}),
    "Prune(scope='global'): expected structure='element'": (
        lambda: passes.Prune(0.5, scope="global", structure="channel"),
        {},
    ),
    "expected an update after start=5": (lambda: passes.Prune(0.5, start=5, end=5), {}),
    "Prune(sparsity=1.0): expected a number": (lambda: passes.Prune(1.0), {}),
    "parameters='nothing' matches no parameter": (lambda: passes.Prune(0.5, parameters="nothing"), {}),
    "'fc9': expected a parameter that trains": (lambda: passes.Prune(masks={"fc9": np.ones(2, bool)}), {}),
    "expected bool[3, 8], found float64[3, 8]": (
        lambda: passes.Prune(masks={"fc1.weight": np.ones((3, 8))}),
        {},
    ),
    "to prune in the structure 'element', found none, and adapters": (
        lambda: passes.Prune(0.5),
        {"adapter": passes.LoRA(rank=2)},
    ),
    "expected a model without masks": (lambda: [passes.Prune(0.5), passes.Prune(0.5)], {}),
    "run the optimizer first": (lambda: passes.Prune(0.5), {"optimizer": None}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_options_are_refused_in_one_line(message: str) -> None:
    make, others = WRONG[message]
    with pytest.raises(GraphoptError) as error:
        steps.compiled(mlp(), prune=make(), **others)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_schedule_longer_than_the_run_is_told_and_no_epoch_before_its_end_is_the_best() -> None:
    data = {"x": np.tile(FEEDS["x"], (4, 1)), "target": np.tile(FEEDS["target"], (4, 1))}
    options = {"batch_size": 16, "validation": 0.25, "verbose": False}
    executor = steps.executor(mlp(), prune=passes.Prune(0.5, end=60, every=1))
    with pytest.warns(UserWarning, match=r"expected 60 updates, found 30: 0\.4\d\d of the weights are 0 in place of"):
        graphopt.fit(executor, data, epochs=10, **options)
    executor = steps.executor(mlp(), prune=passes.Prune(0.5, end=20, every=1))
    stopping = graphopt.callbacks.EarlyStopping(patience=100)
    graphopt.fit(executor, data, epochs=10, callbacks=stopping, **options)
    assert stopping.record["epoch"] >= 7  # of 3 steps each
    assert int((executor.parameters["fc0.weight"] == 0).sum()) == 16


def test_what_loses_zeros_is_refused() -> None:
    step = steps.compiled(mlp(), prune=passes.Prune(0.5, end=60))
    with pytest.raises(GraphoptError, match="LocalSGD: expected masks that stay"):
        graphopt.LocalSGD(step)
    with pytest.raises(GraphoptError, match=r"expected a training graph without passes\.Prune"):
        graphopt.fit(graphopt.Executor(step), FEEDS, callbacks=graphopt.callbacks.WeightAverage())


# --- channels ---


def residual(batch_normalization: bool = True) -> onnx.ModelProto:
    """Return a network with a residual Add, a depthwise convolution, a Concat, views and pools."""
    norm = "BatchNormalization({0}, s{1}, h{1}, m{1}, v{1})" if batch_normalization else "Identity({0})"
    rng = np.random.default_rng(2)
    numbers: dict[str, np.ndarray] = {
        "k0": rng.standard_normal((8, 3, 3, 3)) / 4,
        "k1": rng.standard_normal((8, 8, 3, 3)) / 6,
        "k2": rng.standard_normal((8, 8, 3, 3)) / 6,
        "dw": rng.standard_normal((8, 1, 3, 3)) / 2,
        "k3": rng.standard_normal((6, 8, 1, 1)) / 2,
        "w0": rng.standard_normal((10, 14 * 4)) / 4,
        "w1": rng.standard_normal((10, 4)) / 4,
        **{f"c{i}": rng.standard_normal(size) / 4 for i, size in enumerate((8, 8, 8, 6, 10, 4))},
        "dc": np.zeros(8),
    }
    for i in range(3):
        numbers |= {
            f"s{i}": rng.random(8) + 0.5,
            f"h{i}": rng.standard_normal(8),
            f"m{i}": rng.standard_normal(8),
        }
        numbers[f"v{i}"] = rng.random(8) + 0.5
    used = [name for name in numbers if batch_normalization or name[0] not in "shmv"]
    return model(
        f"""g (float[N,3,8,8] x) => (float[N,4] y) {{
            a = Conv<pads=[1,1,1,1]>(x, k0, c0) b = {norm.format("a", 0)} r = Relu(b)
            d = Conv<pads=[1,1,1,1]>(r, k1, c1) e = {norm.format("d", 1)} f = Relu(e)
            g1 = Conv<pads=[1,1,1,1]>(f, k2, c2) h = {norm.format("g1", 2)} i = Add(r, h) j = HardSwish(i)
            p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(j)
            o = Conv<group=8, pads=[1,1,1,1]>(p, dw, dc) q = Clip(o, zero, six)
            t = Conv(q, k3, c3) u = Concat<axis=1>(t, q) l = AveragePool<kernel_shape=[2,2], strides=[2,2]>(u)
            n = Reshape(l, shape) z = Gemm<transB=1>(n, w0, c4) aa = Tanh(z) y0 = MatMul(aa, w1) y = Add(y0, c5)
        }}""",
        zero=np.array(0.0),
        six=np.array(6.0),
        shape=np.array([0, 56]),
        **{name: numbers[name] for name in used},
    )


@pytest.mark.parametrize("batch_normalization", [False, True])
def test_half_of_the_channels_go_and_the_outputs_stay(batch_normalization: bool) -> None:
    proto = residual(batch_normalization)
    feeds = {
        "x": RNG.standard_normal((5, 3, 8, 8), np.float32),
        "target": RNG.standard_normal((5, 4), np.float32),
    }
    options = {
        "optimizer": passes.AdamW(1e-2),
        "prune": passes.Prune(0.5, structure="channel", end=3, every=1),
    }
    options["training"] = passes.TrainingMode()
    executor = steps.trained(proto, feeds, 5, **options)
    trained = executor.trained()
    small = graphopt.remove_channels(trained)
    onnx.checker.check_model(small, full_check=True)
    np.testing.assert_allclose(
        steps.outputs(small, feeds)["y"], steps.outputs(trained, feeds)["y"], rtol=1e-5, atol=1e-5
    )
    found = {name: x.shape for name, x in weights(small).items()}
    assert found["k0"] == (4, 3, 3, 3)  # joined with k2 by the Add, and read by dw
    assert (found["k2"], found["dw"], found["dc"]) == ((4, 4, 3, 3), (4, 1, 3, 3), (4,))
    assert (found["k3"], found["w0"], found["w1"]) == ((3, 4, 1, 1), (5, 7 * 4), (5, 4))
    assert {node.name for node in small.graph.node} == {node.name for node in trained.graph.node}
    assert len(small.SerializeToString()) < 0.55 * len(trained.SerializeToString())


def test_a_bias_of_zeros_that_layers_share_joins_no_channels() -> None:
    """As exporters write convolutions without a bias: by Expand, or one initializer for several."""
    text = """g (float[N,2,6,6] x) => (float[N,3] y) {
        e = Expand(zero, four) a = Conv(x, k0, e) b = Relu(a) c = Conv(b, k1, z) d = Relu(c) f = Conv(d, k2, z)
        h = GlobalAveragePool(f) i = Flatten(h) y = Gemm(i, w, s) }"""
    numbers = {name: RNG.standard_normal((4, size, 2, 2)) for name, size in (("k0", 2), ("k1", 4), ("k2", 4))}
    zeros = {"zero": np.zeros(()), "four": np.array([4]), "z": np.zeros(4), "s": np.zeros(3)}
    proto = model(text, **numbers, **zeros, w=RNG.standard_normal((4, 3)))
    x = RNG.standard_normal((3, 2, 6, 6), np.float32)
    options = {"prune": passes.Prune(0.25, structure="channel"), "parameters": passes.Parameters(freeze="z")}
    feeds = {"x": x, "target": np.zeros((3, 3), np.float32)}
    trained = steps.trained(proto, feeds, 2, **options).trained()
    small = graphopt.remove_channels(trained)
    shapes = {name: weights(small)[name].shape for name in ("k0", "k1", "k2", "w")}
    assert shapes == {"k0": (3, 2, 2, 2), "k1": (3, 3, 2, 2), "k2": (3, 3, 2, 2), "w": (3, 3)}
    np.testing.assert_allclose(steps.outputs(small, feeds)["y"], steps.outputs(trained, feeds)["y"], atol=1e-5)


def test_channels_that_have_to_stay_are_named() -> None:
    w = RNG.standard_normal((4, 6))
    w[:, 2:4] = 0
    text = """g (float[N,4] x) => (float[N,3] y) {
        a = MatMul(x, w) b = Softmax(a) c = MatMul(b, v)
        d = MatMul(x, u) e = Sigmoid(d) f = MatMul(e, s) y = Add(c, f) }"""
    proto = model(text, w=w, u=w, v=RNG.standard_normal((6, 3)), s=RNG.standard_normal((6, 3)))
    with pytest.warns(UserWarning, match=r"2 of 'w', since Softmax node .* reads it, 2 of 'u', since Sigmoid node"):
        small = graphopt.remove_channels(proto)
    assert {name: x.shape for name, x in weights(small).items()} == {
        name: x.shape for name, x in weights(proto).items()
    }


def test_a_layer_of_zeros_keeps_one_channel_and_a_weight_with_two_readers_stays() -> None:
    zero = mlp((4, 8, 3), activation="Relu")
    for x in zero.graph.initializer[:2]:
        x.CopyFrom(onnx.numpy_helper.from_array(0 * onnx.numpy_helper.to_array(x), x.name))
    found = weights(graphopt.remove_channels(zero))
    assert (found["fc0.weight"].shape, found["fc1.weight"].shape) == ((1, 4), (3, 1))
    w = RNG.standard_normal((4, 4))
    w[:, 1] = 0
    text = """g (float[N,4] x) => (float[N,4] y) {
        a = MatMul(x, w) b = Relu(a) c = MatMul(b, v) d = Exp(w) y = MatMul(c, d) }"""
    with pytest.warns(UserWarning, match="1 of 'w', since Exp node"):
        assert weights(graphopt.remove_channels(model(text, w=w, v=w[0] + np.eye(4))))["w"].shape == (4, 4)


def test_a_constant_added_to_a_channel_keeps_it() -> None:
    w, b = RNG.standard_normal((4, 3)), np.array([0.0, 0.5, 0.0])
    w[:, :2] = 0
    text = "g (float[N,4] x) => (float[N,2] y) { a = MatMul(x, w) c = Add(a, b) d = Relu(c) y = MatMul(d, v) }"
    proto = model(text, w=w, b=b, v=RNG.standard_normal((3, 2)))
    small = graphopt.remove_channels(proto)
    assert {name: x.shape for name, x in weights(small).items()} == {"w": (4, 2), "b": (2,), "v": (2, 2)}
    x = {"x": RNG.standard_normal((5, 4), np.float32)}
    np.testing.assert_allclose(steps.outputs(small, x)["y"], steps.outputs(proto, x)["y"], atol=1e-6)


def quantized(form: str, folder: Any) -> onnx.ModelProto:
    """Return a perceptron in integers, by ONNX Runtime's own tools."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    onnx.save(mlp((4, 8, 3), activation="Relu"), folder / "float.onnx")
    if form == "dynamic":
        quantization.quantize_dynamic(folder / "float.onnx", folder / "int8.onnx")
        return onnx.load(folder / "int8.onnx")

    class Reader(quantization.CalibrationDataReader):
        rows = iter([{"x": FEEDS["x"]}])

        def get_next(self) -> Any:
            return next(self.rows, None)

    quantization.quantize_static(folder / "float.onnx", folder / "int8.onnx", Reader())
    return onnx.load(folder / "int8.onnx")


@pytest.mark.parametrize("form", ["qdq", "dynamic"])
def test_a_quantized_file_stays_as_it_is(form: str, tmp_path: Any) -> None:
    before = quantized(form, tmp_path)
    small = graphopt.remove_channels(before)
    assert [(x.name, x.dims) for x in small.graph.initializer] == [(x.name, x.dims) for x in before.graph.initializer]
    np.testing.assert_array_equal(steps.outputs(small, FEEDS)["y"], steps.outputs(before, FEEDS)["y"])


def test_masters_of_integers_are_pruned_and_return_as_zeros(tmp_path: Any) -> None:
    before = quantized("qdq", tmp_path)
    executor = steps.trained(before, FEEDS, 4, prune=passes.Prune(0.5, end=3, every=1))
    file = weights(executor.trained())
    integers = {name: x for name, x in file.items() if x.dtype == np.int8 and x.ndim == 2}
    assert len(integers) == 2
    assert all((x == 0).mean() >= 0.5 for x in integers.values())


@pytest.mark.slow
def test_a_run_prunes_channels_and_exports_the_small_model(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    graphopt.save(models.cnn((1, 8, 8), 10), "cnn.onnx")
    options = ["prune=channels", "fit.epochs=2", "folder=run"]
    assert cli.main(["cnn.onnx", *options]) == 0
    assert cli.main(["export", "folder=run", "form=small"]) == 0
    sizes = [(tmp_path / path).stat().st_size for path in ("run/trained.onnx", "run/small/cnn.onnx")]
    assert sizes[1] < 0.4 * sizes[0]


# --- low rank ---


def product(w: np.ndarray, how: str) -> onnx.ModelProto:
    k, n = w.shape
    node = {
        "MatMul": "y = MatMul(x, w)",
        "Gemm": "y = Gemm<alpha=0.5>(x, w, b)",
        "turned Gemm": "y = Gemm<transB=1>(x, w, b)",
        "Transpose": "t = Transpose(w) y = MatMul(x, t)",
    }[how]
    stored = w.T.copy() if how in ("turned Gemm", "Transpose") else w
    bias = {"b": RNG.standard_normal(n)} if "Gemm" in how else {}
    return model(f"g (float[M,{k}] x) => (float[M,{n}] y) {{ {node} }}", w=stored, **bias)


@pytest.mark.parametrize("how", ["MatMul", "Gemm", "turned Gemm", "Transpose"])
def test_two_factors_are_the_best_approximation_and_both_train(how: str) -> None:
    w = RNG.standard_normal((12, 20)) * np.geomspace(1, 1e-3, 12)[:, None]
    proto, x = product(w, how), RNG.standard_normal((6, 12), np.float32)
    u, s, v = np.linalg.svd(w, full_matrices=False)
    rank = int(np.argmax(np.cumsum(s**2) / np.sum(s**2) >= 0.97)) + 1
    executor = steps.executor(proto, quantize=passes.LowRank(energy=0.97))
    a, b = executor.parameters["w.low_rank"], executor.parameters["w"]
    b = b.T if how in ("turned Gemm", "Transpose") else b
    assert (a.shape, b.shape, rank < 5) == ((12, rank), (rank, 20), True)
    best = (u[:, :rank] * s[:rank]) @ v[:rank]
    np.testing.assert_allclose(a @ b, best, atol=1e-6)
    due = steps.outputs(product(best, how), {"x": x})["y"] if "Gemm" not in how else None
    found = executor.predict(x=x)["y"]
    if due is not None:
        np.testing.assert_allclose(found, due, rtol=1e-4, atol=1e-5)
    before = dict(executor.parameters)
    steps.losses(executor, {"x": x, "target": np.zeros((6, 20), np.float32)}, 3)
    assert not any(np.array_equal(before[name], array) for name, array in executor.parameters.items())
    trained = executor.trained()
    np.testing.assert_allclose(steps.outputs(trained, {"x": x})["y"], executor.predict(x=x)["y"], rtol=1e-5)
    assert weights(trained).keys() == before.keys()


def test_filters_become_those_of_two_convolutions() -> None:
    w = RNG.standard_normal((8, 3)) @ RNG.standard_normal((3, 4 * 9)) + RNG.standard_normal((8, 36)) / 20
    text = """g (float[N,4,9,9] x) => (float[N,8,5,5] y) {
        y = Conv<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x, w, b) }"""
    proto, best = (model(text, w=x.reshape(8, 4, 3, 3), b=w[:, 0]) for x in (w, _of_rank(w, 3)))
    x = RNG.standard_normal((3, 4, 9, 9), np.float32)
    executor = steps.executor(proto, quantize=passes.LowRank(energy=0.95))
    shapes = {"w": (8, 3, 1, 1), "w.low_rank": (3, 4, 3, 3), "b": (8,)}
    assert {n: array.shape for n, array in executor.parameters.items()} == shapes
    expected = steps.outputs(best, {"x": x})["y"]
    np.testing.assert_allclose(executor.predict(x=x)["y"], expected, rtol=1e-5, atol=1e-5)
    losses = steps.losses(executor, {"x": x, "target": np.zeros_like(expected)}, 3)
    assert losses[-1] < losses[0]
    grouped = model("g (float[N,4,9,9] x) => (float[N,4,9,9] y) { y = Conv<group=4>(x, w) }", w=w[:4, :1, None, None])
    with pytest.raises(GraphoptError, match="expected weights of MatMul, Gemm or Conv that become smaller"):
        steps.compiled(grouped, quantize=passes.LowRank(rank=1))


def _of_rank(w: np.ndarray, rank: int) -> np.ndarray:
    u, s, v = np.linalg.svd(w, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def test_a_weight_that_would_not_become_smaller_stays() -> None:
    chosen = passes.LowRank(rank=4)
    step = steps.compiled(mlp((32, 32, 3)), quantize=chosen)
    assert {x.name for x in step.graph.inputs if x.name.endswith("low_rank")} == {"fc0.weight.low_rank"}
    with pytest.raises(GraphoptError, match="weights of MatMul, Gemm or Conv that become smaller, found none"):
        steps.compiled(mlp(), quantize=chosen)
    for options in ({}, {"rank": 2, "energy": 0.5}):
        with pytest.raises(GraphoptError, match="LowRank: expected rank or energy"):
            passes.LowRank(**options)


def of_shared_weight() -> onnx.ModelProto:
    w = RNG.standard_normal((6, 6))
    w[:, 2] = 0
    graph = "a = MatMul(x, w) b = Relu(a) c = MatMul(b, w) d = Relu(c) y = MatMul(d, v)"
    return model(f"g (float[N,6] x) => (float[N,3] y) {{ {graph} }}", w=w, v=RNG.standard_normal((6, 3)))


def of_fed_bound() -> onnx.ModelProto:
    w = RNG.standard_normal((6, 4))
    w[:, 1] = 0
    graph = "a = MatMul(x, w) low = ReduceMax<keepdims = 0>(x) b = Clip(a, low) y = MatMul(b, v)"
    return model(f"g (float[N,6] x) => (float[N,3] y) {{ {graph} }}", w=w, v=RNG.standard_normal((4, 3)))


def of_shared_scale() -> onnx.ModelProto:
    arrays = {name: RNG.standard_normal((4, 6)) for name in ("f", "g", "v")}
    for name in ("f", "g"):
        arrays[name][1] = 0
    arrays |= {"s": np.ones(4), "z": np.array([0.1, 0, 0.2, 0.3]), "m": np.array([0.1, 0, 0.2, 0.3])}
    arrays |= {"n": np.array([0.1, -0.7, 0.2, 0.3]), "r": np.full(4, 2.0)}
    arrays = {name: x.reshape(4, 6, 1, 1) if x.ndim == 2 else x for name, x in arrays.items()}
    arrays["v"] = RNG.standard_normal((2, 4, 1, 1))
    graph = """h = Reshape(x, shape) a = Conv(h, f) b = Conv(h, g) c = BatchNormalization(a, s, z, m, r)
        d = BatchNormalization(b, s, z, n, r) e = Add(c, d) k = Relu(e) y = Conv(k, v)"""
    shape = np.array([-1, 6, 1, 1])
    return model(f"g (float[N,6] x) => (float[N,2,1,1] y) {{ {graph} }}", shape=shape, **arrays)


@pytest.mark.parametrize("made", [of_shared_weight, of_fed_bound, of_shared_scale])
@pytest.mark.filterwarnings("ignore:.*remove_channels")
def test_channels_that_something_else_reads_change_no_output(made: Any) -> None:
    proto, x = made(), RNG.standard_normal((5, 6)).astype(np.float32)
    small = graphopt.remove_channels(proto)
    found, expected = (steps.outputs(m, {"x": x}, optimize=False)["y"] for m in (small, proto))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_declared_size_allocates_nothing() -> None:
    proto = model("g (float[N,4] x, float[4,100000000000] b) => (float[N,M] y) { y = MatMul(x, b) }")
    with pytest.raises(GraphoptError, match="channels: expected at most 16,777,216, found 100,000,000,000"):
        graphopt.remove_channels(proto)


def test_a_weight_that_products_read_in_two_ways_keeps_its_rank() -> None:
    w = RNG.standard_normal((16, 2)) @ RNG.standard_normal((2, 16))
    graph = "a = MatMul(x, w) b = Tanh(a) t = Transpose<perm = [1, 0]>(w) c = MatMul(b, t) y = MatMul(c, v)"
    proto = model(
        f"g (float[N,16] x) => (float[N,16] y) {{ {graph} }}",
        w=w,
        v=w.T + RNG.standard_normal(16)[:, None] * w[0],
    )
    step = steps.compiled(proto, quantize=passes.LowRank(rank=3))
    assert "w" in {x.name for x in step.graph.inputs}
    with pytest.raises(GraphoptError, match="LowRank: pattern='typo' matches no weight"):
        steps.compiled(proto, quantize=passes.LowRank(rank=3, pattern="typo"))
