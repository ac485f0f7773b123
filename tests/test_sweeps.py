"""Sweeps: parallel jobs, searches, and what happens when a sweep is run again."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import optuna
import pytest
import yaml

import graphopt
from graphopt import cli
from graphopt.training.checkpoints import find, read

SWEEP = ["-m", "folder=out", "fit.epochs=3", "optimizer=sgd,adamw", "executor.threads=1"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: joblib's processes outlive a sweep, and keep its folder and output."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-m", "graphopt", *arguments], env=environment, capture_output=True, text=True
    )


def state(folder: Path | str) -> dict[str, np.ndarray]:
    return dict(read(find(folder)).state)


def check_equal(sweep: str, other: Path) -> None:
    """Check that two runs of a sweep trained the same bits as those of another."""
    for run in range(2):
        found, expected = state(f"{sweep}/{run}"), state(other / str(run))
        assert all((found[name] == array).all() for name, array in expected.items())


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the sweep writes whose jobs run one after the other."""
    folder = tmp_path_factory.mktemp("one_by_one")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(SWEEP) == 0
    return folder / "out"


@pytest.mark.slow
def test_jobs_in_processes_equal_jobs_one_by_one(one_by_one: Path) -> None:
    done = command(*SWEEP, "sweep=parallel", "hydra.launcher.n_jobs=2")
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert said.count("written ") == 3 and len(re.findall(r"^ \d ", said, re.MULTILINE)) == 2
    check_equal("out", one_by_one)


# Launchers of clusters, and the package of each; submitit_local runs in processes of this machine what sweep=slurm runs
# on a cluster's nodes.
CLUSTERS = {
    "sweep=ray": "hydra_plugins.hydra_ray_launcher",
    "hydra/launcher=submitit_local": "hydra_plugins.hydra_submitit_launcher",
}


@pytest.fixture
def ray() -> Iterator[Any]:
    """Stop what runs of Ray in this process: a test starts it in its own folder."""
    package = pytest.importorskip("ray", reason="needs the extra `cluster`")
    package.shutdown()
    yield package
    package.shutdown()


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest) -> str:
    """Return the argument that chooses a launcher."""
    pytest.importorskip(CLUSTERS[request.param], reason="needs the extra `cluster`")
    if request.param == "sweep=ray":
        request.getfixturevalue("ray")
    return str(request.param)


def test_jobs_on_a_cluster_equal_jobs_one_by_one(
    cluster: str, one_by_one: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SWEEP, cluster]) == 0
    said = capfd.readouterr().out
    assert len(re.findall(r"^ \d ", said, re.MULTILINE)) == 2 and Path("out/compare.html").exists()
    trained = [Path(f"out/{run}/trained.onnx").stat().st_mtime_ns for run in range(2)]
    assert cli.main([*SWEEP, cluster]) == 0  # what is complete does not run again
    assert trained == [Path(f"out/{run}/trained.onnx").stat().st_mtime_ns for run in range(2)]
    check_equal("out", one_by_one)


