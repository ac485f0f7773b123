"""Benchmarks run, and compare the same work; what they measure is not asserted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from graphopt.targets.native import toolchain

FOLDER = Path(__file__).parents[1] / "examples/benchmarks"


def benchmark(name, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_scikit_learn_and_pytorch_take_the_same_steps(monkeypatch, tmp_path):
    path = tmp_path / "curves.svg"
    found = benchmark("scikit_learn", monkeypatch).main(epochs=3, rounds=1, path=str(path))
    assert set(found) == {"graphopt", "scikit-learn", "PyTorch"}
    curves = np.array([curve for _, curve in found.values()])
    np.testing.assert_allclose(curves[1:], curves[[0, 0]], rtol=1e-4)
    assert "<svg" in path.read_text()


@pytest.mark.exhaustive
def test_estimators_and_scikit_learn_s_networks_are_timed(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # joblib's workers import the module
    rows = benchmark("scikit_learn", monkeypatch).estimators(rounds=1, most=1)
    assert [row[1:3] for row in rows] == [["idle", "1"], ["busy", "1"]] * 2 + [["idle", "10"], ["busy", "10"]]
    assert all(len(row) == 9 for row in rows)


@pytest.mark.slow
def test_steps_with_adapters_are_timed(monkeypatch):
    sizes = {"width": 64, "layers": 1, "tokens": 4, "batch": 2, "rounds": 1}
    rows = benchmark("adapters", monkeypatch).main(**sizes, native=False)
    assert all(row.state == pytest.approx(3 * row.trained, abs=1e-4) for row in rows.values())
    shares = [rows[form].trained for form in ("LoRA, q and v", "LoRA", "DoRA", "full")]
    assert shares == sorted(shares)


@pytest.mark.exhaustive
def test_memory_of_integrated_gradients_does_not_grow_with_their_steps(monkeypatch):
    memory = benchmark("derivatives", monkeypatch).main(seconds=0.1)
    assert memory[512] <= 1.05 * memory[8]


@pytest.mark.slow
def test_compiling_is_timed(monkeypatch):
    rows = benchmark("compile_time", monkeypatch).main("squeezenet")
    ((before, after, seconds),) = rows.values()
    assert 0 < before < after
    assert seconds > 0


@pytest.mark.exhaustive
def test_networks_are_compared_in_floats_and_integers(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    module = benchmark("quantization", monkeypatch)
    case = module.Case(lambda: module.convolutional(2, 4, 16), module.digits, 1600, 1, 1)
    rows = "\n".join(module.section(case, 1, None)).splitlines()
    kernels = {row.split(" | ")[0].strip("| "): row.split(" | ")[-1].strip(" |") for row in rows if "|" in row}
    for form in ("int8", "int8, 7 bits", "int8, LSQ", "half of the channels, int8"):
        assert kernels[f"{form}, graphopt, trained for it"] == "QGemm 2, QLinearConv 2"


def test_gradients_of_convolutions_are_timed(monkeypatch):
    module = benchmark("convolution", monkeypatch)
    ((_, times),) = module.main([module.Shape(2, 3, 8, 4, 3)], rounds=1).items()
    assert set(times) == {*module.FORMS} - {"blocked"}  # it takes whole blocks of channels


@pytest.mark.slow
def test_providers_are_timed(monkeypatch):
    found = benchmark("providers", monkeypatch).main(rounds=1, batch=4)
    assert {name for name, provider in found if provider == "CPUExecutionProvider"} == {
        "mlp",
        "cnn",
        "transformer",
    }
    assert min(found.values()) > 0


@pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
@pytest.mark.slow
def test_native_steps_are_timed(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER / "peers")
    (found,) = benchmark("native", monkeypatch).main(["mlp-small"], rounds=1).values()
    assert 0 < found["lowered"] < found["nodes"]
    assert min(found.values()) > 0


@pytest.fixture
def peers(monkeypatch):
    """Import a script of the benchmark against peers, as they import each other."""
    monkeypatch.syspath_prepend(FOLDER / "peers")
    known = {path.stem for path in (FOLDER / "peers").glob("*.py")}
    for name in known:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module
    for name in known & set(sys.modules):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("workload", "optimizer"), [("linear", "sgd"), ("mlp-small", "adamw"), ("mlp-small", "momentum")]
)
@pytest.mark.slow
def test_peers_train_the_same(peers, tmp_path, workload, optimizer):
    protocol = peers("protocol")
    peers("workloads").write(tmp_path, workload)
    job = protocol.Job(tmp_path, workload, optimizer)
    runs = {name: protocol.losses(peers(f"{name}_peer").build, job) for name in ("graphopt", "torch")}
    several = protocol.losses(peers("graphopt_peer").build, protocol.Job(tmp_path, workload, optimizer, 1, "run"))
    curve = runs["torch"][1]
    assert len(curve) == 20 and np.ptp(curve) > 0.1 * curve[0]
    for _, losses, seconds in (*runs.values(), several):
        np.testing.assert_allclose(losses, curve, rtol=1e-4)
        assert seconds > 0
    times = protocol.measure(runs["graphopt"][0], len(job.data), seconds=0)
    assert len(times) == 3 and min(times) > 0


def test_a_peer_that_trains_something_else_is_not_timed(peers):
    run = peers("run")
    curve = [2.0, 1.5, 1.0]
    results = [
        run.Result("linear", "sgd", 1, name, losses=list(curve)) for name in ("graphopt", "torch", "jax", "onnxsim")
    ]
    results[2].losses[2] += 0.01
    results[3].losses[0] = float("nan")
    run.check(results)
    assert [bool(result.error) for result in results] == [False, False, True, True]
    constant = [run.Result("linear", "sgd", 1, "torch", losses=[1.0, 1.0])]
    run.check(constant)
    assert "do not change" in constant[0].error


def test_why_a_peer_ended_is_one_line(peers):
    errors = "Traceback\n  File\nmodule.OddError: what\n\nset A=1 for more"
    assert peers("processes").reason(errors, 1) == "module.OddError: what"


def test_the_limit_counts_what_a_step_multiplies(peers, tmp_path):
    work, limit, protocol = (peers(name) for name in ("workloads", "limit", "protocol"))
    model, _ = work.model(work.workload("mlp-small"))
    flops = sum(2 * np.prod(a) * b[-1] * n for (_, a, b, _), n in limit.operations(model, 32))
    layers = [(64, 256), (256, 256), (256, 10)]
    assert flops == 2 * 32 * (3 * sum(a * b for a, b in layers) - 64 * 256)  # none by the data
    convolutions = {
        a: n for (kind, a, *_), n in limit.operations(work.model(work.workload("cnn"))[0], 64) if kind == "Conv"
    }
    assert convolutions == {(64, 1, 28, 28): 2, (64, 32, 14, 14): 3}
    work.write(tmp_path, "linear")
    assert min(limit.Limit(protocol.Job(tmp_path, "linear", "sgd")).measure(0)) > 0


def test_results_are_written_with_what_is_missing(peers, tmp_path):
    run, report = peers("run"), peers("report")
    results = [
        run.Result("linear", "sgd", 1, "graphopt", 10, rounds=[10.0, 12.0], apart=0.0, compile=0.1, peak=100),
        run.Result("linear", "sgd", 1, "torch", 10, rounds=[110.0, 110.0], apart=0.0, compile=1, peak=300),
        run.Result("linear", "sgd", 1, "onnxsim", error="has no such operator"),
    ]
    titles = {"linear": "linear regression", "cnn": "CNN"}
    page = report.markdown(results, titles, "a machine", {"torch": "torch 2"})
    assert "| linear regression | sgd | 11.0 | **10.00** (110) | (1) |" in page
    assert "(1) onnxsim: has no such operator" in page
    assert "909,091" in page  # samples a second
    results.append(run.Result("cnn", "adamw", 1, "graphopt", 10, rounds=[20.0]))  # without its peers
    short = report.summary(results, titles, "a machine")
    assert "| 1 thread |  | graphopt, us | PyTorch | onnxsim |" in short
    assert "| linear regression | sgd | 11.0 | 10.00 | - |" in short
    assert "| CNN | adamw | 20.0 |  |  |" in short
    brief = report.brief(results, titles)
    assert "| 1 thread |  | graphopt, us | PyTorch |" in brief and "| CNN | adamw | 20.0 |  |" in brief
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- peers -->\nold\n<!-- peers end -->\nafter\n")
    run.replace_table(page, brief)
    assert page.read_text() == f"before\n<!-- peers -->\n\n{brief}\n\n<!-- peers end -->\nafter\n"


def test_peers_train_the_same_in_mixed_precision_but_for_rounding(peers, tmp_path):
    """On the CPU, as there may be no GPU; curves of both are near that of float32."""
    protocol = peers("protocol")
    peers("workloads").write(tmp_path, "mlp-small")
    runs = {
        (name, variant): protocol.losses(
            peers(f"{name}_peer").build, protocol.Job(tmp_path, "mlp-small", "adamw", 1, variant)
        )[1]
        for name in ("graphopt", "torch")
        for variant in ("", "float16")
    }
    for name in ("graphopt", "torch"):
        np.testing.assert_allclose(runs[name, "float16"], runs["torch", ""], rtol=3e-2)
    assert runs["torch", "float16"] != runs["torch", ""]


def test_peers_train_the_same_with_products_of_bfloat16_but_for_rounding(peers, tmp_path, monkeypatch):
    """PyTorch's own modes, and graphopt's, beside float32."""
    monkeypatch.delenv("GRAPHOPT_NATIVE", raising=False)
    protocol = peers("protocol")
    peers("workloads").write(tmp_path, "mlp-small")
    variants = [("graphopt", f"native {x}") for x in ("high", "medium")]
    variants += [("torch", x) for x in ("", "bfloat16")]  # `medium` would hold for the whole process
    runs = {
        (name, variant): protocol.losses(
            peers(f"{name}_peer").build, protocol.Job(tmp_path, "mlp-small", "adamw", 1, variant)
        )[1]
        for name, variant in variants
    }
    for (_, variant), found in runs.items():
        bound = 1e-5 if variant in ("", "native high") else 3e-2
        np.testing.assert_allclose(found, runs["torch", ""], rtol=bound)


def test_the_page_of_precisions_keeps_what_is_not_measured_again(peers, tmp_path, monkeypatch):
    precision = benchmark("precision", monkeypatch)
    page = tmp_path / "page.md"
    page.write_text("# old\n\n## Trained to the end\n\na table\n\n## Shares of the limits\n\nold shares\n")
    short = ["--networks", "mlp-small", "--steps", "3", "--write", str(page)]
    monkeypatch.setattr(precision, "milliseconds", lambda step: 1.0)
    monkeypatch.setattr(precision, "peaks", lambda folder: [200.0, 2000.0, 10.0])
    precision.main(["--parts", "losses", "roofline", *short])
    text = page.read_text()
    assert "| MLP 64-256-256-10, batch 32 | adamw |" in text and "a table" in text and "old shares" not in text
    assert text.index("Losses beside") < text.index("Trained to") < text.index("Shares of")
    # 3 products of 32 rows: forward, by the data (not of the first layer) and by the weights
    flops = 2 * 32 * (3 * (256 * 256 + 256 * 10) + 2 * 64 * 256)
    assert f"| {flops * 1e-9:.2f} |" in text and f"highest | 1.00 | {flops / 200 * 1e-6 * 100:.0f} % |" in text


@pytest.fixture
def gpu(peers, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "gpu", raising=False)
    yield importlib.import_module("gpu")
    sys.modules.pop("gpu", None)


@pytest.mark.exhaustive
def test_the_script_for_gpus_runs_on_the_cpu(tmp_path):
    """With the peers that are installed; the page keeps the rows of the first run."""
    page = tmp_path / "RESULTS_GPU.md"
    options = "--device cpu --small --rounds 1 --seconds 0 --peers graphopt graphopt-graph torch jax"
    command = [
        sys.executable,
        str(FOLDER / "gpu.py"),
        *options.split(),
        "--write",
        str(page),
        "--work",
        str(tmp_path),
    ]
    for more in (
        ["--only", "resnet", "--precisions", "float32", "--no-tests"],
        ["--only", "mlp-small", "--precisions", "bfloat16", "--at-once", "2"],
    ):
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "pytest tests/test_gpu.py`: " in text and " skipped" in text
    float32, bfloat16 = text.split("## float32")[1].split("## bfloat16")
    assert "| resnet, batch 8 | momentum | " in float32 and "(1)" not in float32
    assert "| mlp-small, batch 8 | adamw | " in bfloat16 and "(1)" not in bfloat16
    assert "CUDA graph" not in text


def test_the_script_for_gpus_says_that_there_is_none(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "smi", lambda query: None)
    with pytest.raises(SystemExit, match="no NVIDIA GPU"):
        gpu.main(["--work", str(tmp_path), "--write", str(tmp_path / "page.md")])


def test_the_script_for_gpus_stops_in_time_and_keeps_what_it_has(gpu, tmp_path, monkeypatch, capsys):
    results = [
        gpu.Result("cnn", "adamw", 0, "graphopt", rounds=[10.0, 30.0], peak=500.0, losses=[2.0, 1.0]),
        gpu.Result("cnn", "adamw", 0, "torch", rounds=[40.0], peak=900.0),
        gpu.Result("cnn", "adamw", 0, "jax", rounds=[50.0]),
        gpu.Result("cnn", "adamw", 0, "torch-compile", error="no compiler"),
    ]
    monkeypatch.setattr(gpu, "smi", lambda query: ["A card", "580", "80000"] if "driver" in query else ["A card"])
    monkeypatch.setattr(gpu, "found_packages", lambda kind: {"jax": "none"})

    class Measured(gpu.Cell):
        def __init__(self, name, precision, peers, options):
            self.name, self.precision = name, precision
            self.results = {result.peer: result for result in results}
            self.wait = self.time = self.close = lambda *arguments: None

    monkeypatch.setattr(gpu, "Cell", Measured)
    page = tmp_path / "page.md"
    common = [
        "--no-tests",
        "--only",
        "cnn",
        "--precisions",
        "float32",
        "tf32",
        "--work",
        str(tmp_path),
        "--write",
    ]
    gpu.main([*common, str(page)])
    gpu.main([*common, str(page), "--minutes", "0"])
    assert "no time left" in capsys.readouterr().out
    text = page.read_text()
    assert "A card, 80000 MB, driver 580" in text
    assert "| adamw | 20.0, 500 MB | 40.0, 900 MB | (1) | 50.0 | 0.50 |" in text
    assert "(1) torch.compile: no compiler" in text and text.count("## tf32") == 1


def test_what_is_not_measured_again_stays(peers, tmp_path):
    run = peers("run")
    path = tmp_path / "results.json"
    assert run.before(path) == ({"table": [], "scaling": []}, {})
    results = [run.Result(*cell, "graphopt", rounds=[1.0]) for cell in (("cnn", "adamw", 2), ("linear", "sgd", 1))]
    path.write_text(json.dumps({"table": [asdict(r) for r in results], "versions": {"torch": "2"}}))
    found, versions = run.before(path)
    assert found["table"] == results and versions == {"torch": "2"}
    assert sorted(found["table"], key=lambda r: run.place(r.cell)) == results[::-1]


@pytest.mark.slow
def test_denormals_are_timed(monkeypatch):
    found = benchmark("denormals", monkeypatch).main(steps=450)
    assert len(found) == 6
    assert all(time > 0 for times in found.values() for time in times)


@pytest.mark.exhaustive
@pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
def test_networks_of_other_shapes_are_timed():
    pytest.importorskip("torch")
    command = [sys.executable, str(FOLDER / "shapes.py"), "--only", "regression, tanh", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| regression, tanh | 46,601 |" in done.stdout


@pytest.mark.slow
def test_workers_apart_send_fewer_bytes(monkeypatch):
    found = benchmark("local_sgd", monkeypatch).main(seeds=1, epochs=2, sync_every=29)
    (together, often), (apart, seldom) = found.values()
    assert 25 < often / seldom < 30
    assert max(together, apart) < 2.5


@pytest.mark.exhaustive
@pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
def test_openings_are_timed(monkeypatch):
    rows = benchmark("opening", monkeypatch).main("--seconds=1")
    assert [row[0].split()[0] for row in rows] == ["perceptron", "perceptron"]
    assert all(int(row[-3]) > 0 and int(row[-2]) > 0 for row in rows)


@pytest.mark.parametrize(
    "name",
    [
        "one",
        "gat",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("tabular", "gru", "vit", "regnet")),
    ],
)
@pytest.mark.slow
def test_architectures_train_as_in_float64(name, peers, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    program = benchmark("architectures", monkeypatch)
    found = program.measured(name, 1, 2, 0.01, forms=("highest", "eager"))
    assert found["apart"]["highest"] < program.BOUND and set(found["ms"]) == {"highest", "eager"}
    assert program.page({f"{name} 1": {part: dict.fromkeys(program.FORMS, 1.0) for part in found}})
