"""Recipes of someone else: no code of theirs runs, and no file that the user did not name is touched."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from builders import mlp
from omegaconf import OmegaConf

from graphopt import cli
from graphopt.cli.composition import validation
from graphopt.cli.processes import check_processes, installed_first
from graphopt.errors import GraphoptError

pytestmark = pytest.mark.usefixtures("plain")

ROOT = Path(cli.__file__).parents[2]
NAMED = ["data=npz", "data.path=train.npz", "model=my.onnx"]  # what a user says beside the recipe's name
TRUSTED = [*NAMED, "trust=[own_losses]"]
SWEPT = [*NAMED, "-m", "optimizer.learning_rate=1e-3,1e-2"]
TRUST = "expected it on the command line alone, found it in a recipe"

seen: list[str] | None = None  # what the process under test has done that it must not


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Note code that runs, pickles, and secrets that are read: an audit hook, which Python calls itself."""
    if seen is None:
        return
    named = str(arguments[0]) if arguments else ""
    if event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"):
        seen.append(f"{event} {named}")
    elif event in ("open", "os.mkdir", "os.rename", "os.remove", "os.chdir", "os.putenv"):
        if any(word in f"{arguments}" for word in ("pwned", "secret", "PWNED")):
            seen.append(f"{event} {named}")
    elif event == "import" and named.startswith("evil"):
        seen.append(f"{event} {named}")


sys.addaudithook(watch)


def experiment(text: str) -> dict[str, str]:
    return {"experiment/evil.yaml": f"# @package _global_\n{text}\n"}


MKDIR = "{_target_: os.mkdir, path: pwned}"


def _doubled(twice: str) -> str:
    """Return thirty fields, each of them twice the one before."""
    return "\n".join(["b0: x", *(f"b{i + 1}: {twice % (i, i)}" for i in range(30))])


BOMB = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i}, ' * 9}]\n" for i in range(12))