def test_a_job_that_fails_on_a_cluster_is_an_error_of_one_line(cluster: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-m", "folder=out", "fit.epochs=1", "models.mlp.outputs=5,10", cluster]) == 1
    *_, last = capfd.readouterr().err.splitlines()
    assert last.startswith("graphopt: error: data=digits: data 'target': expected labels from 0 to 4")
    assert not Path("out/0/result.json").exists() and Path("out/1/result.json").exists()


@pytest.mark.exhaustive
def test_a_running_cluster_of_ray_needs_an_absolute_folder(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ray.init(num_cpus=1, include_dashboard=False)  # its processes run in this folder
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    Path("rows.csv").write_text("a,target\n" + "".join(f"{x},{2 * x}\n" for x in range(8)))
    sweep = ["-m", "sweep=ray", "data=csv", "data.path=rows.csv", "data.target=target", "fit.epochs=1,2"]
    sweep += ["model=linear", "loss=mean_squared_error"]
    assert cli.main([*sweep, "folder=out"]) == 1
    assert "folder: expected an absolute path, because the cluster runs jobs in" in capfd.readouterr().err
    assert cli.main([*sweep, f"folder={tmp_path}/elsewhere/out"]) == 0
    assert all(Path(f"out/{run}/result.json").exists() for run in range(2))


@pytest.mark.exhaustive
def test_a_job_of_ray_that_is_killed_continues_to_the_same_bits(ray: Any) -> None:
    sweep = ["-m", "folder=out", "fit.epochs=600", "optimizer=adamw", "fit.seed=0,1", "executor.threads=1"]
    often = "fit.checkpoint.every='1 s'"
    command = [sys.executable, "-m", "graphopt", *sweep, often, "sweep=ray"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        said = next(line for line in run.stdout if "_run_job pid=" in line)
        while not list(Path("out").glob("*/checkpoints/step-*")):
            assert run.poll() is None
            time.sleep(0.1)
        os.kill(int(re.findall(r"_run_job pid=(\d+)", said)[0]), signal.SIGKILL)
        rest = run.stdout.read()
    assert run.returncode == 0 and rest.count("trained   27,000 steps") == 2
    assert len(set(re.findall(r"_run_job pid=(\d+)", said + rest))) == 3  # the killed process, and one in its place
    Path("out").rename("killed")
    assert cli.main(sweep) == 0
    check_equal("killed", Path("out"))


@pytest.mark.parametrize("launcher", ["basic", "joblib"])
@pytest.mark.slow
def test_a_job_that_fails_does_not_end_the_others(launcher: str) -> None:
    failing = ["-m", "folder=out", "fit.epochs=1", "models.mlp.outputs=5,10", f"hydra/launcher={launcher}"]
    done = command(*failing)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last.startswith("graphopt: error: data=digits: data 'target': expected labels from 0 to 4")
    assert not Path("out/0/result.json").exists() and Path("out/1/result.json").exists()


def test_the_recipe_of_slurm_submits_jobs_that_continue(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(CLUSTERS["hydra/launcher=submitit_local"], reason="needs the extra `cluster`")
    shown = ["sweep=slurm", "hydra.launcher.partition=gpu", "--cfg", "hydra", "-p", "hydra.launcher"]
    assert cli.main(shown) == 0
    launcher = yaml.safe_load(capsys.readouterr().out.partition("\n")[2])
    assert launcher["_target_"].endswith("SlurmLauncher") and launcher["max_num_timeout"] > 0
    assert (launcher["partition"], launcher["timeout_min"], launcher["cpus_per_task"]) == ("gpu", 60, 1)


@pytest.mark.parametrize("recipe", ["ray", "slurm"])
def test_a_launcher_that_is_not_installed_is_named(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("hydra_plugins.hydra_ray_launcher") is not None:
        pytest.skip("the extra `cluster` is installed")
    assert cli.main(["-m", f"sweep={recipe}", "optimizer=sgd,adamw"]) == 1
    assert "which is not installed: pip install it" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_that_is_run_again_does_what_is_left(one_by_one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(one_by_one, "out")
    trained = Path("out/0/trained.onnx").stat().st_mtime_ns
    # Job 1 as an interruption after two epochs leaves it: no result, and the checkpoint from then.
    shutil.rmtree("out/1")
    alone = [one.replace("epochs=3", "epochs=2").replace("sgd,", "") for one in SWEEP[2:]]
    assert cli.main(["folder=out/1", *alone]) == 0
    Path("out/1/result.json").unlink(missing_ok=True)
    config = Path("out/1/config.yaml")
    config.write_text(config.read_text().replace("epochs: 2", "epochs: 3"))
    capsys.readouterr()
    assert cli.main(SWEEP) == 0
    said = capsys.readouterr().out
    assert re.search(r"complete +\[0\]", said) and re.search(r"resumed +after step 90", said)
    assert Path("out/0/trained.onnx").stat().st_mtime_ns == trained
    check_equal("out", one_by_one)
    assert len(Path("out/1/metrics.jsonl").read_text().splitlines()) == 3
    for other in ("seed.unknown=1", "fit.seed=1"):
        assert cli.main([*SWEEP, other]) == 1
    assert "expected a run of the same recipe, found one with fit.seed=0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_minimizes_the_validation_loss() -> None:
    search = ["-m", "folder=out", "sweep=optuna", "fit.epochs=1", "hydra.sweeper.n_trials=3"]
    rate = "optimizer.learning_rate=tag(log,interval(1e-4,1e-1))"
    assert cli.main([*search, rate]) == 0
    found = yaml.safe_load(Path("out/optimization_results.yaml").read_text())
    values = [json.loads(Path(f"out/{run}/result.json").read_text())["value"] for run in range(3)]
    assert found["best_value"] == min(values)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    first = study.ask().suggest_float("rate", 1e-4, 1e-1, log=True)
    said = yaml.safe_load(Path("out/0/.hydra/overrides.yaml").read_text())
    assert math.isclose(float(next(one for one in said if "rate" in one).split("=")[1]), first)
    before = [Path(f"out/{run}/trained.onnx").stat().st_mtime_ns for run in range(3)]
    assert cli.main([*search, rate]) == 0  # the same trials, which are complete
    assert before == [Path(f"out/{run}/trained.onnx").stat().st_mtime_ns for run in range(3)]


@pytest.mark.slow
def test_a_job_that_diverges_is_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    rates = [*SWEEP[:3], "optimizer=sgd", "optimizer.learning_rate=1e38,1e-3"]
    assert cli.main(rates) == 0
    assert "expected a finite loss" in capsys.readouterr().err
    assert cli.main(rates) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_runs_stop_where_optunas_pruner_prunes(direction: str, warmup: int) -> None:
    random = np.random.default_rng(warmup)
    monitor = "validation_loss" if direction == "minimize" else "accuracy"
    curves = random.normal(size=(5, 6)).cumsum(axis=1)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=warmup)
    stops = 0
    for candidate in random.normal(size=(20, 6)).cumsum(axis=1):
        study = optuna.create_study(direction=direction, pruner=pruner)
        for number, curve in enumerate(curves):
            trial = study.ask()
            Path(f"runs/{number}").mkdir(parents=True, exist_ok=True)
            lines = []
            for epoch, value in enumerate(curve.tolist(), 1):
                trial.report(value, epoch)
                lines.append(json.dumps({"epoch": epoch, monitor: value, "seconds": 1.0}))
            Path(f"runs/{number}/metrics.jsonl").write_text("\n".join(lines) + "\n{")
            study.tell(trial, curve[-1])
        callback = graphopt.callbacks.MedianStopping(folder="runs", monitor=monitor, warmup=warmup)
        said: list[str] = []
        run: Any = SimpleNamespace(epoch=0, validation_rows=9, resumed=None, stop=said.append)
        callback.on_fit_begin(run)
        trial = study.ask()
        for run.epoch, value in enumerate(candidate.tolist(), 1):
            trial.report(value, run.epoch)
            callback.on_epoch_end(run, {monitor: value})
            assert bool(said) == (trial.should_prune() and run.epoch > warmup)
            stops += len(said)
            if said:
                break
    assert 5 < stops < 20


@pytest.mark.slow
def test_a_sweep_stops_bad_runs_early(capsys: pytest.CaptureFixture[str]) -> None:
    rates = "optimizer.learning_rate=1e-2,1e-3,1e-8"
    stop = ["callbacks.median_stopping={at_least: 2, warmup: 1}"]
    assert cli.main(["-m", "folder=out", "fit.epochs=4", "optimizer=adamw", rates, *stop]) == 0
    lines = [len(Path(f"out/{run}/metrics.jsonl").read_text().splitlines()) for run in range(3)]
    assert lines == [4, 4, 2]
    assert "is worse than" in capsys.readouterr().out
    assert Path("out/2/result.json").exists()
