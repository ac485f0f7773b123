"""Recipes of someone else: no code of theirs runs, and no file that the user did not name is touched."""

from __future__ import annotations

import functools
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import messages
import numpy as np
import onnx
import pytest
import yaml
from builders import mlp
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf

from graphopt import cli
from graphopt.cli.composition import validation
from graphopt.cli.processes import check_processes, installed_first
from graphopt.errors import GraphoptError

pytestmark = pytest.mark.usefixtures("plain")

ROOT = Path(cli.__file__).parents[2]
NAMED = ["data=npz", "data.path=train.npz", "model=my.onnx"]  # what a user says beside the recipe's name
SWEEP = ["-m", "optimizer.learning_rate=1e-3,1e-2"]

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


# Attacks are in `tests/listings/hostile_recipes.txt`: the files of the folder, more arguments, and what the error says.


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


def _name(call: str) -> str:
    """Return the first argument of a call of a listing, which has no word that `watch` looks for."""
    return call.split("'")[1] if call[call.index("(") + 1] == "'" else call.split('"')[1]


EVERY = [
    pytest.param(call, id=_name(call), marks=[pytest.mark.exhaustive] if i % 5 else [])
    for i, call in enumerate(messages.calls("hostile_recipes"))
]


@pytest.mark.parametrize("call", EVERY)
@pytest.mark.slow
def test_an_attack_is_refused_in_one_line(call: str, capfd: pytest.CaptureFixture[str]) -> None:
    def attack(name: str, files: dict[str, str], arguments: list[str]) -> int:
        return run(files, arguments, [] if "folder" in name else ["folder=out"])

    before = os.listdir("..")
    assert eval(call, {**globals(), "attack": attack}) == 1
    *warnings, said = capfd.readouterr().err.splitlines()
    hydras = "Error executing job with overrides: "  # of a sweep
    assert all(line.startswith(("graphopt: warning: ", hydras)) for line in warnings if line)
    assert said.startswith("graphopt: error: ")
    messages.check("hostile_recipes", call, said.removeprefix("graphopt: error: "))
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


def test_hydra_forgets_the_folder_of_someone_else() -> None:
    """The user's own application composes in the same process."""
    Path("own").mkdir()
    Path("own/main.yaml").write_text("defaults: [optional sub: b]\n")
    files = {**experiment("x: 1"), "sub/b.yaml": f"call: {MKDIR}\n"}
    returned = JobReturn.return_value
    run(files, ["--cfg", "job"], [])
    assert JobReturn.return_value is returned
    with hydra.initialize_config_dir(str(Path("own").absolute()), version_base="1.3"):
        assert hydra.compose("main") == {}


def test_recipes_of_a_package_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("zipped_recipes/__init__.py", "")
        archive.writestr("zipped_recipes/experiment/mine.yaml", "\ufeff# @package _global_\nfit: {epochs: 2}\n")
    monkeypatch.syspath_prepend(tmp_path / "zipped.zip")
    assert cli.main(["--cfg", "job", "hydra.searchpath=[pkg://zipped_recipes]", "experiment=mine"]) == 0


def test_a_package_whose_import_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken_recipes").mkdir()
    (tmp_path / "broken_recipes" / "__init__.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["--cfg", "job", "hydra.searchpath=[pkg://broken_recipes]"]) == 1
    assert "pkg://broken_recipes, whose import fails: RuntimeError: no licence" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["pkg://nowhere", "file:///nowhere"])
def test_a_place_without_recipes_is_named(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("nowhere").mkdir()  # which is no package
    assert cli.main(["--cfg", "job", f"hydra.searchpath=[{place}]"]) == 1
    assert place in capsys.readouterr().err


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


@functools.cache
def _run_files() -> dict[Path, bytes]:
    """Return the files of a run's folder, `../evil/run`: in each test's working directory it would write the same."""
    assert cli.main([*NAMED, "fit.epochs=1", "folder=../evil/run"]) == 0
    return {path: path.read_bytes() for path in Path("../evil/run").rglob("*") if path.is_file()}


def _runs_folder(change: Callable[[Path, dict[str, Any]], None]) -> None:
    """Write the folder of a run, `../evil/run`, as someone else has changed it."""
    global seen
    seen = None
    for path, content in _run_files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
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
@pytest.mark.parametrize("call", messages.calls("hostile_runs"), ids=_name)
@pytest.mark.parametrize("arguments", [["evaluate", "folder=../evil/run"], ["resume=../evil/run", "fit.epochs=2"]])
@pytest.mark.slow
def test_the_run_of_someone_else_is_refused_in_one_line(
    call: str, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    eval(call, {**globals(), "change": lambda name, changed: _runs_folder(changed)})
    capfd.readouterr()
    assert cli.main(arguments) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith("graphopt: error: "), said
    messages.check("hostile_runs", call, said.removeprefix("graphopt: error: ").rstrip())
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
    _runs_folder(_set(**changed, launcher={"_target_": "graphopt.distributed.launchers.LocalLauncher"}, hydra=CODE))
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


@pytest.mark.parametrize("call", messages.calls("hostile_reads"), ids=_name)
def test_a_recipe_reads_no_file_of_the_user(call: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = eval(call, {"recipe": lambda name, text: text})
    Path("../evil/files").mkdir()
    for name in ("tokenizer.json", "my.onnx"):
        Path("../evil/files", name).write_text("{}")
    Path("../evil/files/chat_template.jinja").symlink_to("../../secret.yaml")
    named = ["data=npz", "data.path=train.npz"] if "data" not in text else []
    model = [] if "model:" in text else ["model=my.onnx"]
    assert run(experiment(text), [*named, *model], ["folder=out"]) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1, said
    messages.check("hostile_reads", call, said.removeprefix("graphopt: error: ").rstrip())
    assert seen == [] and not Path("out").exists()


def test_a_recipe_reads_a_file_that_the_command_line_names(capfd: pytest.CaptureFixture[str]) -> None:
    global seen
    seen = None
    text = "defaults: [override /loss: distillation]\nloss: {teacher: ../secret.onnx}"
    assert run(experiment(text), [*NAMED, "loss.teacher=../secret.onnx"], ["folder=out"]) == 0
