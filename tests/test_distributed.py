"""Several workers, in real processes: equal to one process, and what happens when one of them fails."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from workers import FEW, FLAT, NORMALIZED

import graphopt
from graphopt.distributed.launchers import ANY_CORE, AS_ROOT
from graphopt.training.checkpoints import find, read

pytest.importorskip("mpi4py")
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
pytestmark = [pytest.mark.skipif(MPIEXEC is None, reason="expects mpiexec"), pytest.mark.slow]

TESTS = Path(__file__).parent
ENVIRONMENT = {
    **ANY_CORE,
    **AS_ROOT,
    **os.environ,
    "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
    "GRAPHOPT_NATIVE": "false",
    "TTY_COMPATIBLE": "0",
    "OMP_NUM_THREADS": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # a worker that waits leaves its core to others
}
SYSTEM = "/usr/bin/mpiexec"  # Debian's Open MPI
LIBRARY = "/usr/lib/x86_64-linux-gnu/libmpi.so.40"
LAUNCH = [sys.executable, "-m", "graphopt", "launcher=local", "launcher.workers=2"]


@functools.cache
def found_by(workers: int, *programs: str, options: tuple[str, ...] = (), **environment: str) -> dict[str, Any]:
    """Run programs one after the other in the same workers, whose start takes seconds, and return what each finds."""
    mpiexec = environment.pop("mpiexec", str(MPIEXEC))
    done = subprocess.run(
        [mpiexec, *options, "-n", str(workers), sys.executable, str(TESTS / "workers.py"), *programs],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    found = re.search(r"RESULT (.*)", done.stdout)
    assert done.returncode == 0 and found, done.stderr
    return json.loads(found[1])


PLAIN = ("equal", "copies", "replaced", "refused", "memory")
KERNELS = functools.partial(found_by, 2, "with_kernels", "refused", GRAPHOPT_NATIVE="true")


def check_equal(found: dict[str, Any], count: int) -> None:
    assert len(found) == count
    for name, one in found.items():
        assert one["states"] == 1, name
        assert max(one["state"], one["loss"]) < 1e-6, name
        assert all(one["accuracy"]), name


@pytest.mark.parametrize("state", ["equal", "copies"])
@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.sample(2)
def test_workers_equal_one_process(workers: int, state: str) -> None:
    """On ragged batches, with weights, sums, ignored labels, masks, batch statistics, and a shared validation."""
    check_equal(found_by(workers, *(PLAIN if workers == 2 else [state]))[state], 8 if state == "equal" else len(FEW))


def test_workers_with_kernels_equal_one_process() -> None:
    check_equal(KERNELS()["with_kernels"], len(FEW))


def test_a_late_worker_reads_the_shared_state_before_another_replaces_it() -> None:
    found = found_by(2, *PLAIN)["replaced"]
    assert found["states"] == 1 and max(found["loss"]) < 1e-6 and found["weights"] < 2e-6


@pytest.mark.parametrize("native", ["false", "true"])
def test_all_workers_refuse_a_part_of_the_state_that_is_not_finite(native: str) -> None:
    found = (KERNELS() if native == "true" else found_by(2, *PLAIN))["refused"]
    assert found["same"] == [True, True]
    assert all("expected finite numbers in state" in message for message in found["messages"])


def test_shared_memory_is_released_and_may_be_refused() -> None:
    found = found_by(2, *PLAIN)["memory"]
    assert found["shares"] and found["with"] > 0 and found["without"] == 0
    assert found["refused"] == [False, False]
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-6)


@pytest.mark.skipif(not (Path(SYSTEM).exists() and Path(LIBRARY).exists()), reason="expects Debian's Open MPI")
@pytest.mark.exhaustive
def test_workers_of_the_system_s_mpi() -> None:
    check_equal(found_by(2, "equal", mpiexec=SYSTEM, MPI4PY_LIBMPI=LIBRARY)["equal"], 8)


def test_workers_without_rows() -> None:
    for name, found in found_by(3, "few_rows")["few_rows"].items():
        assert found["states"] == 1 and max(found["loss"]) < 1e-6, name


def test_a_worker_that_dies_in_a_validation_leaves_its_rows_to_the_others() -> None:
    found = found_by(3, "bereaved", options=("--with-ft", "ulfm"))["bereaved"]
    assert found["workers"] == 2
    assert found["found"] == pytest.approx(found["expected"], rel=1e-6)


# --- The command ---


def start(folder: Path, *arguments: str, launch: list[str] = LAUNCH, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*launch, f"folder={folder / 'run'}", *arguments],
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(run: subprocess.Popen[str], timeout: float = 60) -> tuple[int, str, str]:
    out, err = run.communicate(timeout=timeout)
    return run.returncode, out, err


def validation(out: str) -> list[str]:
    return re.findall(r"^epoch .*(loss .*) rate", out, re.MULTILINE)


@pytest.mark.exhaustive
def test_one_word_says_where_a_recipe_runs(tmp_path: Path) -> None:
    """The same records to four digits; and a run of two workers continues with one, and ends as the others do."""
    arguments = ["fit.epochs=3", "fit.checkpoint.every=10 steps"]
    code, out, err = finished(start(tmp_path, *arguments))
    assert code == 0, err
    assert "2 workers" in out and out.count("written") == 1
    (tmp_path / "run").rename(tmp_path / "two")
    code, alone, err = finished(start(tmp_path, *arguments, launch=LAUNCH[:3]))
    assert code == 0, err
    assert validation(out) == validation(alone) and len(validation(out)) == 3
    (tmp_path / "run").rename(tmp_path / "one")
    code, _, err = finished(start(tmp_path, *(one.replace("epochs=3", "epochs=1") for one in arguments)))
    assert code == 0, err
    resumed = start(tmp_path, *arguments, f"resume={tmp_path / 'run'}", launch=LAUNCH[:3])
    code, out, err = finished(resumed)
    assert code == 0 and "written with workers 2, continues with 1" in err
    assert validation(out) == validation(alone)[1:]
    one, two, both = (read(find(tmp_path / name)).state for name in ("one", "two", "run"))
    for name, array in one.items():
        np.testing.assert_allclose(array, two[name], atol=2e-6)
        np.testing.assert_allclose(array, both[name], atol=2e-6)


def test_errors_come_before_workers_start(tmp_path: Path) -> None:
    code, out, err = finished(start(tmp_path, "model=missing.onnx"))
    assert (code, out) == (1, "")
    assert err.startswith("graphopt: error: model 'missing.onnx': no such file") and err.count("\n") == 1


def test_a_sweep_has_no_workers(tmp_path: Path) -> None:
    code, _, err = finished(start(tmp_path, "-m", "optimizer=sgd,adamw"))
    assert code == 1 and "launcher: expected a single run, found a sweep" in err


@pytest.mark.exhaustive
def test_workers_that_meet_every_fifteen_steps(tmp_path: Path) -> None:
    """With one worker, weights that are replaced by their mean are those of the recipe without a launcher."""
    mean = [
        "launcher.sync_every=15",
        "launcher.outer={_target_: passes.SGD, learning_rate: 1.0}",
        "fit.epochs=2",
    ]
    code, out, err = finished(start(tmp_path, *mean))
    assert code == 0 and "2 workers" in out, err
    losses = [float(loss) for loss in re.findall(r"^epoch .*validation ([0-9.]+)", out, re.MULTILINE)]
    assert len(losses) == 2 and losses[1] < losses[0] < 2
    (tmp_path / "run").rename(tmp_path / "two")
    alone = [*LAUNCH[:4], "launcher.workers=1"]
    code, one, err = finished(start(tmp_path, *mean, launch=alone))
    assert code == 0, err
    (tmp_path / "run").rename(tmp_path / "one")
    code, plain, err = finished(start(tmp_path, "fit.epochs=2", launch=LAUNCH[:3]))
    assert code == 0, err
    assert validation(one) == validation(plain)


def test_halves_are_files_too(tmp_path: Path) -> None:
    code, out, err = finished(start(tmp_path, "run=compile"))
    assert code == 0, err
    halves = [graphopt.load(tmp_path / "run" / name) for name in ("grad.onnx", "apply.onnx")]
    assert "grad.onnx" in out and "rows" in {y.name for y in halves[0].graph.outputs}
    gradients = [
        {x.name for x in side if str(x.name).endswith(".grad")}
        for side in (halves[0].graph.outputs, halves[1].graph.inputs)
    ]
    assert gradients[0] == gradients[1] and len(gradients[0]) == 6


@pytest.mark.parametrize(("statistics", "stages"), [("synchronized", 3), ("local", 1)])
@pytest.mark.sample(1)
def test_a_recipe_says_whose_statistics_normalize(tmp_path: Path, statistics: str, stages: int) -> None:
    onnx.save(NORMALIZED, tmp_path / "normalized.onnx")
    np.savez(tmp_path / "data.npz", **FLAT)
    arguments = [
        "model=normalized.onnx",
        "data=npz",
        "data.path=data.npz",
        "training=active",
        f"launcher.statistics={statistics}",
    ]
    code, out, err = finished(start(tmp_path, "run=compile", *arguments))
    assert code == 0, err
    names = [f"grad.{i}.onnx" for i in range(stages)] if stages > 1 else ["grad.onnx"]
    assert {path.name for path in (tmp_path / "run").glob("grad*.onnx")} == set(names)
    assert all(name in out for name in names)
    (tmp_path / "run").rename(tmp_path / "compiled")
    code, two, err = finished(start(tmp_path, "fit.epochs=2", *arguments))
    assert code == 0, err
    (tmp_path / "run").rename(tmp_path / "two")
    code, one, err = finished(start(tmp_path, "fit.epochs=2", *arguments[:-1], launch=LAUNCH[:3]))
    assert code == 0, err
    assert (validation(one) == validation(two)) == (statistics == "synchronized")


# --- Failures ---


def workers_of(run: subprocess.Popen[str]) -> list[int]:
    """Return the processes that compute, the first worker first."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        mark = f"GRAPHOPT_TEST={run.args[-1]}".encode()  # type: ignore[index]
        rank = [one for one in environment if re.match(rb"(OMPI_COMM_WORLD|PMIX|PMI)_RANK=", one)]
        if mark in environment and rank and b"graphopt" in command:
            found.append((int(rank[0].split(b"=")[1]), int(entry.name)))
    return [process for _, process in sorted(found)]