# The recipe, what the error has to say, other arguments than `NAMED`, and more files.
ATTACKS: dict[str, tuple[Any, ...]] = {
    # names that are not listed
    "foreign code": (f"loss: {MKDIR}", "loss._target_"),
    "a writer of ours": (
        "loss: {_target_: graphopt.files.write, path: pwned, text: x}",
        "loss._target_: unknown name 'graphopt.files.write'",
    ),
    "our own command": (
        "loss: {_target_: graphopt.cli.main, arguments: [--experimental-rerun, x.pickle]}",
        "loss._target_",
    ),
    "a function that calls what it is given": (
        "loss: {_target_: graphopt.compiler.grad, model: x, wrt: []}",
        "loss._target_",
    ),
    "our resolver of names": (
        "loss: {_target_: graphopt.cli.composition.validation.resolve, name: os.system, path: x, trust: [os]}",
        "loss._target_",
    ),
    "code behind a module of ours": (
        "loss: {_target_: passes.gradients.walk.np.load, file: ../secret.npz}",
        "loss._target_",
    ),
    "a method of a class": ("loss: {_target_: passes.Adam.__init__}", "loss._target_"),
    "globals of a function": ("loss: {_target_: passes.Adam.slots.__globals__.get, key: x}", "loss._target_"),
    "an abstract class": ("loss: {_target_: passes.Loss}", "loss._target_"),
    "a helper that passes exports": ("loss: {_target_: passes.gradient}", "loss._target_"),
    "a list as a name": ("loss: {_target_: [os.mkdir]}", "loss._target_"),
    "a number as a name": ("loss: {_target_: 1}", "loss._target_"),
    "a mapping as a name": (f"loss: {{_target_: {MKDIR}}}", "loss._target_"),
    "an interpolated name": ("mine: os.mkdir\nloss: {_target_: '${mine}', path: pwned}", "loss._target_"),
    "a name in a list": (
        f"pipeline: {{regularizer: [{{_target_: passes.L2}}, {MKDIR}]}}",
        "pipeline.regularizer[1]._target_",
    ),
    "a name deep in a pass": (
        f"optimizer: {{groups: [{{_target_: passes.Group, pattern: x, weight_decay: {MKDIR}}}]}}",
        "optimizer.groups[0].weight_decay._target_",
    ),
    "a name that no one reads": (f"unused: {{x: [[{MKDIR}]]}}", "unused.x[0][0]._target_"),
    "a name among the arguments of fit": (f"fit: {{validation: {MKDIR}}}", "fit.validation._target_"),
    "a built-in model of theirs": (
        "models: {mine: {_target_: os.mkdir, path: pwned}}\nmodel: mine",
        "models.mine._target_",
        NAMED[:2],
    ),
    "an executor in place of a loss": (
        "loss: {_target_: graphopt.Executor, step: ../secret.onnx}",
        "loss._target_",
    ),
    "a reader in place of a loss": (
        "loss: {_target_: graphopt.data.csv, path: ../secret.npz}",
        "loss._target_",
    ),
    "an estimator": ("executor: {_target_: graphopt.Trainer, model: x}", "executor._target_"),
    "a function by name": (
        "defaults: [override /loss: custom]\nloss: {function: 'os:system'}",
        "loss.function",
    ),
    "a function of ours by name": (
        "defaults: [override /loss: custom]\nloss: {function: 'graphopt.cli.run_folder:write'}",
        "loss.function",
    ),
    # arguments of instantiate
    "_partial_": ("loss: {_partial_: true}", "loss._partial_"),
    "_args_": ("loss: {_args_: [1]}", "loss._args_"),
    "_convert_": ("loss: {_convert_: all}", "loss._convert_"),
    "_recursive_": ("loss: {_recursive_: false}", "loss._recursive_"),
    # text that is resolved twice
    "an escaped interpolation": (
        "loss: '\\${oc.create:{_target_: numpy.load, file: ../secret.npz}}'",
        "loss",
    ),
    "an escaped interpolation in a field": (
        "parameters: {pattern: '\\${oc.create:{_target_: os.mkdir, path: pwned}}'}",
        "matches no floating-point initializer",
    ),
    "a name chosen by the number of steps": (
        "pick: [passes.L2, passes.L2, os.mkdir]\nloss: {_target_: '${pick[${training_steps:}]}'}",
        "loss",
        [*NAMED, "fit.batch_size=8"],
    ),
    # callbacks
    "a log outside": (
        "callbacks: {jsonl: ../pwned}",
        "callbacks.jsonl.path: expected a file below the run's folder, found '../pwned' in a recipe",
    ),
    "a log outside, by a class": (
        "callbacks: {x: {_target_: graphopt.callbacks.CSV, path: /pwned}}",
        "callbacks.x.path: expected a file below the run's folder",
    ),
    "events outside": (
        "callbacks: {tensorboard: a/../../pwned}",
        "callbacks.tensorboard.path: expected a file below the run's folder",
    ),
    "a log in place of the model": (
        "callbacks: {csv: ./trained.onnx}",
        "callbacks.csv.path: expected a name that the run's own files do not have",
    ),
    "a tracker": (
        "callbacks: {tracker: wandb}",
        "callbacks.tracker: expected it on the command line alone, found it in a recipe",
    ),
    "a server": (
        "callbacks: {x: {_target_: graphopt.callbacks.MLflow, tracking_uri: 'http://x'}}",
        "callbacks.x: expected it on the command line alone",
    ),
    "code as a callback": (f"callbacks: {{x: {MKDIR}}}", "callbacks.x._target_"),
    "a pass as a callback": (
        "callbacks: {x: {_target_: passes.SGD}}",
        "callbacks.x._target_: unknown name 'passes.SGD'",
    ),
    "a callback deeper": (
        "callbacks: {csv: {path: {_target_: graphopt.callbacks.CSV, path: x}}}",
        "callbacks.csv.path._target_",
    ),
    # resolvers
    "the environment": (
        "loss: {output: '${oc.env:HOME}'}",
        "loss.output: Unsupported interpolation type oc.env",
    ),
    "a resolver by an interpolated name": (
        "which: oc.env\nloss: {output: '${${which}:HOME}'}",
        "Unsupported interpolation type oc.env",
    ),
    "oc.create": ("loss: ${oc.create:1}", "Unsupported interpolation type oc.create"),
    "oc.decode": ("loss: ${oc.decode:1}", "Unsupported interpolation type oc.decode"),
    "arguments that may hide a reference": (
        "loss: \"${oc.select:loss,'{a: 1}'}\"",
        "loss: expected references such as ${fit.seed}, found",
    ),
    # references that double
    "thirty texts, each twice the one before": (
        _doubled("${b%d}${b%d}"),
        "expected at most 100,000 characters and values once its references are resolved",
    ),
    "thirty lists, each twice the one before": (
        _doubled("['${b%d}', '${..b%d}']"),
        "expected at most 100,000 characters",
    ),
    "thirty selections, each twice the one before": (
        _doubled("${oc.select:b%d}${oc.select:nothing,b%d}"),
        "expected at most 100,000 characters",
    ),
    "a reference by a name that is computed": (
        "b: {a: x}\nloss: {output: '${b.${training_steps:}}'}",
        "loss.output: expected references such as ${fit.seed}",
    ),
    "what holds itself": ("b: {a: '${oc.select:b}'}", "b: expected a value that does not refer to itself"),
    "the environment in a list of defaults": ("defaults: [override /optimizer: '${oc.env:HOME}']", ""),
    # YAML
    "a Python object": ("loss: !!python/object/apply:os.mkdir [pwned]", "python/object/apply"),
    "a bomb of aliases": (
        "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i}, ' * 9}]\n" for i in range(12)),
        "evil.yaml: expected a recipe without YAML aliases",
    ),
    "a list as a recipe": (None, "", NAMED, {"experiment/evil.yaml": "# @package _global_\n- a\n"}),
    # trust
    "trust": (f"trust: [os]\nloss: {MKDIR}", f"trust: {TRUST}"),
    "trust beside the user's": (f"trust: [os]\nloss: {MKDIR}", "loss._target_", [*NAMED, "trust=[json]"]),
    "trust by forged overrides": (
        f"hydra: {{overrides: {{task: ['trust=[os]']}}}}\ntrust: [os]\nloss: {MKDIR}",
        f"hydra.overrides.task: {TRUST}",
    ),
    "trust by a sweep": (
        f"hydra: {{sweeper: {{params: {{trust: '[os]'}}}}}}\nloss: {MKDIR}",
        f"trust: {TRUST}",
        SWEPT,
    ),
    "a saved config": ("trust: [os]\nfolder: ../pwned\nloss: {_target_: passes.L2}", TRUST),
    # Hydra's own config
    "a callback": (f"hydra: {{callbacks: {{x: {MKDIR}}}}}", "hydra.callbacks.x"),
    "a callback of ours": (
        "hydra: {callbacks: {x: {_target_: graphopt.cli.comparison.SweepTable}}}",
        f"hydra.callbacks.x._target_: {TRUST}",
    ),
    "a callback of Hydra": (
        "hydra: {callbacks: {x: {_target_: hydra.experimental.callbacks.LogJobReturnCallback}}}",
        "hydra.callbacks.x",
    ),
    "a log file": (
        "hydra: {job_logging: {handlers: {file: {filename: ../pwned}}}}",
        "hydra.job_logging.handlers.file.filename",
    ),
    "a log handler": (
        "hydra: {job_logging: {handlers: {x: {(): os.mkdir, path: pwned}}}}",
        "hydra.job_logging.handlers.x",
    ),
    "ext:// in logging": (
        "hydra: {hydra_logging: {handlers: {console: {stream: 'ext://evil_code.x'}}}}",
        "hydra.hydra_logging.handlers.console.stream",
    ),
    "the run's folder": ("hydra: {run: {dir: ../pwned}}", "hydra.run.dir"),
    "the sweep's folder": ("hydra: {sweep: {dir: ../pwned}}", "hydra.sweep.dir", SWEPT),
    "the folder of a sweep's run": ("hydra: {sweep: {subdir: ../../pwned}}", "hydra.sweep.subdir", SWEPT),
    "Hydra's folder": ("hydra: {output_subdir: ../../pwned}", f"hydra.output_subdir: {TRUST}"),
    "folder": ("folder: ../pwned", f"folder: {TRUST}"),
    "folder by the environment": ("folder: 'out-${oc.env:HOME}/pwned'", f"folder: {TRUST}"),
    "folder by a sweep": ("hydra: {sweeper: {params: {folder: ../pwned}}}", f"folder: {TRUST}", SWEPT),
    "the environment set": ("hydra: {job: {env_set: {PWNED: 'x'}}}", f"hydra.job.env_set: {TRUST}"),
    "the environment copied": ("hydra: {job: {env_copy: [HOME]}}", "hydra.job.env_copy"),
    "an unknown variable copied": ("hydra: {job: {env_copy: [NONE_SUCH]}}", "NONE_SUCH"),
    "another working directory": ("hydra: {job: {chdir: true}}", "hydra.job.chdir"),
    "the job's name": ("hydra: {job: {name: ../../pwned}}", "hydra.job.name"),
    "choices of more groups": ("hydra: {runtime: {choices: {fit: none}}}", "fit"),
    "a search path": ("hydra: {searchpath: ['pkg://evil_code']}", "hydra.searchpath"),
    "help": ("hydra: {help: {template: x}}", "hydra.help.template"),
    "verbosity": ("hydra: {verbose: true}", "hydra.verbose"),
    "a launcher's arguments": (
        "hydra: {launcher: {_target_: os.mkdir, path: pwned}}",
        "Key 'path' not in 'BasicLauncherConf'",
        SWEPT,
    ),
    "code among a sweep's values": (
        f"hydra: {{sweeper: {{params: {{x: {MKDIR}}}}}}}",
        "hydra.sweeper.params.x: expected values",
        SWEPT,
    ),
    "an interpolation among a sweep's values": (
        "hydra: {sweeper: {params: {run: '${oc.env:HOME}'}}}",
        "hydra.sweeper.params.run",
        SWEPT,
    ),
    "Hydra's config by a sweep": (
        "hydra: {sweeper: {params: {hydra.run.dir: ../pwned, +hydra.job.env_set.PWNED: x}}}",
        "hydra.job.env_set",
        SWEPT,
    ),
    "a package header": (
        None,
        "hydra.job.env_set",
        NAMED,
        {"experiment/evil.yaml": "# @package hydra.job\nenv_set: {PWNED: x}\n"},
    ),
    "a group moved into Hydra's config": (
        "defaults: [{/odd@hydra.job: evil}]",
        "hydra.job.env_set",
        NAMED,
        {"odd/evil.yaml": "env_set: {PWNED: x}\n"},
    ),
    "a logging config of theirs": (
        "defaults: [override /hydra/job_logging: evil]",
        "hydra.job_logging",
        NAMED,
        {"hydra/job_logging/evil.yaml": "version: 1\nhandlers: {x: {(): os.mkdir, path: pwned}}\n"},
    ),
    "a logging config of Hydra": (
        "defaults: [override /hydra/hydra_logging: hydra_debug]",
        "hydra.hydra_logging",
    ),
    "a launcher that hides Hydra's": (
        "",
        "hydra/launcher/basic",
        SWEPT,
        {"hydra/launcher/basic.yaml": "_target_: os.mkdir\npath: pwned\n"},
    ),
    "a config that hides Hydra's": (
        "",
        "",
        NAMED,
        {"hydra/config.yaml": "defaults: []\ncallbacks: {x: {_target_: os.mkdir}}\n"},
    ),
    "a sweep of which one recipe is evil": (
        f"hydra: {{callbacks: {{x: {MKDIR}}}}}",
        "hydra.callbacks.x",
        [*NAMED, "-m", "experiment=good,evil"],
        {"experiment/good.yaml": "# @package _global_\nfit: {epochs: 1}\n"},
    ),
    # files to read
    "data elsewhere": (
        "data: {path: ../secret.npz}",
        "data.path: expected a file below the working directory or the recipe's folder, found '../secret.npz'",
        ["data=npz", "model=my.onnx"],
    ),
    "data elsewhere, by a link": (
        "data: {path: ../evil/link.npz}",
        "data.path",
        ["data=npz", "model=my.onnx"],
    ),
    "data elsewhere, by links in a folder": (
        "data: {path: ../evil/links}",
        "data.path",
        ["data=npy", "model=my.onnx"],
    ),
    "data elsewhere, by an interpolation": (
        "where: ..\ndata: {path: '${where}/secret.npz'}",
        "data.path",
        ["data=npz", "model=my.onnx"],
    ),
    "data elsewhere, by a sweep": (
        "hydra: {sweeper: {params: {data.path: ../secret.npz}}}",
        "data.path",
        ["data=npz", "model=my.onnx", *SWEPT[-2:]],
    ),
    "a schedule that reads the data": (
        "defaults: [override /schedule: cosine]\ndata: {path: ../secret.npz}",
        "data.path",
        ["data=npz", "model=my.onnx"],
    ),
    "a model elsewhere": ("model: ../secret.onnx", "model: expected a file below", NAMED[:2]),
    "validation elsewhere": ("fit: {validation: ../secret.npz}", "fit.validation"),
    "a library to load": (
        "executor: {provider_options: {backend_path: ../evil/library.so}}",
        f"executor.provider_options.backend_path: {TRUST}",
    ),
    "a library to load, behind a reference": (
        "mine: {backend_path: x.so}\nexecutor: {provider_options: '${mine}'}",
        "executor.provider_options.backend_path",
    ),
    "a library beside the user's options": (
        "executor: {provider_options: {backend_path: x.so}}",
        "executor.provider_options.backend_path",
        [*NAMED, "+executor.provider_options.threads=1"],
    ),
    "a limit that a bomb needs": ("data: {expansion: 1000000}", f"data.expansion: {TRUST}"),
    "a limit that a model of theirs needs": (
        "limits: {constant_bytes: 1000000000000}",
        f"limits.constant_bytes: {TRUST}",
    ),
    "a sweep of a billion runs": (
        "hydra: {sweeper: {params: {fit.seed: 'range(0,1000000000)'}}}",
        "hydra.sweeper.params: expected at most 10,000 runs, found more",
        [*NAMED, "-m"],
    ),
    "a sweep of many runs by few": (
        "hydra: {sweeper: {params: {fit.seed: 'range(200)', fit.epochs: 'range(1,101)'}}}",
        "hydra.sweeper.params: expected at most 10,000 runs, found more",
        [*NAMED, "-m"],
    ),
    "yaml elsewhere": ("defaults: [/../secret]", "expected a recipe below its folder"),
    "yaml elsewhere, from here": ("defaults: [../../secret]", "expected a recipe below its folder"),
    "yaml elsewhere, as an option": (
        "defaults: [override /loss: ../../secret]",
        "expected a recipe below its folder",
    ),
    "yaml elsewhere, with an absolute path": ("defaults: [//etc/passwd.yaml]", ""),
    "yaml elsewhere, by a link": ("defaults: [/link]", "expected a recipe below its folder"),
    "yaml elsewhere, by a link to a folder": (
        "defaults: [/above/secret]",
        "expected a recipe below its folder",
    ),
    # places to write to
    "the run of the user": (
        "resume: ../outside",
        "resume: expected a path on the command line alone, found it in a recipe",
    ),
    "the run of the user, in the working directory": (
        "resume: runs/mine",
        "resume: expected a path on the command line alone",
    ),
    "the run of the user, to evaluate": (
        "resume: ../outside\nrun: evaluate",
        "resume: expected a path on the command line alone",
    ),
    "the run of the user, by a sweep": (
        "hydra: {sweeper: {params: {resume: ../outside}}}",
        "resume: expected a path on the command line alone",
        SWEPT,
    ),
    "predictions elsewhere": ("predictions: ../pwned.csv\nrun: predict", "predictions: expected "),
    "predictions over a file of the user": (
        "predictions: train.npz\nrun: predict",
        "predictions: expected predictions with .npz",
    ),
    "checkpoints elsewhere": (
        "fit: {checkpoint: {folder: ../pwned}}",
        "fit.checkpoint: unknown field 'folder'",
    ),
    "files for hosts elsewhere": ("hosts: {folder: ../pwned}\nrun: hosts", "hosts: unknown field 'folder'"),
    "arguments that the command gives": (
        "executor: {step: ../secret.onnx}",
        "executor: unknown field 'step'",
    ),
    # processes
    "workers": ("defaults: [override /launcher: local]", f"launcher: {TRUST}"),
    "workers, by a class": (
        "launcher: {_target_: graphopt.distributed.launchers.LocalLauncher, workers: 1}",
        f"launcher: {TRUST}",
    ),
    "more workers than the user's": (
        "launcher: {workers: 2000}",
        f"launcher: {TRUST}",
        [*NAMED, "launcher=local"],
    ),
    "a cluster": ("launcher: {address: 'ray://x:1'}", f"launcher: {TRUST}", [*NAMED, "launcher=ray"]),
    "processes of a sweep": ("defaults: [override /sweep: parallel]", "", SWEPT),
    # guards stay where the command line names something beside
    "a tracker beside the user's log": (
        "callbacks: {tracker: wandb}",
        f"callbacks.tracker: {TRUST}",
        [*NAMED, "callbacks={csv: a.csv}"],
    ),
    "a server of the user's tracker": (
        "callbacks: {mlflow: {tracking_uri: 'http://x'}}",
        f"callbacks.mlflow.tracking_uri: {TRUST}",
        [*NAMED, "++callbacks={mlflow: {experiment: mine}}"],
    ),
    "a server of the user's tracker, by its name": (
        "callbacks: {mlflow: {tracking_uri: 'http://x'}}",
        f"callbacks.mlflow.tracking_uri: {TRUST}",
        [*NAMED, "++callbacks.mlflow={experiment: mine}"],
    ),
    "a log outside beside the user's": (
        "callbacks: {jsonl: ../pwned}",
        "callbacks.jsonl.path: expected a file below the run's folder",
        [*NAMED, "callbacks={csv: a.csv}"],
    ),
    "a library beside the user's options, in a mapping": (
        "executor: {provider_options: {backend_path: x.so}}",
        "executor.provider_options.backend_path",
        [*NAMED, "++executor={provider_options: {threads: 1}}"],
    ),
    "a limit beside the user's": (
        "limits: {constant_bytes: 1000000000000}",
        f"limits.constant_bytes: {TRUST}",
        [*NAMED, "limits={nodes: 1000}"],
    ),
    "data elsewhere beside the user's fields": (
        "data: {path: ../secret.npz}",
        "data.path",
        ["model=my.onnx", "data=npz", "data={expansion: 100}"],
    ),
    "a log that the command line removes": (
        "callbacks: {x: {_target_: graphopt.callbacks.CSV, path: ../pwned}}",
        "",
        [*NAMED, "~callbacks.csv"],
    ),
    # YAML that expands, by whatever path it is reached
    "a bomb of aliases as an option": (
        "defaults: [override /loss: bomb.yaml]",
        "bomb.yaml: expected a recipe without YAML aliases",
        NAMED,
        {"loss/bomb.yaml": BOMB},
    ),
    "a bomb of aliases in a package": (
        "defaults: [/deep/bomb@loss]",
        "bomb.yaml: expected a recipe without YAML aliases",
        NAMED,
        {"deep/bomb.yaml": BOMB},
    ),
    "a bomb of aliases that is optional": (
        "defaults: [optional /deep: bomb.yaml]",
        "bomb.yaml: expected a recipe without YAML aliases",
        NAMED,
        {"deep/bomb.yaml": BOMB},
    ),
    "a bomb of aliases by an interpolated name": (
        "defaults: [{/deep: 'bo${experiment}.yaml'}]",
        "boevil.yaml: expected a recipe without YAML aliases",
        NAMED,
        {"deep/boevil.yaml": BOMB},
    ),
    "a bomb of aliases in another folder": (
        None,
        "evil.yaml: expected a recipe without YAML aliases",
        [*NAMED, "hydra.searchpath=[../more]"],
        {"../more/experiment/evil.yaml": BOMB},
    ),
    "a large recipe": ("x: [" + "0, " * 60_000 + "0]", "evil.yaml: expected a file of at most 100,000 bytes"),
    "a deep recipe": (
        "x: " + "[" * 900 + "]" * 900,
        "evil.yaml: expected mappings and lists of at most 50 levels",
    ),
    "thousands of recipes": (
        "defaults: [/n/n0@a, /n/n0@b]",
        "expected recipes of at most 20,000 fields",
        NAMED,
        {
            **{f"n/n{i}.yaml": f"defaults: [n{i + 1}@a, n{i + 1}@b]\n" for i in range(14)},
            "n/n14.yaml": "x: 1\n",
        },
    ),
    "recipes that name themselves": ("defaults: [/n/n0]", "", NAMED, {"n/n0.yaml": "defaults: [n0@a]\n"}),
    # numbers that allocate
    "a model that fills the memory": (
        "model: mlp\nmodels: {mlp: {hidden: [1000000, 1000000]}}",
        "model: expected at most 134,217,728 weights",
        NAMED[:2],
    ),
    "thousands of threads": ("executor: {threads: 20000}", "threads: expected "),
    "thousands of batches ahead": ("fit: {prefetch: 1000000000}", "fit.prefetch: expected "),
    "thousands of steps in a call": (
        "executor: {steps_per_call: 1000000000}",
        "executor.steps_per_call: expected ",
    ),
    # trusted code is what its packages hold, not what they import
    "an import of a trusted module": (
        "loss: {_target_: own_losses.os.mkdir, path: pwned}",
        "loss._target_",
        TRUSTED,
    ),
    "globals of a trusted function": (
        "loss: {_target_: own_losses.absolute.__globals__.get, key: x}",
        "loss._target_",
        TRUSTED,
    ),
    "a function that a trusted module imports": (
        "defaults: [override /loss: custom]\nloss: {function: 'own_losses:os.system'}",
        "loss.function",
        TRUSTED,
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory, beside it secrets and a folder of recipes."""
    global seen
    for name in ("work", "evil"):
        (tmp_path / name).mkdir()
    (tmp_path / "more").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(tmp_path / "work")
    monkeypatch.setattr(sys, "argv", ["graphopt"])
    random = np.random.default_rng(0)
    arrays = {"x": random.standard_normal((20, 4)).astype(np.float32), "target": np.arange(20) % 3}
    for path in ("train.npz", "../secret.npz"):
        np.savez(path, **arrays)
    (tmp_path / "evil" / "links").mkdir()
    for name, array in arrays.items():
        np.save(f"../secret_{name}.npy", array)
        (tmp_path / "evil" / "links" / f"{name}.npy").symlink_to(tmp_path / f"secret_{name}.npy")
    (tmp_path / "evil" / "link.npz").symlink_to(tmp_path / "secret.npz")
    (tmp_path / "secret.yaml").write_text("secret: 1\n")
    (tmp_path / "evil" / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    (tmp_path / "evil" / "above").symlink_to(tmp_path)
    onnx.save(mlp((4, 8, 3)), "my.onnx")
    onnx.save(mlp((4, 8, 3)), "../secret.onnx")
    Path("own_losses.py").write_text("import os\n\ndef absolute(op, p, t):\n    return op.Abs(p - t)\n")
    seen = []
    yield
    seen = None
    sys.modules.pop("own_losses", None)


def run(files: dict[str, str], arguments: list[str], folder: list[str]) -> int:
    for name, text in files.items():
        path = Path("../evil", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    recipe = [] if any(one.startswith("experiment=") for one in arguments) else ["experiment=evil"]
    return cli.main(["--config-dir", "../evil", *recipe, *arguments, *folder, "fit.epochs=1"])


EVERY = [
    pytest.param(name, marks=[pytest.mark.exhaustive] if i % 5 else []) for i, name in enumerate(ATTACKS)
]


@pytest.mark.parametrize("attack", EVERY)
@pytest.mark.slow
def test_an_attack_is_refused_in_one_line(attack: str, capfd: pytest.CaptureFixture[str]) -> None:
    text, error, *others = ATTACKS[attack]
    arguments, more = (*others, *(NAMED, {})[len(others) :])
    files = {**(experiment(text) if text is not None else {}), **more}
    before = os.listdir("..")
    assert run(files, arguments, [] if "folder" in attack else ["folder=out"]) == 1
    *warnings, said = capfd.readouterr().err.splitlines()
    hydras = "Error executing job with overrides: "  # of a sweep
    assert all(line.startswith(("graphopt: warning: ", hydras)) for line in warnings if line)
    assert said.startswith("graphopt: error: ") and error in said
    assert seen == []
    assert os.listdir("..") == before and "PWNED" not in os.environ
    assert not Path("pwned").exists()


@pytest.mark.slow
def test_a_recipe_of_someone_else_runs_where_it_is_harmless() -> None:
    np.savez("../evil/theirs.npz", **np.load("train.npz"))
    text = (
        "defaults: [override /data: npz, override /optimizer: sgd, override /loss: cross_entropy]\n"
        "data: {path: ../evil/theirs.npz}\nmodel: my.onnx\nfit: {validation: train.npz}\n"
        "pipeline: {regularizer: [{_target_: passes.L2}, {_target_: passes.L1, strength: 1e-5}]}\n"
        "hydra: {sweeper: {params: {optimizer.learning_rate: '1e-3,1e-2'}}}"
    )
    assert run(experiment(text), ["-m"], ["folder=out"]) == 0
    assert [Path(f"out/{i}/trained.onnx").exists() for i in range(3)] == [True, True, False]
    assert seen == []


def test_a_file_elsewhere_is_read_if_the_command_line_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    global seen
    seen = None
    files = experiment("data: {path: ../secret.npz}\nmodel: ../secret.onnx")
    named = ["data=npz", "data.path=../secret.npz", "model=../secret.onnx"]
    assert run(files, named, ["folder=out"]) == 0


@pytest.mark.slow
def test_a_log_of_a_recipe_replaces_no_file(capfd: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    for name, callbacks in (("victim.csv", "{csv: victim.csv}"), ("victim", "{jsonl: victim}")):
        Path("mine", name).write_text("precious")
        assert run(experiment(f"callbacks: {callbacks}"), NAMED, ["folder=mine"]) == 1
        assert "expected a new file in the run's folder" in capfd.readouterr().err
        assert Path("mine", name).read_text() == "precious"
    Path("mine/link").symlink_to(Path.cwd().parent)
    assert run(experiment("callbacks: {csv: link/pwned}"), NAMED, ["folder=mine"]) == 1
    assert "expected a new file in the run's folder" in capfd.readouterr().err


@pytest.mark.slow
def test_a_log_of_a_recipe_is_continued_with_its_run() -> None:
    files = experiment("callbacks: {csv: log.csv}")
    assert run(files, NAMED, ["folder=out"]) == 0
    assert run(files, [*NAMED, "resume=true"], ["folder=out"]) == 0
    assert run(files, [*NAMED, "resume=out"], ["folder=other"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["callbacks={jsonl: {path: ../named}}"],
        ["callbacks.jsonl=../named"],
        ["callbacks={jsonl: ../named}"],
        ["callbacks.jsonl={path: ../named}"],
    ],
)
@pytest.mark.slow
def test_what_the_command_line_names_is_allowed(arguments: list[str]) -> None:
    assert run(experiment("fit: {batch_size: 8}"), [*NAMED, *arguments], ["folder=out"]) == 0
    assert Path("named").is_file()


@pytest.mark.slow
def test_a_recipe_of_someone_else_trains_with_the_processes_of_the_user() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    Path("../evil/experiment").mkdir()
    Path("../evil/experiment/evil.yaml").write_text("# @package _global_\nfit: {epochs: 1}\n")
    command = [sys.executable, "-P", "-m", "graphopt", "--config-dir", "../evil", "experiment=evil", *NAMED]
    sweep = ["-m", "sweep=parallel", "hydra.launcher.n_jobs=1", "fit.seed=0,1", "folder=swept"]
    done = subprocess.run([*command, *sweep], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path("swept/1/trained.onnx").exists()


def test_a_primary_config_of_theirs_does_not_hide_ours() -> None:
    files = {
        **experiment("fit: {epochs: 1}"),
        "graphopt.yaml": f"hydra: {{callbacks: {{x: {MKDIR}}}}}\n",
        "optimizer/adamw.yaml": "_target_: os.mkdir\n",
        "hydra/env/default.yaml": "# @package hydra.job\nenv_set: {PWNED: x}\n",
    }
    assert run(files, NAMED, ["folder=out"]) == 0
    assert seen == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--experimental-rerun", "x.pickle"],
        ["--experimental-rerun=x.pickle"],
        ["--exp", "x.pickle"],
        ["--config-name", "evil"],
        ["--config-path", "../evil"],
        ["-cn", "evil"],
        ["-cp", "../evil"],
    ],
)
def test_options_of_hydra_that_run_what_files_say_are_no_options(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("x.pickle").write_bytes(b"cos\nmkdir\n(S'pwned'\ntR.")
    assert cli.main(arguments) == 1
    said = capfd.readouterr().err
    assert said.startswith("graphopt: error: ") and said.count("\n") == 1
    assert seen == [] and not Path("pwned").exists()


@pytest.mark.parametrize("option", [["--help"], ["--cfg", "all"], ["--info", "all"]])
def test_options_that_only_show_refuse_too(option: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    Path("../evil/hydra").mkdir()
    Path("../evil/hydra/config.yaml").write_text("run: {dir: ../pwned}\n")
    assert cli.main(["--config-dir", "../evil", *option]) == 1
    assert capfd.readouterr().err.count("\n") == 1
    assert seen == []


def test_the_environment_is_there_again_afterwards() -> None:
    from omegaconf import OmegaConf

    assert cli.main(["--version"]) == 0
    assert run(experiment("loss: {output: '${oc.env:HOME}'}"), NAMED, ["folder=out"]) == 1
    assert OmegaConf.create({"x": "${oc.env:HOME,none}"}).x


HIDING = (
    "yaml",
    "numpy",
    "onnx",
    "cloudpickle",
    "psutil",
    "mpi4py",
    "sitecustomize",
    "graphopt/__init__",
    "joblib/__init__",
)
STARTING = {
    "workers": ["launcher=local", "launcher.workers=1"],
    "jobs of a sweep": ["-m", "sweep=parallel", "hydra.launcher.n_jobs=2", "optimizer=sgd,adamw"],
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P")
@pytest.mark.parametrize("started", STARTING)
@pytest.mark.slow
def test_modules_of_the_working_directory_do_not_run_in_other_processes(started: str) -> None:
    """Each module of the working directory would make the folder `pwned` and end its process."""
    for name in HIDING:
        path = Path(f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import os\nos.makedirs({os.path.abspath('pwned')!r})\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-P",
        "-m",
        "graphopt",
        *NAMED,
        "fit.epochs=1",
        "folder=out",
        *STARTING[started],
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not Path("pwned").exists()
    assert done.returncode == 0, done.stderr


def test_the_working_directory_is_searched_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    before = list(sys.path)
    with installed_first():
        assert [one for one in sys.path if one in ("", os.getcwd())] == sys.path[-2:]
        assert sorted(sys.path) == sorted(before) and os.environ["PYTHONSAFEPATH"]
    assert sys.path == before


@pytest.mark.parametrize(("version", "ends"), [((3, 10), 1), ((3, 11), 0)])
def test_python_3_10_starts_no_jobs_beside_modules(
    version: tuple[int, int], ends: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("graphopt.cli.processes.sys", SimpleNamespace(version_info=version, path=sys.path))
    hydra = OmegaConf.create(
        {"launcher": {"_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"},
         "runtime": {"choices": {"hydra/launcher": "joblib"}}}
    )  # fmt: skip
    if ends:
        with pytest.raises(GraphoptError, match=r"without Python modules, .* found own_losses"):
            check_processes(hydra)
    else:
        check_processes(hydra)


@pytest.mark.parametrize("folder", ["recipes", "hydra_plugins/evil", "recipes/experiment"])
@pytest.mark.slow
def test_folders_of_the_working_directory_are_not_taken_for_ours(folder: str) -> None:
    Path(folder).mkdir(parents=True)
    Path(folder, "__init__.py").write_text("import os\nos.mkdir('pwned')\n")
    command = [sys.executable, "-P", "-c", "import sys; from graphopt.cli import main; sys.exit(main())"]
    if folder.startswith("recipes"):
        command = [sys.executable, "-m", "graphopt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--cfg", "job"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "optimizer:" in done.stdout
    assert not Path("pwned").exists()


def test_a_field_that_another_names_is_found() -> None:
    text = "sizes: {small: 4, large: 64}\nsize: large\nfit: {batch_size: '${sizes.${size}}'}"
    assert run(experiment(text), [*NAMED, "run=compile"], ["folder=out"]) == 0
    assert "batch_size: 64" in Path("out/config.yaml").read_text()


def _runs_folder(change: Callable[[Path, dict[str, Any]], None]) -> None:
    """Write the folder of a run, `../evil/run`, as someone else has changed it."""
    global seen
    seen = None
    assert cli.main([*NAMED, "fit.epochs=1", "folder=../evil/run"]) == 0
    record = Path("../evil/run/.hydra")
    (record / "signature.json").unlink()
    fields = yaml.safe_load((record / "config.yaml").read_text())
    change(record, fields)
    if (record / "config.yaml").is_file():
        (record / "config.yaml").write_text(yaml.safe_dump(fields, sort_keys=False))
    seen = []


def _set(**parts: Any) -> Callable[[Path, dict[str, Any]], None]:
    """Set fields of a recorded recipe."""

    def change(_: Path, fields: dict[str, Any]) -> None:
        for name, value in parts.items():
            old = fields.get(name)
            fields[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value

    return change


CODE = {"_target_": "os.mkdir", "path": "pwned"}
# Recorded recipes of someone else: what is changed in them, and what the error has to say.
RUN_ATTACKS: dict[str, tuple[Callable[[Path, dict[str, Any]], None], str]] = {
    "code in place of a loss": (_set(loss=CODE), "loss._target_"),
    "code in the pipeline": (_set(pipeline={"loss": CODE}), "pipeline.loss._target_"),
    "code as a callback": (_set(callbacks={"x": CODE}), "callbacks.x._target_"),
    "code that no one reads": (_set(unused={"x": [CODE]}), "unused.x[0]._target_"),
    "trust": (_set(trust=["os"], loss=CODE), "trust=[os] on the command line"),
    "trust in its command line": (
        lambda record, fields: (
            (record / "overrides.yaml").write_text("- trust=[os]\n- loss._target_=os.mkdir\n"),
            fields.update(loss=CODE),
        ),
        "trust=[os] on the command line",
    ),
    "a signature of its own": (
        lambda record, fields: (
            (record / "signature.json").write_text('{"strangers": [], "hmac": "00"}'),
            fields.update(loss=CODE),
        ),
        "loss._target_",
    ),
    "data elsewhere": (
        _set(data={"path": "../secret.npz"}),
        "data.path: expected a file below the working directory",
    ),
    "data elsewhere in its command line": (
        lambda record, fields: (
            (record / "overrides.yaml").write_text("- data.path=../secret.npz\n"),
            fields["data"].update(path="../secret.npz"),
        ),
        "data.path: expected a file below the working directory",
    ),
    "validation elsewhere": (
        _set(fit={"validation": "../secret.npz"}),
        "fit.validation: expected a file below",
    ),
    "a model elsewhere": (_set(model="../secret.onnx"), "model: expected a file below"),
    "a library": (_set(executor={"custom_ops": ["x.so"]}), "executor.custom_ops"),
    "options that write files": (
        _set(executor={"provider_options": {"a": "b"}}),
        f"executor.provider_options.a: {TRUST}",
    ),
    "no limits": (_set(limits={"nodes": 10**12}), f"limits.nodes: {TRUST}"),
    "a log elsewhere": (
        _set(callbacks={"csv": "../pwned"}),
        "callbacks.csv.path: expected a file below the run's",
    ),
    "a tracker": (
        _set(callbacks={"tracker": "wandb"}),
        "callbacks.tracker: expected it on the command line alone",
    ),
    "the environment": (_set(loss={"output": "${oc.env:HOME}"}), "Unsupported interpolation type oc.env"),
    "references that double": (
        _set(**{f"b{i}": f"${{b{i - 1}}}${{b{i - 1}}}" if i else "x" for i in range(40)}),
        "expected at most 100,000 characters and values once its references are resolved",
    ),
    "what is deep": (
        _set(x=yaml.safe_load(60 * "[" + 60 * "]")),
        "expected mappings and lists of at most 50 levels",
    ),
    "what is large": (_set(x="y" * 200_000), "expected a file of at most 100,000 bytes"),
    "a list": (lambda record, fields: (record / "hydra.yaml").write_text(BOMB), "without YAML aliases"),
}


@pytest.mark.parametrize("attack", RUN_ATTACKS)
@pytest.mark.parametrize(
    "arguments", [["evaluate", "folder=../evil/run"], ["resume=../evil/run", "fit.epochs=2"]]
)
@pytest.mark.slow
def test_the_run_of_someone_else_is_refused_in_one_line(
    attack: str, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    change, error = RUN_ATTACKS[attack]
    _runs_folder(change)
    capfd.readouterr()
    assert cli.main(arguments) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith("graphopt: error: ") and error in said, said
    assert seen == []
    assert not Path("pwned").exists() and not Path("runs").exists()


@pytest.mark.parametrize("place", ["config.yaml", ".hydra/config.yaml", ".hydra/overrides.yaml"])
def test_a_link_in_the_run_of_someone_else_is_not_read(place: str, capfd: pytest.CaptureFixture[str]) -> None:
    _runs_folder(lambda *_: None)
    path = Path("../evil/run", place)
    path.unlink()
    path.symlink_to(Path("../secret.yaml").resolve())
    capfd.readouterr()
    assert cli.main(["evaluate", "folder=../evil/run"]) == 1
    assert f"{place}: expected only folders and files with one name" in capfd.readouterr().err
    assert seen == []


@pytest.mark.slow
def test_what_the_run_of_someone_else_must_not_decide_is_not_taken_from_it() -> None:
    changed = {
        "folder": "../pwned",
        "resume": "../outside",
        "run": "artifacts",
        "predictions": "../pwned.csv",
    }
    _runs_folder(
        _set(**changed, launcher={"_target_": "graphopt.distributed.launchers.LocalLauncher"}, hydra=CODE)
    )
    assert cli.main(["evaluate", "folder=../evil/run"]) == 0
    assert cli.main(["predict", "folder=../evil/run"]) == 0
    assert Path("../evil/run/predictions.npz").is_file() and not Path("../pwned").exists()
    assert seen == []


@pytest.mark.slow
def test_continuing_the_run_of_someone_else_does_not_make_it_one_s_own(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def change(record: Path, _: dict[str, Any]) -> None:
        (record / "overrides.yaml").write_text("- trust=[os]\n- data.path=../secret.npz\n")

    _runs_folder(change)
    for epochs in (2, 3):
        assert cli.main(["resume=../evil/run", f"fit.epochs={epochs}", "data.path=train.npz"]) == 0
    config = Path("../evil/run/.hydra/config.yaml")
    config.write_text(config.read_text().replace("train.npz", "../secret.npz"))
    assert cli.main(["evaluate", "folder=../evil/run"]) == 1
    assert "data.path: expected a file below the working directory" in capfd.readouterr().err
    assert seen == []


def _kinds() -> dict[str, Any]:
    """Return all classes and functions that a recipe may name, and those of its parts."""
    names = [name for group in validation.NAMED.values() for name in group]
    library = [name for name in validation._passes()]
    return {name: pkgutil.resolve_name(name) for name in (*names, *library)} | validation.PLAIN


PATH_LIKE = re.compile(r"PathLike|\bPath\b")
PATH_NAMES = {"path", "file", "folder", "teacher", "tokenizer", "chat_template"}


@pytest.mark.parametrize("name", _kinds())
def test_every_path_of_what_a_recipe_names_is_annotated(name: str) -> None:
    """A field that takes a path says in its type whether it is read or written."""
    kind = _kinds()[name]
    options = getattr(kind, "Options", None) or kind
    known = validation.accesses(kind)
    given = {"step", "resume", "checkpoint", *validation._ADDED.get(name, ())}
    for owner in (*getattr(options, "__mro__", ()), options):
        for field, hint in inspect.get_annotations(owner).items():
            is_path = PATH_LIKE.search(str(hint)) or ("Path" not in str(hint) and field in PATH_NAMES)
            is_marked = re.search(r"(Read|Write)(Path|Name)", str(hint))
            if is_path and not is_marked and field in inspect.signature(kind).parameters:
                assert field in given, f"{name}.{field}: write ReadPath or WritePath of graphopt.files"
            if is_marked and field in inspect.signature(kind).parameters:
                assert field in known


READS: dict[str, tuple[str, str]] = {
    "a teacher": (
        "defaults: [override /loss: distillation]\nloss: {teacher: ../secret.onnx}",
        "loss.teacher: expected a file below the working directory",
    ),
    "a teacher in the pipeline": (
        "defaults: [override /loss: distillation]\npipeline: {loss: {teacher: ../secret.onnx}}",
        "pipeline.loss.teacher: expected a file below",
    ),
    "a teacher in a step of its own": (
        "pipeline: {mine: [{_target_: passes.Distillation, teacher: ../secret.onnx}]}",
        "pipeline.mine[0].teacher: expected a file below",
    ),
    "a teacher behind a link": (
        "defaults: [override /loss: distillation]\nloss: {teacher: ../evil/above/secret.onnx}",
        "loss.teacher: expected a file below",
    ),
    "an adapter": (
        "adapter: {_target_: passes.LoadedLoRA, path: ../secret}",
        "adapter.path: expected a file below",
    ),
    "an adapter in the pipeline": (
        "pipeline: {adapter: {_target_: passes.LoadedLoRA, path: ../secret}}",
        "pipeline.adapter.path: expected a file below",
    ),
    "a folder of runs": (
        "callbacks: {median_stopping: {folder: ../outside}}",
        "callbacks.median_stopping.folder: expected a file below",
    ),
    "a tokenizer to continue a text": (
        "generate: {tokenizer: ../secret.json}",
        "generate.tokenizer: expected a file below",
    ),
    "a template beside a tokenizer": (
        "defaults: [override /data: text]\ndata: {path: train.npz, tokenizer: ../evil/files/tokenizer.json}",
        "data.tokenizer: expected a file below",
    ),
    "a template beside a model": ("model: ../evil/files/my.onnx", "model: expected a file below"),
}


@pytest.mark.parametrize("attack", READS)
def test_a_recipe_reads_no_file_of_the_user(attack: str, capfd: pytest.CaptureFixture[str]) -> None:
    text, error = READS[attack]
    Path("../evil/files").mkdir()
    for name in ("tokenizer.json", "my.onnx"):
        Path("../evil/files", name).write_text("{}")
    Path("../evil/files/chat_template.jinja").symlink_to("../../secret.yaml")
    named = ["data=npz", "data.path=train.npz"] if "data" not in text else []
    model = [] if "model:" in text else ["model=my.onnx"]
    assert run(experiment(text), [*named, *model], ["folder=out"]) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and error in said, said
    assert seen == [] and not Path("out").exists()


def test_a_recipe_reads_a_file_that_the_command_line_names(capfd: pytest.CaptureFixture[str]) -> None:
    global seen
    seen = None
    text = "defaults: [override /loss: distillation]\nloss: {teacher: ../secret.onnx}"
    assert run(experiment(text), [*NAMED, "loss.teacher=../secret.onnx"], ["folder=out"]) == 0
