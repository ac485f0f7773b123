"""Models whose custom operators lie around what trains, with the library of onnxruntime-extensions."""

from __future__ import annotations

from pathlib import Path

import messages
import numpy as np
import onnx
import onnxruntime_extensions
import pytest

import graphopt
import passes
from graphopt import cli
from graphopt.targets.native import toolchain

LIBRARY = onnxruntime_extensions.get_library_path()
DECLARED = ", float[N,3] inverse"
X = np.array([[2, 0, 0], [0, 4, 0], [0, 1, 5]], np.float32)
WEIGHT = np.array([[0.1, 0.2], [0.35, -0.4], [0.5, 0.6]], np.float32)


def model(declared: str = DECLARED) -> onnx.ModelProto:
    numbers = ", ".join(map(str, WEIGHT.ravel()))
    return onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17, "ai.onnx.contrib" : 1]>
        g (float[N,3] x) => (float[N,2] y) <float[3,2] w = {{{numbers}}}{declared}> {{
            inverse = ai.onnx.contrib.Inverse(x)
            y = MatMul(inverse, w)
        }}"""
    )


def step(proto: onnx.ModelProto) -> onnx.ModelProto:
    return graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))


@pytest.mark.parametrize("options", [{}, {"native": True, "verify": True}, {"steps_per_call": 2}], ids=str)
def test_what_follows_a_custom_operator_trains(options: dict[str, object]) -> None:
    if "native" in options and toolchain.compiler() is None:
        pytest.skip("needs a C compiler")
    executor = graphopt.Executor(step(model()), custom_ops=[LIBRARY], **options)
    target = np.ones((3, 2), np.float32)
    executor.run([{"x": X, "target": target}] * 2)
    weight, inverse = WEIGHT.astype(np.float64), np.linalg.inv(X.astype(np.float64))
    for _ in range(2):
        weight -= 0.1 * inverse.T @ (2 / 6 * (inverse @ weight - target))
    np.testing.assert_allclose(executor.parameters["w"], weight, rtol=1e-5)


@pytest.mark.slow
def test_the_command_line_names_a_library_and_a_recipe_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "custom.onnx")
    np.savez("data.npz", x=np.tile(X, (4, 1)), target=np.ones((12, 2), np.float32))
    options = [
        "data=npz",
        "data.path=data.npz",
        "fit.batch_size=3",
        "fit.shuffle=false",
        "loss=mean_squared_error",
    ]
    options += ["fit.validation=null", "fit.epochs=1"]
    named = [f"executor.custom_ops=[{LIBRARY}]"]
    assert cli.main(["custom.onnx", *options, *named, "hydra.run.dir=run"]) == 0
    assert cli.main(["predict", "folder=run", *options[:3], *named]) == 0
    assert np.load("run/predictions.npz")["y"].shape == (12, 2)
    Path("experiment").mkdir()
    Path("experiment/theirs.yaml").write_text(
        f"# @package _global_\nmodel: custom.onnx\nexecutor: {{custom_ops: [{LIBRARY}]}}\n"
    )
    assert cli.main(["--config-dir", ".", "experiment=theirs", *options]) == 1
    assert "executor.custom_ops: expected it on the command line alone" in capfd.readouterr().err


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("custom_operators_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("custom_operators_mistakes", call, globals())
