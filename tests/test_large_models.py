"""Models of more than protobuf's 2 GB, and frozen weights that lie in files."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders import mlp, model

import graphopt
import passes
from graphopt.graph import merging, parts, storage
from graphopt.graph.mapped import MappedTensor
from graphopt.inspection.report import report
from graphopt.runtime import contest, forms
from graphopt.runtime import frozen as placements
from graphopt.runtime.frozen import placement_by_size
from graphopt.targets.target import ONNXRUNTIME
from passes.weights.evidence import is_irregular

HAS_ADAPTERS = hasattr(onnxruntime, "LoraAdapter")  # versions without them refuse products of rank 0
STEPS = {"loss": passes.MeanSquaredError(), "optimizer": passes.Adam(0.01)}
FEEDS = {
    "x": np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32),
    "target": np.ones((6, 3), np.float32),
}


def small():
    proto = mlp((64, 64, 3))
    proto.graph.output[0].name = proto.graph.node[-1].output[0] = "out"
    return proto


def run(source, folder):
    """Compile, save, load, train, and save what was trained; return the losses and the trained weights."""
    step = graphopt.compile(source, parameters=passes.Parameters(freeze="fc0.weight"), **STEPS)
    graphopt.save(step, folder / "step.onnx")
    executor = graphopt.Executor(folder / "step.onnx", threads=1)
    losses = [executor.step(FEEDS)["loss"] for _ in range(3)]
    losses.append(executor.evaluate(FEEDS)["loss"])
    graphopt.save(executor.trained(), folder / "trained.onnx")
    predicted = graphopt.run(graphopt.load(folder / "trained.onnx"), {"x": FEEDS["x"]})["out"]
    return losses, predicted


def test_weights_beside_a_model_train_as_those_in_it(tmp_path, monkeypatch):
    """As though 2 GB were 1000 bytes: files have their weights beside them, sessions theirs in memory."""
    expected = run(small(), tmp_path)
    monkeypatch.setattr(storage, "LIMIT", 1000)
    folder = tmp_path / "large"
    folder.mkdir()
    path = folder / "model.onnx"
    onnx.save(small(), path, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    losses, predicted = run(path, folder)
    assert losses == expected[0]
    np.testing.assert_array_equal(predicted, expected[1])
    assert {file.name for file in folder.iterdir()} == {
        f"{name}.onnx{end}" for name in ("model", "step", "trained") for end in ("", ".data")
    }
    assert max(path.stat().st_size for path in folder.glob("*.onnx")) < 16000
    onnx.checker.check_model(folder / "trained.onnx", full_check=True)


def test_a_model_with_weights_beside_it_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "LIMIT", 1000)
    proto = small()
    proto.graph.node[0].attribute.add(name="unknown", i=1, type=onnx.AttributeProto.INT)
    with pytest.raises(graphopt.GraphoptError, match="not a valid ONNX model"):
        graphopt.load(proto)


@pytest.fixture
def mapped(tmp_path, monkeypatch):
    """Return the path of a model whose weights are mapped, as though they had 64 MB."""
    monkeypatch.setattr(storage, "MAPPED_FROM", 1)
    onnx.save(small(), tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=0)
    return tmp_path / "m.onnx"


def compiled(source):
    return graphopt.compile(source, parameters=passes.Parameters(freeze="fc0.weight"), **STEPS)


@pytest.mark.parametrize("source", ["path", "ir"])
def test_mapped_weights_are_those_of_the_file_from_load_to_session(mapped, source):
    step = compiled(mapped if source == "path" else ir.load(mapped))
    weight = step.graph.initializers["fc0.weight"].const_value
    assert isinstance(weight, MappedTensor)
    executor = graphopt.Executor(step, frozen="mapped", native=False)
    executor.step(FEEDS)
    executor.predict(FEEDS)
    (shared,) = executor.device_options.shared.values()  # one for all sessions
    assert shared.value.data_ptr() == weight.numpy().ctypes.data


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("frozen", ["packed", "mapped", "low"])
def test_weights_train_alike_wherever_they_lie(mapped, tmp_path, frozen, native):
    """Steps, several steps in a call, evaluation, prediction, checkpoints and the trained model."""
    found, executors = {}, {}
    for name, options in {"plain": {"frozen": "packed", "native": False}, "now": {"frozen": frozen}}.items():
        executor = graphopt.Executor(compiled(mapped), threads=1, **{"native": native, **options})
        losses = [executor.step(FEEDS)["loss"], *(x["loss"] for x in executor.run([FEEDS] * 3))]
        executor.save(tmp_path / name)
        graphopt.save(executor.trained(), tmp_path / f"{name}.onnx")
        predicted = executor.predict(FEEDS)["out"]
        np.testing.assert_allclose(
            graphopt.run(tmp_path / f"{name}.onnx", {"x": FEEDS["x"]})["out"], predicted, rtol=1e-5, atol=1e-6
        )
        found[name], executors[name] = [*losses, executor.evaluate(FEEDS)["loss"], predicted.sum()], executor
    np.testing.assert_allclose(found["now"], found["plain"], rtol=2e-5)
    assert (frozen == "packed") != (f"frozen weights {frozen}" in repr(executors["now"]))
    executors["plain"].load(tmp_path / "now")


def test_a_file_that_changes_beneath_its_weights_is_an_error(mapped):
    executor = graphopt.Executor(compiled(mapped), frozen="mapped")
    executor.step(FEEDS)
    weights = mapped.with_name("w")
    content = weights.read_bytes()
    os.replace(shutil.copy(weights, mapped.with_name("copy")), weights)  # another file: ours stays as it was
    executor.step(FEEDS)
    again = graphopt.Executor(compiled(mapped), frozen="mapped")
    weights.write_bytes(content[:-4] + b"aaaa")
    os.utime(weights, ns=(1, 1))
    for call in (again.step, again.predict, again.evaluate):
        with pytest.raises(graphopt.GraphoptError, match="found a file that has changed since: load the model again"):
            call(FEEDS)
    executor.step(FEEDS)


def test_a_trained_file_is_the_same_however_it_is_written(mapped, tmp_path, monkeypatch):
    """Weights by reference, merged adapters, slots, and the file that was compiled; in one file and in two."""
    monkeypatch.setattr(merging, "_LAZY_FROM", 1)
    steps = [compiled(mapped), graphopt.compile(mapped, adapter=passes.LoRA("fc*.weight", rank=2), **STEPS)]
    for step, options in itertools.product(steps, ({}, {"into": mapped}, {"into": ir.load(mapped)})):
        executor = graphopt.Executor(step)
        executor.step(FEEDS)
        if HAS_ADAPTERS and step is steps[1] and options and isinstance(options["into"], ir.Model):
            options = {**options, "adapters": "slots"}
        proto = executor.trained(**options)
        assert not any(x.external_data for x in proto.graph.initializer)
        onnx.save(proto, tmp_path / "plain.onnx")
        executor.save_trained(tmp_path / "one.onnx", **options)
        assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()
        with monkeypatch.context() as context:
            context.setattr(parts, "LIMIT", 1000)
            context.setattr(storage, "LIMIT", 1000)
            for name in ("usual", "streamed"):
                (tmp_path / name).mkdir(exist_ok=True)
            graphopt.save(proto, tmp_path / "usual" / "m.onnx")
            context.setattr(parts.ModelParts, "message", None)
            executor.save_trained(tmp_path / "streamed" / "m.onnx", **options)
        for name in ("m.onnx", "m.onnx.data"):
            assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "usual" / name).read_bytes()
        found = [graphopt.run(tmp_path / name, {"x": FEEDS["x"]})["out"] for name in ("one.onnx", "usual/m.onnx")]
        np.testing.assert_array_equal(*found)


def test_a_trained_file_may_replace_the_one_that_is_mapped(mapped, monkeypatch):
    monkeypatch.setattr(parts, "LIMIT", 1000)
    executor = graphopt.Executor(compiled(mapped), frozen="mapped")
    executor.step(FEEDS)
    path = mapped.with_name("w.onnx")
    path.with_name("w.onnx.data").write_bytes(mapped.with_name("w").read_bytes())
    proto = onnx.load(mapped, load_external_data=False)
    for tensor in proto.graph.initializer:
        tensor.external_data[0].value = "w.onnx.data"
    path.write_bytes(proto.SerializeToString())
    other = graphopt.Executor(compiled(path), frozen="mapped")
    other.step(FEEDS)
    predicted = other.predict(FEEDS)["out"]
    other.save_trained(path)
    np.testing.assert_array_equal(other.predict(FEEDS)["out"], predicted)
    np.testing.assert_allclose(graphopt.run(path, {"x": FEEDS["x"]})["out"], predicted, rtol=1e-5)


def test_a_trained_file_is_not_written_from_weights_that_have_changed(mapped, tmp_path):
    executor = graphopt.Executor(compiled(mapped))
    os.utime(mapped.with_name("w"), ns=(1, 1))
    for call in (executor.trained, lambda: executor.save_trained(tmp_path / "trained.onnx")):
        with pytest.raises(graphopt.GraphoptError, match="found a file that has changed since"):
            call()
    with pytest.raises(graphopt.GraphoptError, match=r"save_trained: into: expected the model that gets slots"):
        executor.save_trained(tmp_path / "trained.onnx", adapters="slots")
    assert not (tmp_path / "trained.onnx").exists()


def test_a_weight_that_differs_from_the_file_is_found_wherever_it_lies(mapped):
    executor = graphopt.Executor(compiled(mapped))
    weights = mapped.with_name("w")
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.unlink()  # the mapped one stays
    weights.write_bytes(content)
    with pytest.raises(graphopt.GraphoptError, match="expected the numbers of the file that was compiled"):
        executor.trained(into=mapped)


@pytest.mark.parametrize("kind", ["symbolic", "hard", "outside", "short"])
def test_weights_behind_links_are_not_mapped(mapped, kind):
    weights = mapped.with_name("w")
    if kind == "symbolic":
        (mapped.parent.parent / "elsewhere").mkdir()
        weights.rename(mapped.parent.parent / "elsewhere/w")
        weights.symlink_to(mapped.parent.parent / "elsewhere/w")
    elif kind == "hard":
        os.link(weights, mapped.with_name("other"))
    elif kind == "short":
        os.truncate(weights, 100)
    else:
        proto = onnx.load(mapped, load_external_data=False)
        for tensor in proto.graph.initializer:
            tensor.external_data[0].value = "../w"
        (mapped.parent / "in").mkdir()
        mapped = mapped.parent / "in" / "m.onnx"
        mapped.write_bytes(proto.SerializeToString())
    found = {"symbolic": "symbolic link", "hard": "multiple hard links", "short": "found a file of 100 bytes"}
    with pytest.raises(graphopt.GraphoptError, match=found.get(kind, r"'?\.\./w")):
        graphopt.load(mapped)


@pytest.mark.parametrize("name", ["w", "in a cache"])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_links_in_the_folder_of_a_model_or_its_cache_are_followed(mapped, monkeypatch, name, is_mapped):
    """As in the cache of Hugging Face, whose files are links to blobs."""
    if not is_mapped:
        monkeypatch.setattr(storage, "MAPPED_FROM", 2**40)
    expected = {k: x.const_value.numpy().copy() for k, x in graphopt.load(mapped).graph.initializers.items()}
    blobs, place = mapped.parent / "models--a/blobs", mapped.parent / "models--a/snapshots/1/onnx"
    if name == "w":
        blobs, place = mapped.parent / "blobs", mapped.parent
    blobs.mkdir(parents=True)
    place.mkdir(parents=True, exist_ok=True)
    for file in ("w", mapped.name):
        mapped.with_name(file).rename(blobs / f"blob-{file}")
        (place / file).symlink_to(os.path.relpath(blobs / f"blob-{file}", place))
    found = graphopt.load(place / mapped.name).graph.initializers
    assert expected.keys() == found.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key].const_value.numpy(), array)


def test_a_file_that_is_cut_beneath_its_weights_is_an_error(mapped):
    """Reading memory beyond the end of a mapped file would end the process."""
    model = graphopt.load(mapped)
    os.truncate(mapped.with_name("w"), 0)
    read = [x.const_value for x in model.graph.initializers.values() if isinstance(x.const_value, MappedTensor)]
    assert read
    for tensor in read:
        for call in (tensor.numpy, tensor.tobytes, lambda tensor=tensor: np.asarray(tensor)):
            with pytest.raises(graphopt.GraphoptError, match="found a file that has changed since"):
                call()


def test_the_place_of_weights_follows_from_their_size(mapped, monkeypatch):
    step = compiled(mapped)
    assert placement_by_size(step) == "packed"
    monkeypatch.setattr(placements, "_MAPPED_FROM", 1000)
    assert placement_by_size(step) == graphopt.Executor(step).frozen == "mapped"
    monkeypatch.setattr(placements, "_LOW_FROM", 1000)
    assert graphopt.Executor(step).frozen == "low"
    assert graphopt.Executor(step, frozen="packed").frozen == "packed"
    with pytest.raises(graphopt.GraphoptError, match=r"expected .auto., .packed., .mapped. or .low., found .sideways."):
        graphopt.Executor(step, frozen="sideways")


@pytest.mark.parametrize("frozen", ["mapped", "low"])
def test_kernels_of_a_large_model_are_taken_without_measuring_steps(mapped, monkeypatch, frozen):
    measured = []
    monkeypatch.setattr(forms, "COMPILED_PARAMETERS", 1)
    monkeypatch.setattr(contest.Memory, "read", lambda *_: None)
    monkeypatch.setattr(contest, "measured", lambda calls, _: measured.append(calls) or {"kernels": 1.0})
    executor = graphopt.Executor(compiled(mapped), frozen=frozen, native="auto", verify=True)
    plain = graphopt.Executor(compiled(mapped), native=False)
    for _ in range(3):
        assert executor.step(FEEDS)["loss"] == pytest.approx(plain.step(FEEDS)["loss"], rel=1e-5)
    assert "kernels" in {form.name for form in executor._steps.runner.forms}
    assert bool(measured) == (frozen == "mapped")


def test_executors_with_little_memory_share_it(mapped):
    steps = [compiled(mapped) for _ in range(2)]
    executors = [graphopt.Executor(step, frozen="low", native=False) for step in steps]
    expected = graphopt.Executor(steps[0], frozen="packed", native=False)
    for _ in range(3):
        losses = [executor.step(FEEDS)["loss"] for executor in (*executors, expected)]
        assert losses == pytest.approx(losses[-1:] * 3, rel=1e-6)
        assert executors[0].evaluate(FEEDS)["loss"] == executors[1].evaluate(FEEDS)["loss"]


@pytest.mark.parametrize("options", [{}, {"native": False}, {"verify": True}, {"verify": False}], ids=lambda x: str(x))
def test_without_kernels_the_plain_step_of_a_large_model_runs(mapped, monkeypatch, options):
    for name in ("GRAPHOPT_NATIVE", "GRAPHOPT_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(forms, "lower_to_kernels", lambda *args, **options: None)
    lowered = []
    monkeypatch.setattr(ONNXRUNTIME.__class__, "lower", lambda self, model: lowered.append(model) or model.clone())
    graphopt.Executor(compiled(mapped), frozen="low", **options).step(FEEDS)
    assert bool(lowered) == bool(options)


def test_a_report_says_where_large_frozen_weights_lie(monkeypatch):
    proto = mlp((512, 512, 3))
    pipeline = graphopt.standard(parameters=passes.Parameters(freeze="fc0.weight"), **STEPS)
    assert "frozen     1.05 MB of weights: packed by each session" in report(proto, pipeline, batch=4).summary()


def test_rows_of_a_tied_embedding_need_no_transposed_copy():
    proto = model(
        "g (int64[N,T] ids) => (float[N,T,9] y) { e = Transpose(w) h = Gather(e, ids) k = MatMul(h, p) "
        "t = Tanh(k) y = MatMul(t, w) }",
        w=np.random.default_rng(0).standard_normal((4, 9)), p=np.eye(4) + 0.1,
    )  # fmt: skip
    step = graphopt.compile(proto, parameters=passes.Parameters("p"), **STEPS)
    assert not any(x.const_value for node in step.graph if node.op_type == "Transpose" for x in node.inputs)
    executor, ids = graphopt.Executor(step), np.array([[1, 8, 0], [3, 3, 2]])
    np.testing.assert_allclose(
        executor.predict(ids=ids)["y"], graphopt.run(proto, {"ids": ids})["y"], rtol=1e-5, atol=1e-6
    )


def test_parts_show_that_a_large_array_is_no_constant():
    rng, n = np.random.default_rng(0), 1100
    assert is_irregular(rng.standard_normal((n, n)).astype(np.float32))
    padded = rng.standard_normal((n, n))
    padded[-600:] = 0
    assert is_irregular(padded)
    for constant in (
        np.tri(n), np.triu(np.full((n, n), -np.inf), 1), np.zeros((n, n)), np.arange(n * n).reshape(n, n),
        np.tile(np.arange(n), (n, 1)), rng.integers(0, 2, (n, n)),
        np.linspace(0, 1, n * n), rng.integers(-9, 9, (n, n)) / 8,
    ):  # fmt: skip
        assert not is_irregular(constant.astype(np.float32))


LARGE = """
    import os, sys, threading, time
    import numpy as np
    import graphopt, passes

    def memory(name):
        return next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith(name)) * 1024

    peaks = {"RssAnon": 0}
    def watch():
        while True:
            peaks["RssAnon"] = max(peaks["RssAnon"], memory("RssAnon"))
            time.sleep(0.005)

    threading.Thread(target=watch, daemon=True).start()
    path, size = sys.argv[1], float(sys.argv[2])
    before = memory("RssAnon")

    def within(part, anonymous):
        time.sleep(0.02)
        print(part, memory("VmHWM") / size, (peaks["RssAnon"] - before) / size, flush=True)
        assert memory("VmHWM") - before <= 1.3 * size and peaks["RssAnon"] - before <= anonymous * size

    step = graphopt.compile(
        path, parameters=passes.Parameters("layers.0.weight"), loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(1e-3),
    )
    within("compile", 0.1)
    graphopt.save(step, path + ".step")
    within("save", 0.1)
    executor = graphopt.Executor(step, threads=1)
    x = np.ones((8, 2048), np.float32)
    losses = [executor.step(x=x, target=x)["loss"] for _ in range(3)]
    predicted = executor.predict(x=x)["y"]
    executor.evaluate(x=x, target=x)
    assert losses[2] < losses[0] and executor.frozen == "low"
    within("run", 0.3)
    executor.save(path + ".state")
    executor.load(path + ".state")
    within("checkpoint", 0.3)
    executor.save_trained(path + ".into", into=path)
    within("trained into the file", 0.3)
    assert os.path.getsize(path + ".into.data") >= size
    os.remove(path + ".into.data")
    executor.save_trained(path + ".trained")
    within("trained", 0.3)
    del executor
    again = graphopt.Executor(path + ".step", threads=1)
    assert again.step(x=x, target=x)["loss"] == losses[0]
    np.testing.assert_allclose(graphopt.run(path + ".trained", {"x": x})["y"], predicted, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("gigabytes", [3, 6])
def test_memory_of_a_large_model_is_that_of_its_file(tmp_path, gigabytes):
    """Takes three times as much space on the disk."""
    width, path = 2048, tmp_path / "m.onnx"
    count = gigabytes * 10**9 // (4 * width * width)
    rng = np.random.default_rng(0)
    proto = model("g (float[N,2048] x) => (float[N,2048] y) { y = Identity(x) }")
    del proto.graph.node[:]
    row = rng.standard_normal((width, width)).astype(np.float32) / np.float32(np.sqrt(width))
    with (tmp_path / "w").open("wb") as file:
        for i in range(count):
            tensor = onnx.TensorProto(name=f"layers.{i}.weight", data_type=1, dims=(width, width), data_location=1)
            for key, value in {"location": "w", "offset": file.tell(), "length": row.nbytes}.items():
                tensor.external_data.add(key=key, value=str(value))
            np.roll(row, i).tofile(file)
            proto.graph.initializer.append(tensor)
            x = f"t{i - 1}" if i else "x"
            proto.graph.node.add(op_type="MatMul", input=[x, tensor.name], output=[f"h{i}"])
            proto.graph.node.add(op_type="Tanh", input=[f"h{i}"], output=[f"t{i}" if i < count - 1 else "y"])
    path.write_bytes(proto.SerializeToString())
    program = [sys.executable, "-c", textwrap.dedent(LARGE), str(path), str((tmp_path / "w").stat().st_size)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=1800)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("freeze", [None, "table"])
def test_a_model_of_more_than_2_gb_trains(tmp_path, freeze):
    """An embedding of 2.2 GB, frozen or trained by plain SGD; takes 20 GB of memory."""
    rows, width = 4_400_000, 128
    proto = model(
        "g (int64[N] x) => (float[N,2] y) { h = Gather(table, x)\n y = MatMul(h, head) }",
        head=np.random.default_rng(0).standard_normal((width, 2)),
    )
    table = onnx.TensorProto(name="table", data_type=1, dims=(rows, width), data_location=1)
    table.external_data.add(key="location", value="weights")
    proto.graph.initializer.append(table)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    np.full(rows * width, 0.1, np.float32).tofile(tmp_path / "weights")
    loss, optimizer = passes.MeanSquaredError(), passes.SGD(0.01)
    step = graphopt.compile(path, parameters=passes.Parameters(freeze=freeze), loss=loss, optimizer=optimizer)
    graphopt.save(step, tmp_path / "step.onnx")
    del step
    executor = graphopt.Executor(tmp_path / "step.onnx", low_memory=True)
    (tmp_path / "step.onnx.data").unlink()
    feeds = {"x": np.array([0, rows - 1, 7]), "target": np.ones((3, 2), np.float32)}
    losses = [executor.step(feeds)["loss"] for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    predicted = executor.predict(feeds)["y"]
    graphopt.save(executor.trained(), tmp_path / "trained.onnx")
    del executor
    found = graphopt.run(tmp_path / "trained.onnx", {"x": feeds["x"]})["y"]
    np.testing.assert_allclose(found, predicted, rtol=1e-6)
