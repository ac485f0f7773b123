"""Run folders of someone else: nothing in them is followed, and each ends with success or with one line."""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.table import Table

from graphopt import cli
from graphopt.cli.messages import complain, print_matrix, print_table, say, warn
from graphopt.data.files import write_rows
from graphopt.data.language.chats import ChatTemplate
from graphopt.data.language.tokenizer import Tokenizer
from graphopt.errors import GraphoptError
from graphopt.files import check_folder, json_of, open_to_append, read_regular, write_folder
from graphopt.runtime.checkpoint import load_state, save_state
from graphopt.targets.native.cache import cache_folder
from graphopt.training.callbacks.terminal import open_console

pytestmark = [
    pytest.mark.usefixtures("plain"),
    pytest.mark.skipif(os.name != "posix", reason="links and pipes of POSIX"),
]

MINE = ["data=npz", "data.path=train.npz", "model=linear", "fit.batch_size=16", "executor.threads=1"]
CHECKPOINT = "checkpoints/step-00000004"

# What the command reads or writes in the folder of a run; `extra` is what it does not know.
PLACES = [
    *("graphopt.log", ".lock", "metrics.jsonl", "config.yaml", "result.json", "step.onnx", "trained.onnx"),
    *("report.html", "checkpoints", ".hydra", ".hydra/config.yaml", ".hydra/hydra.yaml", "extra"),
    *(".hydra/overrides.yaml", ".hydra/signature.json", CHECKPOINT, f"{CHECKPOINT}/manifest.json"),
    *(f"{CHECKPOINT}/state.safetensors", f"{CHECKPOINT}/progress.json", "checkpoints/newest", "a/b/c"),
]