def training(folder: Path, *arguments: str, name: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a long run with checkpoints, and return it with its workers once it has written one."""
    long = ["fit.epochs=100000", "fit.checkpoint.every=20 steps", "fit.batch_size=16"]
    mark = f"fit.seed={zlib.crc32(name.encode()) % 1000}"
    run = start(folder, *long, *arguments, mark, GRAPHOPT_TEST=mark)
    wait_for(lambda: any((folder / "run").glob("checkpoints/step-*/manifest.json")), run)
    return run, workers_of(run)


def wait_for(condition: Any, run: subprocess.Popen[str] | None = None, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        if run is not None and run.poll() is not None:
            raise AssertionError(run.communicate())
        time.sleep(0.05)


def gone(processes: list[int]) -> bool:
    return not any(Path(f"/proc/{one}/exe").exists() for one in processes)


def continues(folder: Path, run: subprocess.Popen[str]) -> None:
    """Check that a run continues after its last checkpoint, with two workers, to the end of an epoch."""
    checkpoint = read(find(folder / "run"))
    epochs = len(checkpoint.progress["records"]) + 1
    arguments = [one for one in run.args[len(LAUNCH) + 1 :] if not one.startswith("fit.epochs")]  # type: ignore
    again = start(folder, *arguments, f"fit.epochs={epochs}", f"resume={folder / 'run'}")
    code, out, err = finished(again)
    assert code == 0, err
    assert f"after step {checkpoint.progress['step']:,}" in out and "trained" in out


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_killed_worker_ends_the_run_which_continues(tmp_path: Path, rank: int) -> None:
    run, workers = training(tmp_path, name=f"killed {rank}")
    os.kill(workers[rank], signal.SIGKILL)
    code, _, _ = finished(run)
    assert code != 0
    wait_for(lambda: gone(workers))
    continues(tmp_path, run)


APART = ["launcher.workers=3", "launcher.sync_every=10"]


@pytest.mark.exhaustive
def test_workers_that_train_apart_go_on_without_a_killed_one(tmp_path: Path) -> None:
    run, workers = training(tmp_path, *APART, name="apart")
    os.kill(workers[2], signal.SIGKILL)
    at = read(find(tmp_path / "run")).progress["step"]
    wait_for(lambda: read(find(tmp_path / "run")).progress["step"] > at + 100, run)
    run.send_signal(signal.SIGINT)
    code, out, err = finished(run)
    assert code == 128 + signal.SIGINT and "trained.onnx" in out
    assert err.count("warning: worker 2 of 3: expected an answer, found it dead; 2 go on") == 1


@pytest.mark.exhaustive
def test_workers_that_train_apart_end_without_the_first_one(tmp_path: Path) -> None:
    run, workers = training(tmp_path, *APART, name="first")
    os.kill(workers[0], signal.SIGKILL)
    code, _, err = finished(run)
    assert code != 0 and "worker 0: expected the worker that writes the run's files, found it dead" in err
    wait_for(lambda: gone(workers))


@pytest.mark.exhaustive
def test_workers_end_with_their_launcher(tmp_path: Path) -> None:
    run, workers = training(tmp_path, name="launcher")
    run.kill()
    run.communicate()
    wait_for(lambda: gone(workers), seconds=20)
    continues(tmp_path, run)


def test_a_worker_that_stands_still_ends_the_run(tmp_path: Path) -> None:
    """A stopped process is what a cut network looks like: no answer."""
    run, workers = training(tmp_path, "launcher.timeout=2", name="still")
    os.kill(workers[1], signal.SIGSTOP)
    begun = time.monotonic()
    code, _, err = finished(run)
    assert code != 0 and 1.5 < time.monotonic() - begun < 30
    assert "worker 0 of 2: expected an answer of all workers within 2 s, found none" in err
    wait_for(lambda: gone(workers))


@pytest.mark.parametrize("to", ["launcher", pytest.param("worker", marks=pytest.mark.exhaustive)])
def test_a_signal_ends_all_workers_after_a_step(tmp_path: Path, to: str) -> None:
    run, workers = training(tmp_path, name=f"signal {to}")
    os.kill(workers[1] if to == "worker" else run.pid, signal.SIGTERM)
    code, out, err = finished(run)
    assert code == 143, err
    assert "stopped" in out
    graphopt.load(tmp_path / "run/trained.onnx")
    if to == "worker":  # a killed run continues in the same way, above
        continues(tmp_path, run)


def save(path: Path, **changed: Any) -> str:
    random = np.random.default_rng(0)
    arrays = {"x": random.standard_normal((64, 4)).astype(np.float32), "target": random.integers(0, 3, 64)}
    np.savez(path, **{**arrays, **changed})
    return f"data.path={path}"


def test_nan_of_one_worker_is_everyone_s(tmp_path: Path) -> None:
    x = np.zeros((64, 4), np.float32)
    x[31] = np.nan  # the last row of the first batch, which is the second worker's
    path = save(tmp_path / "nan.npz", x=x)
    arguments = ["data=npz", path, "fit.allow_nan=true", "fit.shuffle=false", "fit.validation=null"]
    code, _, err = finished(start(tmp_path, *arguments, "fit.batch_size=32", "fit.epochs=1"))
    assert code == 3, err
    assert err.count("graphopt: error: step 0: expected a finite loss, found nan") == 1


@functools.cache
def different() -> dict[str, tuple[str, str]]:
    return {
        "data": ("data.path=one.npz", "data.path=other.npz"),
        "training graph": ("optimizer=sgd", "optimizer=adamw"),
        "options of fit": ("fit.seed=0 models.mlp.seed=0", "fit.seed=1 models.mlp.seed=0"),
        "state": ("models.mlp.seed=0", "models.mlp.seed=1"),
    }


@pytest.mark.parametrize(
    "what",
    ["data", *(pytest.param(what, marks=pytest.mark.exhaustive) for what in different() if what != "data")],
)
def test_workers_with_different_files_are_refused(tmp_path: Path, what: str) -> None:
    save(tmp_path / "one.npz")
    save(tmp_path / "other.npz", target=np.arange(64) % 3)
    common = [sys.executable, "-m", "graphopt", "launcher=mpi", "data=npz", "data.path=one.npz"]
    one, other = (option.split() for option in different()[what])
    done = subprocess.run(
        [str(MPIEXEC), "-n", "1", *common, "folder=run", *one, ":", "-n", "1", *common, *other],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert f"graphopt: error: worker 1: expected {what} " in done.stderr
    assert not (tmp_path / "run/metrics.jsonl").exists()


VERSION = """
import sys
from importlib import metadata
own = metadata.version
metadata.version = lambda name: "99.0" if name == "onnx" else own(name)
from graphopt.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_workers_with_different_versions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(VERSION)
    first = ["-n", "1", sys.executable, "-m", "graphopt", "launcher=mpi", "folder=run"]
    done = subprocess.run(
        [str(MPIEXEC), *first, ":", "-n", "1", sys.executable, "other.py", "launcher=mpi"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "worker 1: expected versions" in done.stderr and "onnx 99.0" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_of_one_machine_listen_on_no_network(tmp_path: Path) -> None:
    """The program mpiexec itself listens; neither the command nor its workers do."""
    environment = {name: x for name, x in os.environ.items() if name != "OMPI_MCA_btl"}
    process = subprocess.Popen(
        [*LAUNCH, "fit.epochs=10000", "folder=run", "executor.native=false"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not (tmp_path / "run/metrics.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.1)
        listening = set()
        for table in ("tcp", "tcp6"):
            rows = map(str.split, Path(f"/proc/net/{table}").read_text().splitlines()[1:])
            listening |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
        found = 0
        for place in Path("/proc").glob("[0-9]*"):
            try:
                command = (place / "cmdline").read_text()
                is_ours = Path(os.readlink(place / "cwd")) == tmp_path and "python" in command
                if is_ours and "mpiexec" not in command and "prte" not in command:
                    found += 1
                    assert not listening & {os.readlink(handle) for handle in (place / "fd").iterdir()}, command
            except OSError:  # it has ended
                continue
        assert found >= 3
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
