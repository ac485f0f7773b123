"""On a GPU: what needs one is skipped without, and says so.

With a GPU: pip install -e ".[gpu,test]" and pytest tests/test_gpu.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from builders import mlp, model

import graphopt
import passes
from graphopt import cli, models
from graphopt.graph.roles import Role, with_role
from graphopt.training.fit import fit

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((32, 1, 8, 8)).astype(np.float32)
TOKENS = RNG.integers(0, 50, (32, 16))
LABELS = RNG.integers(0, 10, 32)
NETWORKS: dict[str, tuple[Any, Any, np.ndarray, np.ndarray]] = {
    "mlp": (models.mlp((64,), 10, hidden=(32,)), passes.CrossEntropy(), IMAGES.reshape(32, 64), LABELS),
    "cnn": (models.cnn((1, 8, 8), 10), passes.CrossEntropy(), IMAGES, LABELS),
    "transformer": (
        models.transformer((16,), 50),
        passes.CrossEntropy(axis=-1),
        TOKENS,
        TOKENS[:, ::-1].copy(),
    ),
}


def no_gpu() -> str:
    """Return why there is no GPU to test on, or nothing."""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this onnxruntime has no CUDA provider: pip install onnxruntime-gpu"
    return "" if Path("/dev/nvidia0").exists() else "no NVIDIA GPU at /dev/nvidia0"


on_gpu = pytest.mark.skipif(bool(no_gpu()), reason=no_gpu())
each_network = pytest.mark.parametrize("network", NETWORKS)


def compiled(network: str, **steps: Any) -> Any:
    proto, loss, _, _ = NETWORKS[network]
    return graphopt.compile(proto, loss=loss, **{"optimizer": passes.AdamW(1e-3), **steps})


def batch(executor: graphopt.Executor, network: str, rows: int = 32) -> dict[str, np.ndarray]:
    _, _, x, target = NETWORKS[network]
    return dict(zip(executor.inputs, (x[:rows], target[:rows]), strict=True))


def same(first: graphopt.Executor, second: graphopt.Executor) -> None:
    """Check that states are equal, as far as kernels in another order of sums allow."""
    for name, value in first.state.items():
        np.testing.assert_allclose(second.state[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


MIXED = {
    "precision": passes.MixedPrecision(),
    "gradient": passes.Gradient(loss_scale=2.0**12),
    "loss_scale": passes.DynamicLossScale(),
}


@pytest.mark.slow
def test_the_report_says_how_to_see_what_the_cpu_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    graphopt.save(mlp(), "my.onnx")
    arguments = ["report", "my.onnx", "folder=out"]
    assert cli.main([*arguments, "executor=cuda"]) == 0
    assert "on cuda    Executor.placement" in capsys.readouterr().out
    assert "on cuda" in Path("out/report.txt").read_text()
    assert cli.main(arguments) == 0
    assert "on cuda" not in capsys.readouterr().out


@on_gpu
@each_network
def test_steps_equal_those_on_the_cpu(network: str) -> None:
    step = compiled(network, clip=passes.ClipGlobalNorm(0.5), schedule=passes.Cosine(steps=20, warmup=3))
    on_cpu, on_cuda = (graphopt.Executor(step, device=device) for device in ("cpu", "cuda"))
    for rows in (32, 32, 7, 32):
        feeds = batch(on_cpu, network, rows)
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=1e-3)
    same(on_cpu, on_cuda)
    assert on_cuda.evaluate(feeds)["loss"] == pytest.approx(on_cpu.evaluate(feeds)["loss"], rel=1e-3)


@on_gpu
@each_network
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_mixed_precision_is_as_on_the_cpu_but_for_rounding(network: str, cuda_graph: bool) -> None:
    on_cpu = graphopt.Executor(compiled(network))
    on_cuda = graphopt.Executor(compiled(network, **MIXED), device="cuda", cuda_graph=cuda_graph)
    feeds = batch(on_cpu, network)
    for _ in range(5):
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=2e-2)
    assert on_cuda.state["step"] == 5


@on_gpu
@each_network
def test_no_operator_falls_back_but_arithmetic_on_shapes(network: str) -> None:
    executor = graphopt.Executor(compiled(network), device="cuda")
    if not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        pytest.skip("onnxruntime 1.24 and later tell where operators run")
    placement = executor.placement()
    assert sum(placement["CUDAExecutionProvider"].values()) > 20
    assert set(placement.get("CPUExecutionProvider", ())) <= {"Cast", "Div", "Neg", "Mul", "Gather", "Concat"}
    static = graphopt.Executor(compiled(network), device="cuda", static_shapes=True)
    static.step(batch(static, network))
    assert set(static.placement()) == {"CUDAExecutionProvider"}


@on_gpu
@each_network
@pytest.mark.parametrize("report", [None, ["loss"], []])
def test_cuda_graphs_are_the_same_steps(network: str, report: list[str] | None) -> None:
    """Of both sets of buffers, of batches of two shapes, of changing data and hyperparameters."""
    step = compiled(network)
    plain = graphopt.Executor(step, device="cuda")
    captured = graphopt.Executor(step, device="cuda", cuda_graph=True, report=report)
    for i, rows in enumerate((32, 32, 32, 7, 32, 7, 32)):
        feeds = {name: np.roll(x, i, axis=0) for name, x in batch(plain, network, rows).items()}
        rate = 1e-3 / (1 + i)
        expected = plain.step(feeds, learning_rate=rate)
        found = captured.step(feeds, learning_rate=rate)
        assert list(found) == [name for name in expected if report is None or name in report]
        for name, value in found.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-4)
    same(plain, captured)
    assert captured.steps == 7


@on_gpu
def test_a_cuda_graph_of_control_flow_is_refused() -> None:
    executor = graphopt.Executor(
        compiled("mlp", accumulate=passes.Accumulate(2)), device="cuda", cuda_graph=True
    )
    with pytest.raises(graphopt.GraphoptError, match="control flow"):
        executor.step(batch(executor, "mlp"))


@on_gpu
def test_a_captured_output_needs_a_shape() -> None:
    nonzero = model(
        "g (float[N,4] x) => (float[N,3] y, int64[2,K] z) { y = MatMul(x, w) z = NonZero(y) }",
        w=np.ones((4, 3)),
    )
    step = graphopt.compile(
        nonzero, loss=passes.Losses({"y": passes.MeanSquaredError()}), optimizer=passes.SGD()
    )
    executor = graphopt.Executor(step, device="cuda", cuda_graph=True)
    target = str(with_role(step, Role.TARGET)[0].name)
    with pytest.raises(graphopt.GraphoptError, match="output 'z': expected a shape that the batch's tells"):
        executor.step({"x": np.ones((2, 4), np.float32), target: np.ones((2, 3), np.float32)})


@on_gpu
@each_network
def test_batches_that_lie_on_the_gpu_are_not_copied(network: str) -> None:
    executor = graphopt.Executor(compiled(network), device="cuda")
    expected = graphopt.Executor(compiled(network), device="cuda")
    feeds = batch(executor, network)
    placed = executor.on_device(feeds)
    assert {value.device_name() for value in placed.values()} == {"cuda"}
    for _ in range(3):
        assert executor.step(placed)["loss"] == pytest.approx(expected.step(feeds)["loss"], rel=1e-5)
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        tensors = {name: torch.from_numpy(x).cuda() for name, x in feeds.items()}
        assert executor.step(tensors)["loss"] == pytest.approx(expected.step(feeds)["loss"], rel=1e-5)


@on_gpu
@pytest.mark.parametrize("options", [{}, {"cuda_graph": True}], ids=str)
def test_fit_and_checkpoints(options: dict[str, Any], tmp_path: Path) -> None:
    on_cpu = graphopt.Executor(compiled("cnn"), report=["loss"])
    on_cuda = graphopt.Executor(compiled("cnn"), device="cuda", report=["loss"], **options)
    data = batch(on_cpu, "cnn")
    records = [fit(each, data, epochs=3, batch_size=10, validation=0.25) for each in (on_cpu, on_cuda)]
    for expected, found in zip(*records, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-3)
    on_cuda.save(tmp_path / "state.safetensors")
    loss = on_cuda.step(data)["loss"]
    on_cpu.load(tmp_path / "state.safetensors")
    assert on_cpu.step(data)["loss"] == pytest.approx(loss, rel=1e-3)
    on_cuda.load(tmp_path / "state.safetensors")
    assert on_cuda.step(data)["loss"] == pytest.approx(loss, rel=1e-5)