def _at(place: Path) -> Path:
    """Make room for an entry, and return its path."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _bind(place: Path) -> None:
    here = os.getcwd()
    os.chdir(place.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(place.name)
    finally:
        os.chdir(here)


def _device(place: Path) -> None:
    try:
        os.mknod(place, 0o20666, os.makedev(1, 5))  # as /dev/zero, which never ends
    except PermissionError:
        pytest.skip("only the superuser makes devices")


KINDS: dict[str, Callable[[Path, Path], Any]] = {
    "a link to a file": lambda place, canary: place.symlink_to(canary / "bashrc"),
    "a relative link": lambda place, canary: place.symlink_to(os.path.relpath(canary / "bashrc", place.parent)),
    "a link to a folder": lambda place, canary: place.symlink_to(canary / "project"),
    "a link to nothing": lambda place, canary: place.symlink_to(canary / "new"),
    "a link to itself": lambda place, canary: place.symlink_to(place.name),
    "a link to a link": lambda place, canary: place.symlink_to(canary / "link"),
    "a link to a device": lambda place, canary: place.symlink_to("/dev/zero"),
    "a hard link": lambda place, canary: os.link(canary / "bashrc", place),
    "a pipe": lambda place, canary: os.mkfifo(place),
    "a socket": lambda place, canary: _bind(place),
    "a device": lambda place, canary: _device(place),
}


def _deep(left: str, right: str, levels: int) -> str:
    return levels * left + levels * right


ALIASES = "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{f'*a{i}, ' * 9}]\n" for i in range(12))
YAML: dict[str, bytes] = {
    "a number": b"7\n",
    "a list": b"- 1\n- 2\n",
    "a text": b"text\n",
    "nothing": b"",
    "null": b"null\n",
    "aliases": ALIASES.encode(),
    "an alias to itself": b"a: &a [*a]\n",
    "a merge": b"a: &a {b: 1}\nc: {<<: *a}\n",
    "deep lists": _deep("[", "]", 5000).encode(),
    "deep mappings": b"a: " + _deep("{a: ", "}", 3000).replace("{a: }", "{a: 1}").encode(),
    "no UTF-8": b"a: \xff\xfe\n",
    "UTF-16": "a: 1\n".encode("utf-16"),
    "a control character": b"a: \x07\n",
    "half of a character": b'a: "\\ud800"\n',
    "a number as a key": b"1: 2\n",
    "true as a key": b"true: 2\n",
    "a list as a key": b"? [1, 2]\n: 3\n",
    "null as a key": b"~: 1\n",
    "a huge number": b"fit: {epochs: " + 5000 * b"9" + b"}\n",
    "a large number": b"fit: {epochs: " + 400 * b"9" + b"}\n",
    "infinity": b"fit: {epochs: .inf}\n",
    "an object": b"!!python/object/apply:os.system [touch pwned]\n",
    "a tag": b"a: !evil 1\n",
    "two documents": b"a: 1\n---\nb: 2\n",
    "a reference": b"run: ${oc.env:HOME}\n",
    "a reference to itself": b"a: ${a}\n",
    "large": b"a: " + 10**6 * b"x" + b"\n",
}
JSON: dict[str, bytes] = {
    "a number": b"7\n",
    "a list": b"[1, 2]\n",
    "null": b"null\n",
    "nothing": b"",
    "no JSON": b"{",
    "deep": _deep("[", "]", 100_000).encode(),
    "rather deep": _deep("[", "]", 400).encode(),
    "no UTF-8": b'{"value": "\xff"}\n',
    "half of a character": b'{"epoch": "\\ud800", "seconds": 1, "loss": 1, "step": 1, "value": "\\ud800"}\n',
    "a huge number": b'{"epoch": 1, "seconds": 1, "step": 1, "loss": ' + 5000 * b"9" + b"}\n",
    "400 digits": b'{"epoch": 1, "seconds": 1, "step": 1, "loss": %b, "value": %b}\n' % (400 * b"9", 400 * b"9"),
    "an exponent": b'{"epoch": 1e999, "seconds": 1, "step": -1e999, "loss": 1e999, "value": 1e999}\n',
    "no number": b'{"epoch": NaN, "seconds": "x", "step": [], "loss": {}, "value": {}}\n',
    "texts": b'{"epoch": "1", "seconds": "x", "step": "1", "loss": "\\u001b[31m", "value": "1"}\n',
    "true": b'{"epoch": true, "seconds": true, "step": true, "loss": true, "value": true}\n',
}
OF_YAML = ["config.yaml", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"]
OF_JSON = ["metrics.jsonl", "result.json", ".hydra/signature.json", f"{CHECKPOINT}/progress.json"]
OF_JSON += [f"{CHECKPOINT}/manifest.json"]

COMMANDS: dict[str, list[str]] = {
    "resume": ["resume=theirs", "fit.epochs=3"],
    "evaluate": ["evaluate", "folder=theirs"],
    "predict": ["predict", "folder=theirs", "predictions=predictions.csv"],
    "compare": ["compare", "folder=theirs"],
    "a new run": [*MINE, "folder=theirs", "fit.epochs=1"],
    "the same run": [*MINE, "folder=theirs", "resume=true", "fit.epochs=2", "fit.checkpoint.every=2 steps"],
    "a checkpoint": [*MINE, f"resume=theirs/{CHECKPOINT}", "folder=mine", "fit.epochs=1"],
    "hosts": [*MINE, "hosts", "folder=theirs"],
    "report": [*MINE, "report", "folder=theirs"],
    "a sweep": [*MINE, "-m", "fit.seed=1,2", "folder=theirs", "fit.epochs=1"],
}
COMMANDS["resume with a seed"] = ["resume=theirs", "fit.epochs=3", "callbacks.csv=log.csv"]


def _cases() -> Iterator[tuple[str, str, Any, str]]:
    """Yield a place, what is there, its content or what makes it, and a command; each command in turn."""
    commands = itertools.cycle(COMMANDS)
    for place in PLACES:
        for kind, make in KINDS.items():
            yield place, kind, make, next(commands)
    for places, contents in ((OF_YAML, YAML), (OF_JSON, JSON)):
        for place in places:
            for name, content in contents.items():
                yield place, name, content, next(commands)


CASES = list(_cases())


def _snapshot(folder: Path) -> dict[str, Any]:
    """Return what a folder has, without following links."""
    found = {}
    for at, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(at, name)
            status = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
            found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of someone else, and data."""
    place = tmp_path_factory.mktemp("template")
    random, before = np.random.default_rng(0), os.getcwd()
    x = random.standard_normal((40, 4)).astype(np.float32)
    np.savez(place / "train.npz", x=x, target=np.arange(40) % 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.setenv("GRAPHOPT_NATIVE", "false")
        os.chdir(place)
        try:
            options = ["folder=theirs", "fit.epochs=2", "fit.checkpoint.every=2 steps", "quiet=true"]
            assert cli.main([*MINE, *options]) == 0
        finally:
            os.chdir(before)
    assert (place / "theirs" / CHECKPOINT).is_dir()
    (place / "theirs/result.json").write_text('{"value": 1.0}')
    return place


@pytest.fixture
def canary(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that no command may touch, beside the folder of work with the run of someone else."""
    place = tmp_path / "canary"
    (place / "project").mkdir(parents=True)
    (place / "bashrc").write_text("# precious\n")
    (place / "project/config.yaml").write_text("my: project\n")
    (place / "link").symlink_to("bashrc")
    shutil.copytree(template / "theirs" / CHECKPOINT, place / "project/step-00000001")
    (tmp_path / "work").mkdir()
    shutil.copytree(template / "theirs", tmp_path / "work/theirs")
    shutil.copy(template / "train.npz", tmp_path / "work/train.npz")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return place


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    """End a test that hangs."""

    def called(*_: Any) -> None:
        raise TimeoutError("the command hangs")

    before = signal.signal(signal.SIGALRM, called)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _end(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the command, and return its exit code and error, which is one line."""
    capfd.readouterr()
    code = cli.main([*arguments, "quiet=true"])
    said = capfd.readouterr()
    lines = [x for x in said.err.splitlines() if x and not x.startswith(("graphopt: warning: ", "Error executing"))]
    assert len(lines) == (code != 0), said.err
    assert all(x.startswith("graphopt: error: ") for x in lines), said.err
    assert (said.out + said.err).replace("\n", "").isprintable()
    return code, "".join(lines)


def _name(case: tuple[str, str, Any, str]) -> str:
    return f"{case[0]} is {case[1]}, {case[3]}"


@pytest.mark.sample(40)
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_hostile_folder_is_harmless(
    case: tuple[str, str, Any, str], canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, _, content, command = case
    at = _at(Path("theirs", place))
    if isinstance(content, bytes):
        at.write_bytes(content)
    else:
        content(at, canary)
    before = _snapshot(canary)
    code, _ = _end(COMMANDS[command], capfd)
    assert _snapshot(canary) == before
    assert not Path("pwned").exists()
    if not isinstance(content, bytes) and command != "a checkpoint":
        assert code == 1


@pytest.mark.parametrize("place", ["graphopt.log", ".lock", "checkpoints", ".hydra", "multirun.yaml", "0"])
@pytest.mark.parametrize("kind", ["a link to a file", "a link to a folder", "a hard link", "a pipe"])
@pytest.mark.slow
def test_a_new_run_does_not_follow_what_is_in_its_folder(
    place: str, kind: str, canary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where there is no run, links that a run would follow are refused."""
    KINDS[kind](_at(Path("new", place)), canary)
    before = _snapshot(canary)
    code, said = _end([*MINE, "folder=new", "fit.epochs=1"], capfd)
    assert (code, _snapshot(canary)) == (1, before)
    assert f"new/{place}: expected only folders and files with one name" in said


def test_links_of_a_project_stay(canary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("new").mkdir()
    Path("new/data").symlink_to(canary)
    for arguments in (
        [*MINE, "fit.epochs=1", "folder=new"],
        ["resume=new", "fit.epochs=2"],
        ["evaluate", "folder=new"],
    ):
        assert _end(arguments, capfd)[0] == 0
    Path("link").symlink_to("new")  # which the user names
    assert _end(["evaluate", "folder=link"], capfd)[0] == 0


@pytest.mark.parametrize("copied", [True, False])
def test_a_signature_elsewhere_signs_nothing(copied: bool, canary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The record of one's own run, as a link in the run of someone else, is not followed."""
    assert _end([*MINE, "fit.epochs=1", "folder=own"], capfd)[0] == 0
    shutil.rmtree("theirs/.hydra")
    if copied:
        os.mkdir("theirs/.hydra")
        for name in os.listdir("own/.hydra"):
            os.link(f"own/.hydra/{name}", f"theirs/.hydra/{name}")
    else:
        Path("theirs/.hydra").symlink_to(Path("own/.hydra").resolve())
    code, said = _end(["evaluate", "folder=theirs"], capfd)
    assert code == 1 and "expected only folders and files with one name" in said


EVIL = "\ntouch pwned #\x1b[31m\x9b31m\u202e\u2028\r"


@pytest.mark.slow
def test_a_name_is_one_line_of_a_log_and_of_a_terminal(canary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in ("theirs/config.yaml", "theirs/.hydra/config.yaml"):
        config = yaml.safe_load(Path(path).read_text())
        config["pipeline"] = {EVIL: {"_target_": "passes.Normalize"}, **config["pipeline"]}
        Path(path).write_text(yaml.safe_dump(config, sort_keys=False))
    count = Path("theirs/graphopt.log").read_text(encoding="utf-8").count("\n")
    assert _end(["resume=theirs", "fit.epochs=3"], capfd)[0] == 0
    lines = Path("theirs/graphopt.log").read_text(encoding="utf-8").split("\n")
    assert len(lines) > count + 1
    assert all(line.isprintable() and (not line or line.startswith("[")) for line in lines)


@pytest.mark.parametrize("watched", [True, False])
def test_what_is_printed_has_no_control_characters(
    watched: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    if watched:
        monkeypatch.setenv("FORCE_COLOR", "1")
    console = open_console()
    say(console, EVIL, EVIL)
    console.print(EVIL)
    console.print(Table(EVIL, title=EVIL))
    print_table(console, [EVIL, "b"], [[EVIL, EVIL]], title=EVIL)
    print_matrix(console, EVIL, [EVIL, "b"], [[1, 2], [3, 4]])
    warn(EVIL)
    complain(OSError(1, EVIL, EVIL))
    said = capfd.readouterr()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said.out) if watched else said.out
    assert "touch pwned" in plain and plain.replace("\n", "").isprintable()
    assert said.err.replace("\n", "").isprintable() and said.err.count("\n") == 2
    assert "\x1b[31m" not in said.out


def test_the_recipe_that_is_shown_has_no_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    for option in (["--cfg", "job"], ["--cfg", "all"], ["--help"], ["--info", "config"]):
        assert cli.main([*option, "model='a\u202e\x9b31m'"]) == 0
        assert capfd.readouterr().out.replace("\n", "").isprintable()


def test_a_folder_that_is_deep_or_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path
    for _ in range(40):
        place = place / "a"
    place.mkdir(parents=True)
    with pytest.raises(GraphoptError, match="at most 32 levels"):
        check_folder(tmp_path)
    monkeypatch.setattr("graphopt.files._MOST_ENTRIES", 10)
    with pytest.raises(GraphoptError, match="at most 10 files"):
        check_folder(tmp_path)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a device"])
def test_files_are_read_and_written_without_links(kind: str, canary: Path) -> None:
    place = Path("place")
    KINDS[kind](place, canary)
    before = _snapshot(canary)
    if kind != "a hard link":
        assert read_regular(place) is None
    with pytest.raises(OSError, match="place"):
        open_to_append(place)
    if place.is_symlink():
        with pytest.raises(GraphoptError):
            write_folder(".", {"place/a": b"a"})
    assert _snapshot(canary) == before


@pytest.mark.parametrize("name", JSON)
def test_json_of_others_is_plain_or_refused_in_one_line(name: str) -> None:
    if name in ("no number", "texts", "true", "a number", "a list", "null", "an exponent"):
        repr(json_of(JSON[name], "file")).encode()
    else:
        with pytest.raises(GraphoptError, match=r"^file: ") as caught:
            json_of(JSON[name], "file")
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", ["a pipe", "a socket", "a device"])
def test_a_checkpoint_that_is_no_file_is_refused(kind: str, canary: Path) -> None:
    KINDS[kind](Path("state.safetensors"), canary)
    with pytest.raises(GraphoptError, match="expected a file, found a device or a pipe"):
        load_state("state.safetensors")


@pytest.mark.parametrize("text", ["[1]", "9" * 500, _deep("[", "]", 200), '{"a": "\\ud800"}', "{"])
def test_properties_of_a_checkpoint_are_plain(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphopt.runtime.checkpoint.json.dumps", lambda *_, **__: text)
    save_state({"a": np.zeros(3)}, tmp_path / "a", {})
    with pytest.raises(GraphoptError):
        load_state(tmp_path / "a")


def test_the_key_that_signs_runs_is_the_user_s(canary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [*MINE, "fit.epochs=1"]
    assert _end([*arguments, "folder=a"], capfd)[0] == 0
    key = cache_folder("runs") / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.chmod(0o644)  # as older versions left it
    assert _end([*arguments, "folder=b"], capfd)[0] == 0
    assert key.stat().st_mode & 0o777 == 0o600


FORMULAS = ["=cmd|' /C calc'!A0", "+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "plain", "a=b"]


def test_predictions_are_no_formulas(tmp_path: Path) -> None:
    """Spreadsheets compute cells that begin so (OWASP, CSV injection); numbers stay numbers."""
    numbers = np.linspace(-1, 1, len(FORMULAS))
    write_rows(tmp_path / "a.csv", {"=y": numbers, "label": np.array(FORMULAS)}, {})
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["'=y", "label"] and [float(row[0]) for row in rows] == pytest.approx(numbers)
    assert [row[1] for row in rows] == [*(f"'{x}" for x in FORMULAS[:6]), *FORMULAS[6:]]


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"},
    **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")),
    "added_tokens": [],
}
PANICS: dict[str, dict[str, Any]] = {
    "chunks of 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a table that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
    "a table with a wild index": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
    "merges without a token": {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}},
    "a template without its token": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("case", PANICS)
@pytest.mark.slow
def test_a_tokenizer_that_panics_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**TOKENIZER, **PANICS[case]}))
    with pytest.raises(GraphoptError, match=r"tokenizer\.json: expected a tokenizer"):
        Tokenizer(path)


@pytest.mark.slow
def test_files_beside_a_tokenizer_are_plain(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    for text in ('{"eos_token": "\\ud800"}', '{"eos_token": %s}' % (401 * "9"), _deep("[", "]", 2000)):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(GraphoptError, match=r"tokenizer_config\.json: "):
            Tokenizer(tmp_path)


@pytest.mark.slow
def test_marks_in_marks_leave_nothing_in_a_chat(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "chat_template.jinja").write_text(
        "a{% generation %}b{% generation %}c{% endgeneration %}d{% endgeneration %}e"
        "{% generation %}f{% endgeneration %}"
    )
    template = ChatTemplate(Tokenizer(tmp_path))
    chat = {"messages": [{"role": "user", "content": "x"}]}
    assert template.render([(1, chat)], finds_answers=True) == (["abcdef"], [[(1, 4), (5, 6)]])


def test_folders_of_several_levels_are_made_from_above(tmp_path: Path) -> None:
    names = [f"{'/'.join('abcdefgh'[:depth])}/file" for depth in range(1, 9)]
    write_folder(tmp_path / "made", dict.fromkeys(names, b"content"))
    assert all((tmp_path / "made" / name).read_bytes() == b"content" for name in names)
