"""The Java of a host folder trains as graphopt's executor does, notices wrong kernels, and goes on from checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree

import android_declarations
import numpy as np
import onnxruntime
import planted_faults
import pytest
import safetensors.numpy
from host_graphs import (
    ADAPTER_FILES,
    ADAPTERS,
    BAD,
    BAD_AT,
    GRAPHS,
    MORE,
    Batch,
    adapted,
    batches,
    same_adapters,
    with_bad_batches,
)
from test_proofs import DAMAGES, C, damaged

import graphopt

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "graphopt" / "hosts" / "java"
PROGRAMS = ROOT / "examples" / "hosts" / "java" / "test"
ANDROID = ROOT / "examples" / "hosts" / "android"
JAR = Path(os.environ.get("ONNXRUNTIME_JAR", PROGRAMS / "onnxruntime.jar"))  # com.microsoft.onnxruntime:onnxruntime
LIBRARIES = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))  # of Python's ONNX Runtime
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("plain"),
    pytest.mark.skipif(
        not JAR.exists() or not LIBRARIES or not all(map(shutil.which, ("java", "javac", "gcc"))),
        reason="needs a JDK, gcc, ONNX Runtime's library, and its jar at the path in ONNXRUNTIME_JAR",
    ),
]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classes")
    java = ["javac", "-Werror", "-Xlint:all,-options", "-cp", f"{JAR}{os.pathsep}{folder}", "-d", str(folder)]
    sources = [*SOURCE.glob("graphopt/*.java"), ANDROID / "app/src/main/java/graphopt/phone/Classifier.java"]
    subprocess.run([*java, "--release", "8", *sources], check=True)
    subprocess.run([*java, *PROGRAMS.glob("*.java")], check=True)
    bridge(folder / "native")
    return folder


def bridge(folder: Path, version_told: str = onnxruntime.__version__, runtime: Path | None = None) -> None:
    """Write the bindings of the jar to a folder, and a library by which they run on Python's ONNX Runtime."""
    folder.mkdir()
    place = f"ai/onnxruntime/native/linux-{'aarch64' if platform.machine() == 'aarch64' else 'x64'}"
    with zipfile.ZipFile(JAR) as jar:
        bindings = jar.read(f"{place}/libonnxruntime4j_jni.so")
    (version,) = {*re.findall(rb"VERS_([\d.]+)", bindings)}
    told = b"\0%s\0" % version_told.encode()[: len(version)]  # bindings tell the version of their header
    assert len(told) == len(version) + 2, (
        f"expected a version as long as {version.decode()}: the library's bytes would move"
    )
    (folder / "libonnxruntime4j_jni.so").write_bytes(bindings.replace(b"\0%s\0" % version, told))
    (folder / "versions").write_bytes(b"VERS_%s { global: *; };" % version)
    linked = f"-Wl,-soname,libonnxruntime.so.{version.decode()},--version-script={folder / 'versions'}"
    library = [
        "-shared",
        "-fPIC",
        f'-DLIBRARY="{runtime or LIBRARIES[0]}"',
        linked,
        "-o",
        folder / "libonnxruntime.so",
        "-ldl",
    ]
    subprocess.run(["gcc", PROGRAMS / "bridge.c", *library], check=True)


def java(
    classes: Path, program: str, *arguments: object, native: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    locale = ["-Duser.language=ar", "-Duser.country=EG"]  # whose digits are not those of files and messages
    options = ["-XX:TieredStopAtLevel=1", *locale, f"-Donnxruntime.native.path={native or classes / 'native'}"]
    command = ["java", *options, "-cp", f"{JAR}{os.pathsep}{classes}", program, *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)


def train(classes: Path, folder: Path, state: Path | None, fed: Sequence[Batch], saved: Path) -> list[float]:
    """Return the losses of a run of the program, and after them that of the last batch in evaluation."""
    raw = saved.with_suffix("")
    raw.mkdir()
    for name in fed[0]:
        np.stack([batch[name] for batch in fed]).tofile(raw / f"{name}.bin")
    feeds = [f"{name}={x.dtype}" for name, x in fed[0].items()]
    done = java(classes, "graphopt.Train", folder, raw, len(fed), saved, state or "-", *feeds)
    assert not done.returncode, done.stderr
    said[saved] = done.stderr.splitlines()
    return [float(line) for line in done.stdout.splitlines()]


said: dict[Path, list[str]] = {}  # by the file that a run wrote


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", [*GRAPHS, *MORE])
def test_java_trains_as_python_does(name: str, classes: Path, tmp_path: Path) -> None:
    step, fed = {**GRAPHS, **MORE}[name][0](), batches(name, 20)
    graphopt.export_hosts(step, tmp_path / "host")
    found = train(classes, tmp_path / "host", None, fed, tmp_path / "saved.safetensors")
    has_proof = (tmp_path / "host" / "proof.safetensors").exists()  # of random numbers and classes, not always
    told = "proven" if has_proof else "not proven: the folder has no proof"
    assert said[tmp_path / "saved.safetensors"] == [f"train: {told}"] and (
        has_proof or name in ("unsure", "derivatives")
    )
    executor = graphopt.Executor(step)
    expected = [float(executor.step(batch)["loss"]) for batch in fed]
    expected.append(float(executor.evaluate(fed[-1])["loss"]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "adapter"])
def test_checkpoints_resume_bit_for_bit(name: str, classes: Path, tmp_path: Path) -> None:
    """And Python goes on from them, and Java from Python's."""
    step, fed = GRAPHS[name][0](), batches(name, 20)
    graphopt.export_hosts(step, tmp_path / "host")
    whole, first, second, third = (tmp_path / f"{n}.safetensors" for n in "0123")
    losses = train(classes, tmp_path / "host", None, fed, whole)
    assert train(classes, tmp_path / "host", None, fed[:10], first)[:-1] == losses[:10]
    assert train(classes, tmp_path / "host", first, fed[10:], second) == losses[10:]
    assert second.read_bytes() == whole.read_bytes()
    executor = graphopt.Executor(step, threads=1)
    executor.load(first)
    for batch, loss in zip(fed[10:15], losses[10:15], strict=True):
        np.testing.assert_allclose(executor.step(batch)["loss"], loss, rtol=1e-5)
    executor.save(third, checksum=False)
    np.testing.assert_allclose(
        train(classes, tmp_path / "host", third, fed[15:], tmp_path / "4.safetensors"), losses[15:], rtol=1e-5
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", planted_faults.NETWORKS)
def test_java_notices_a_wrong_kernel_and_takes_the_next_provider(name: str, classes: Path, tmp_path: Path) -> None:
    faults = planted_faults.written(name, tmp_path)
    assert faults
    lines = java(classes, "Check", "faults", tmp_path, len(faults)).stdout.splitlines()
    for fault, alone, before in zip(faults, lines[::2], lines[1::2], strict=True):
        assert alone.startswith("error\tONNX Runtime 1."), alone
        assert "train.onnx: output " in alone and alone.endswith(f", first in node {fault}"), (fault, alone)
        provider, proofs, told = before.split("\t")
        assert (provider, proofs) == ("cpu", "{evaluate=proven, predict=proven, train=proven}")
        assert told.startswith("[faulty: ") and told.endswith(f", first in node {fault}: cpu computes it]"), told


@pytest.mark.parametrize(("version", "is_off"), [("1.18.1", True), ("1.19.0", False)])
def test_java_switches_plans_of_memory_off_where_they_overlap(
    version: str, is_off: bool, classes: Path, tmp_path: Path
) -> None:
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    shim, native = tmp_path / "faulty.so", tmp_path / "native"
    abi = SOURCE.parent / "c" / "abi"
    command = ["gcc", "-shared", "-fPIC", f"-I{abi}", f'-DLIBRARY="{LIBRARIES[0]}"', C / "faulty.c", "-o", shim, "-ldl"]
    subprocess.run(command, check=True)
    bridge(native, version, shim)
    done = java(classes, "Check", "open", tmp_path / "cache", tmp_path / "host", native=native, VERSION=version)
    opened, *told = sorted(done.stdout.splitlines(), key=lambda line: line.startswith("0"))
    assert opened == "cpu\t{evaluate=proven, predict=proven, train=proven}\t[]", done
    assert ({"0\tmemory patterns off"} == {*told}) == is_off, done


def test_the_proof_is_remembered_by_all_files(classes: Path, tmp_path: Path) -> None:
    folder, copy = tmp_path / "host", tmp_path / "copy"
    graphopt.export_hosts(GRAPHS["adapter"][0](), folder)
    shutil.copytree(folder, copy)
    weights = bytearray((copy / "weights.bin").read_bytes())
    weights[-1] ^= 1  # the lowest bit of an exponent, or a sign
    (copy / "weights.bin").write_bytes(weights)
    lines = java(classes, "Check", "open", tmp_path / "cache", folder, folder, copy).stdout.splitlines()
    known = [line.split("\t")[1] for line in lines]
    assert known[:2] == [f"{{evaluate={x}, predict={x}, train={x}}}" for x in ("proven", "proven before")]
    assert "before" not in known[2]
    notes = sorted((tmp_path / "cache").iterdir())
    assert {note.name.rpartition("-")[0] for note in notes} == {f"proof-{x}" for x in ("evaluate", "predict", "train")}
    for note in notes:
        note.write_bytes(note.read_bytes()[:-1])
    (line,) = java(classes, "Check", "open", tmp_path / "cache", folder).stdout.splitlines()
    assert "before" not in line, line


def test_a_cache_that_cannot_be_written_to_does_not_matter(classes: Path, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "below", "/proc/none"):
        done = java(classes, "Check", "open", cache, tmp_path / "host", tmp_path / "host")
        assert done.stdout.splitlines() == ["cpu\t{evaluate=proven, predict=proven, train=proven}\t[]"] * 2, done


def test_the_program_reads_other_types_and_refuses_what_it_cannot_read(classes: Path, tmp_path: Path) -> None:
    step, fed = GRAPHS["mlp"][0](), batches("mlp", 3)
    graphopt.export_hosts(step, tmp_path / "host")
    expected = train(classes, tmp_path / "host", None, fed, tmp_path / "1.safetensors")
    wide = [{"x": batch["x"].astype(np.float64), "target": batch["target"].astype(np.int32)} for batch in fed]
    assert train(classes, tmp_path / "host", None, wide, tmp_path / "2.safetensors") == expected
    for feeds, told in (
        (("x=uint8",), "x: expected float32, float64, int32 or int64, found uint8"),
        (("x",), "x: expected float32, float64, int32 or int64, found none"),
        (("x=float32", "target=int33"), "target: expected float32, float64, int32 or int64, found int33"),
        (("none=float32",), f"{tmp_path}/1/none.bin: expected a file, found none"),
    ):
        done = java(classes, "graphopt.Train", tmp_path / "host", tmp_path / "1", 3, tmp_path / "saved", "-", *feeds)
        assert (done.returncode, done.stderr) == (1, f"train: {told}\n")
    done = java(classes, "graphopt.Train", tmp_path / "host", tmp_path / "1", 7, tmp_path / "saved", "-", "x=float32")
    assert done.stderr.startswith("train: x.bin: expected as many numbers in each of 7 steps, found"), done
    assert not (tmp_path / "saved").exists()


def test_rates_and_checkpoints_of_another_graph_are_refused(classes: Path, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    own = safetensors.numpy.load_file(tmp_path / "host" / "state.safetensors")
    name = next(name for name, x in own.items() if x.ndim == 2 and x.shape[0] != x.shape[1])
    rows, columns = own[name].shape
    paths = [tmp_path / file for file in ("own", "turned", "more")]
    for path, state in zip(paths, (own, {**own, name: own[name].T.copy()}, {**own, "more": own[name]}), strict=True):
        safetensors.numpy.save_file(state, path)
    done = java(classes, "Check", "load", tmp_path / "host", *paths)
    remedy = "take a checkpoint of this training graph"
    rate = "hyperparameter learning_rate: expected a finite number, 0 or more, found"
    assert done.stdout.splitlines() == [
        *(f"{rate} {x}" for x in ("NaN", "-1.0", "1.0E300")),
        "taken",
        "taken",
        f"{paths[1]}: state {name}: expected F32 [{rows}, {columns}], found F32 [{columns}, {rows}]: {remedy}",
        f"{paths[2]}: state more: expected none of this name, found one: {remedy}",
    ], done


def test_a_damaged_proof_is_no_proof(classes: Path, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["mlp"][0](), tmp_path / "host")
    folders = [tmp_path / kind for kind in DAMAGES]
    for folder in folders:
        shutil.copytree(tmp_path / "host", folder)
        proof = folder / "proof.safetensors"
        proof.write_bytes(damaged(proof.read_bytes(), folder.name))
    done = java(classes, "Check", "open", tmp_path / "cache", *folders)
    for kind, line in zip(DAMAGES, done.stdout.splitlines(), strict=True):
        told = r"error\tONNX Runtime .* of the proof" if kind == "NaN" else ".*train=not proven: "
        assert re.match(told, line), (kind, line)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_does_not_spoil_the_state(name: str, classes: Path, tmp_path: Path) -> None:
    step, fed = BAD[name][0](), with_bad_batches(name)
    good = [batch for i, batch in enumerate(fed) if i not in BAD_AT]
    graphopt.export_hosts(step, tmp_path / "host")
    with_bad, without = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    found = train(classes, tmp_path / "host", None, fed, with_bad)
    expected = train(classes, tmp_path / "host", None, good, without)
    assert [loss for i, loss in enumerate(found) if i not in BAD_AT] == expected
    assert with_bad.read_bytes() == without.read_bytes()
    assert sum("expected a finite loss and state" in line for line in said[with_bad]) == len(BAD_AT)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_files_are_those_of_python(name: str, classes: Path, tmp_path: Path) -> None:
    step, batch, forms = adapted(name)
    graphopt.export_hosts(step, tmp_path / "host")
    executor = graphopt.Executor(step, threads=1)
    executor.run([batch] * 5)
    executor.save(tmp_path / "state.safetensors", checksum=False)
    for form, files in ADAPTER_FILES.items():
        found, expected = tmp_path / f"{form} found", tmp_path / f"{form} expected"
        found.mkdir()
        expected.mkdir()
        done = java(classes, "Check", "adapter", tmp_path / "host", tmp_path / "state.safetensors", form, found)
        assert not done.returncode, done.stderr
        if form not in forms:
            assert f"expected the form {form} in host.json, found none" in done.stdout
            continue
        graphopt.save_adapter(executor, expected / files[0] if form == "onnxruntime" else expected, form=form)  # type: ignore[arg-type]
        assert sorted(x.name for x in found.iterdir()) == files, done.stdout
        for file in files:
            if form == "onnxruntime" and "dora" in name:
                same_adapters(found / file, expected / file)
            else:
                assert (found / file).read_bytes() == (expected / file).read_bytes(), file


def test_every_mistake_is_told_in_one_line(classes: Path, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["mlp"][0](), tmp_path)
    done = java(classes, "Check", "mistakes", tmp_path)
    assert done.stdout.splitlines() == [
        "taken",
        "x: expected float32 [batch, 8], found 25 numbers: feed whole rows",
        "target: expected int64 [2], found 3 numbers: feed whole rows",
        "target: expected labels 0 to 3, found 4",
        "target: expected a whole number of int64, found 0.5",
        "x: expected float32 [batch, 8], found String: feed numbers, or an OnnxTensor",
        "x: expected float32 [batch, 8], found 0 numbers: feed numbers, or an OnnxTensor",
        "train: expected target, found none: feed it",
        "hyperparameter learning_rat: expected one of host.json, found none of this name",
        f"{tmp_path}: expected a checkpoint, found none",
        "trainer: expected an open one, found one that is closed: open the folder again",
    ], done


def test_the_app_for_phones_learns_digits(classes: Path, tmp_path: Path) -> None:
    """Its head and its adapter learn digits, of which the network knew 8, and Python goes on from the checkpoint."""
    spec = importlib.util.spec_from_file_location("export", ANDROID / "export.py")
    assert spec is not None and spec.loader is not None
    export = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(export)
    export.main(tmp_path, epochs=2)
    rows = graphopt.data.digits().arrays
    x = (rows["x"] * (255 / rows["x"].max())).astype(np.uint32)
    (0xFF000000 + x * 0x010101).astype(np.uint32).tofile(tmp_path / "pixels")
    rows["target"].astype(np.int64).tofile(tmp_path / "labels")
    for name, least in (("head", 0.8), ("adapter", 0.8)):
        saved = tmp_path / f"{name}.safetensors"
        done = java(classes, "Phone", tmp_path / name, tmp_path / "pixels", tmp_path / "labels", 4, saved)
        assert not done.returncode and "{train=proven, evaluate=proven, predict=proven}" in done.stderr, done
        (first, _), *_, (last, accuracy) = (map(float, line.split()) for line in done.stdout.splitlines())
        assert last < first and accuracy > least, done
        names = saved.with_name(f"{saved.name}.txt").read_text().splitlines()
        assert names == [f"class {k}" for k in dict.fromkeys(rows["target"].tolist())]
    done = java(classes, "Check", "classes", tmp_path / "head", tmp_path / "again")
    names = f"{tmp_path}/again.txt: expected names of 1 to 10 classes, found"
    assert done.stdout.splitlines() == [
        "save: expected a class, found none: add pictures",
        "class: expected a name, found none: write one",
        "taken",
        "train: expected pictures of two classes, found [a b]: add them",
        "taken",
        "taken",
        "[a b, c]",
        f"{names} []: delete it",
        f"{names} []: delete it",
        f"{names} [{', '.join('a' * 11)}]: delete it",
    ], done


def test_the_app_compiles_and_its_resources_are_there(classes: Path, tmp_path: Path) -> None:
    """Against declarations of Android's classes; the app itself is not built here."""
    app = ANDROID / "app" / "src" / "main"
    strings = [x.attrib["name"] for x in ElementTree.parse(app / "res/values/strings.xml").getroot()]
    declared = android_declarations.write(tmp_path, strings)
    activity = app / "java/graphopt/phone/MainActivity.java"
    path = f"{JAR}{os.pathsep}{classes}"
    command = [
        "javac",
        "-Werror",
        "-Xlint:all,-options",
        "--release",
        "8",
        "-cp",
        path,
        "-d",
        str(tmp_path / "classes"),
    ]
    subprocess.run([*command, *declared, activity], check=True)
    manifest = ElementTree.parse(app / "AndroidManifest.xml").getroot()
    space = "{http://schemas.android.com/apk/res/android}"
    (named,) = (x.attrib[f"{space}name"] for x in manifest.iter("activity"))
    assert (tmp_path / "classes" / f"{named.replace('.', '/')}.class").exists()
    assert not [*manifest.iter("uses-permission")]
    (sources,) = re.findall(r"main.java.srcDir '(.*)'", (ANDROID / "app/build.gradle").read_text())
    assert (ANDROID / "app" / sources).resolve() == SOURCE


def _with_graphs(content: bytes) -> bytes:
    return json.dumps({**json.loads(content), "graphs": 5}).encode()


DAMAGED: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("host.json", lambda x: b"<!doctype html>", "expected JSON, found other text"),
    ("host.json", lambda x: x.replace(b'"version": 1', b'"version": 2'), "expected graphopt.host version 1"),
    ("host.json", lambda x: b"[" * 100_000, "expected JSON, found other text"),
    ("host.json", lambda x: re.sub(rb'("onnxruntime": )"[^"]*"', rb'\1"1.99"', x), "expected 1.99 or later"),
    ("host.json", lambda x: x.replace(b'"train.onnx"', b'"../train.onnx"'), "expected the name of a file"),
    ("host.json", _with_graphs, "expected graphs"),
    ("state.safetensors", lambda x: x[:-4], "expected the numbers of"),
    ("state.safetensors", lambda x: b"abc", "expected a safetensors file"),
    ("state.safetensors", lambda x: (2**63 - 1).to_bytes(8, "little") + x[8:], "expected a safetensors file"),
]


def test_a_damaged_folder_is_refused_in_one_line(classes: Path, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    folders = [tmp_path / str(i) for i in range(len(DAMAGED))]
    for folder, (name, change, _) in zip(folders, DAMAGED, strict=True):
        shutil.copytree(tmp_path / "host", folder)
        (folder / name).write_bytes(change((folder / name).read_bytes()))
    done = java(classes, "Check", "open", tmp_path / "cache", *folders)
    for (_, _, told), line in zip(DAMAGED, done.stdout.splitlines(), strict=True):
        assert line.startswith("error\t") and told in line, line
