"""Steps lowered to the machine: the same training, chosen by measuring, and a plain step wherever that cannot be."""

from __future__ import annotations

import ast
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import messages
import numpy as np
import onnx
import pytest
import torch
from builders import attention, linear, mlp, model

import graphopt
import passes
from graphopt import models
from graphopt.graph.classified import LABELS
from graphopt.graph.loading import load
from graphopt.graph.model_folders import Architecture
from graphopt.graph.storage import Content
from graphopt.runtime.session import Session
from graphopt.targets.native import cache as cached
from graphopt.targets.native import lowering, toolchain
from graphopt.targets.native.cache import SUM, read_cached, write_cached
from graphopt.targets.native.library import source
from graphopt.targets.native.lowering import KERNEL_KINDS, lower_to_kernels, plan
from graphopt.targets.target import TARGETS
from graphopt.testing import strict

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")


def step_of(proto=None, **steps):
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.AdamW(0.01), **steps}
    return graphopt.compile(mlp((4, 64, 3)) if proto is None else proto, **steps)


def batches(count=6, rows=8, shape=(4,), out=(3,)):
    return [
        {
            "x": RNG.standard_normal((rows, *shape)).astype(np.float32),
            "target": RNG.standard_normal((rows, *out)).astype(np.float32),
        }
        for _ in range(count)
    ]


STEPS = {
    "adamw": ({}, {}),
    "clip": ({"clip": passes.ClipGlobalNorm(0.5), "schedule": passes.Cosine(steps=9, warmup=2)}, {}),
    "momentum": (
        {"optimizer": passes.SGD(0.1, momentum=0.9), "regularizer": passes.ElasticPenalty(1e-3)},
        {},
    ),
    "rmsprop": ({"optimizer": passes.RMSprop(0.01)}, {}),
    "accumulated": ({"accumulate": passes.Accumulate(2)}, {}),
    "static": ({}, {"static_shapes": True}),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_a_lowered_step_trains_as_the_plain_one(name, threads):
    steps, options = STEPS[name]
    step, data = step_of(**steps), batches()
    plain = graphopt.Executor(step, threads=threads, native=False, **options)
    lowered = graphopt.Executor(step, threads=threads, native=True, **options)
    for batch in data:
        expected, found = plain.step(batch), lowered.step(batch)
        for output, value in expected.items():
            np.testing.assert_allclose(found[output], value, rtol=1e-5, atol=1e-6)
    for key, value in plain.state.items():
        np.testing.assert_allclose(lowered.state[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_attention_and_layer_normalization():
    step, data = step_of(attention()), batches(shape=(6, 4), out=(6, 4))
    losses = [[x["loss"] for x in map(graphopt.Executor(step, native=native).step, data)] for native in (False, True)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


OPTIMIZERS = {
    "sgd": (passes.SGD(0.1), lambda weights: torch.optim.SGD(weights, 0.1)),
    "momentum": (passes.SGD(0.1, momentum=0.9), lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9)),
    "adamw": (
        passes.AdamW(0.01, weight_decay=0.1),
        lambda weights: torch.optim.AdamW(weights, 0.01, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.slow
def test_large_arrays_train_as_in_pytorch(optimizer, norm):
    """Loops over weights, activations and gradients have blocks; PyTorch trains in float64."""
    sizes, (ours, theirs) = (300, 700, 500, 10), OPTIMIZERS[optimizer]
    clip = passes.ClipGlobalNorm(norm) if norm else None
    step = step_of(mlp(sizes), optimizer=ours, clip=clip)
    executor = graphopt.Executor(step, native=True, threads=2, matmul_precision="highest")
    start = executor.parameters
    weights = {name: torch.tensor(x, dtype=torch.float64) for name, x in start.items()}
    reference = theirs([x.requires_grad_() for x in weights.values()])
    for batch in batches(5, rows=300, shape=(300,), out=(10,)):
        x, target = (torch.tensor(x, dtype=torch.float64) for x in (batch["x"], batch["target"]))
        for i in range(3):
            x = torch.nn.functional.linear(x, weights[f"fc{i}.weight"], weights[f"fc{i}.bias"])
            x = x.tanh() if i < 2 else x
        loss = torch.nn.functional.mse_loss(x, target)
        reference.zero_grad()
        loss.backward()
        if norm:
            assert torch.nn.utils.clip_grad_norm_(weights.values(), norm) > norm
        reference.step()
        assert executor.step(batch)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, x in executor.parameters.items():
        expected = weights[name].detach().numpy()
        change = np.sqrt(np.mean(np.square(expected - start[name])))  # a number that is left out is as far off
        np.testing.assert_allclose(x, expected, rtol=0, atol=0.02 * change, err_msg=name)


def test_several_steps_in_a_call_are_lowered_too():
    step, data = step_of(), batches(8)
    losses = [
        [x["loss"] for x in graphopt.Executor(step, native=native, steps_per_call=4).run(data)]
        for native in (False, True)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_the_state_of_a_lowered_step_continues_in_a_plain_one(tmp_path):
    step, data = step_of(), batches(8)
    first = graphopt.Executor(step, native=True)
    first.run(data[:4])
    first.save(tmp_path / "state")
    then, once = graphopt.Executor(step, native=False), graphopt.Executor(step, native=False)
    then.load(tmp_path / "state")
    then.run(data[4:])
    once.run(data)
    for name, value in once.state.items():
        np.testing.assert_allclose(then.state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_threads():
    step, data = step_of(mlp((4, 300, 3))), batches(rows=500)
    states = []
    for threads in (1, 2):
        executor = graphopt.Executor(step, threads=threads, native=True)
        executor.run(data)
        states.append(executor.state)
    for name, value in states[0].items():
        np.testing.assert_allclose(states[1][name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_auto_lowers_large_models_and_remembers_which_form_is_faster(cache):
    graphopt.Executor(step_of(), native="auto").run(batches(2))
    assert not cache.exists()  # small: nothing was compiled
    step = step_of(mlp((4, 200, 60, 3)))
    for _ in range(2):
        graphopt.Executor(step, native="auto").run(batches(2))
        (noted,) = cache.glob("*.time.json")
        assert json.loads(noted.read_text())["seconds"].keys() == {"kernels", "runtime"}
        assert len([*cache.glob("*.so")]) == 1


@pytest.mark.slow
def test_a_deterministic_executor_measures_nothing(cache, parts):
    executor = graphopt.Executor(step_of(mlp((4, 200, 60, 3))), native="auto", deterministic=True)
    executor.run(batches(2))
    assert [*cache.glob("*.so")]
    assert not [*cache.glob("*.time.json")]


@pytest.mark.slow
def test_a_library_is_compiled_once(cache, parts, monkeypatch):
    model = load(step_of())
    first = lower_to_kernels(model).library
    monkeypatch.setattr(toolchain, "_run", lambda *_, **__: pytest.fail("compiled again"))
    assert lower_to_kernels(model).library == first
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


def test_what_only_describes_a_model_lowers_and_checks_nothing_anew(cache, parts):
    """The name of the base in a folder of PEFT, and those of classes, are in no key of the cache."""
    step, files = step_of(), []
    for base in ("mine", "other/base"):
        described = Architecture(base=base).write(load(step))
        LABELS.write(described, f'["a", "b", "{base}"]')
        executor = graphopt.Executor(described, native=True)
        with strict(False):
            executor.step(batches(1)[0])
        assert Architecture.read(executor.model).base == base
        files.append({*cache.parent.rglob("*")})
    assert not [path.name for path in files[1] - files[0]]


@pytest.mark.slow
def test_models_of_other_sizes_have_the_same_kernels(cache, parts, monkeypatch):
    """Only the table of kernels is compiled and linked for the second model."""
    lower_to_kernels(load(step_of(mlp((4, 200, 60, 3)))))
    before, run, commands = {*cache.glob("*.o")}, toolchain._run, []
    monkeypatch.setattr(toolchain, "_run", lambda *each: commands.append(each) or run(*each))
    step = step_of(mlp((5, 90, 70, 3)))
    lower_to_kernels(load(step))
    assert {*cache.glob("*.o")} == before
    assert len(commands) <= 1
    x, target = np.ones((2, 5), np.float32), np.zeros((2, 3), np.float32)
    losses = [graphopt.Executor(step, native=native).step(x=x, target=target)["loss"] for native in (False, True)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def piped(path):
    path.unlink()
    os.mkfifo(path)


def linked(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def emptied(path):
    path.unlink()
    path.mkdir()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return a cache folder with what lowering a step writes."""
    base = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base))
        lower_to_kernels(load(step_of()))
    return base / "graphopt" / "native"


@pytest.mark.parametrize("damage", [Path.unlink, cut, flipped, piped, linked, emptied])
@pytest.mark.parametrize("suffix", ["onnx", "json", "so", "o", "so.sum", "json.sum"])
@pytest.mark.sample(9)
@pytest.mark.slow
def test_a_damaged_or_missing_file_of_the_cache_is_written_again(cache, filled, suffix, damage):
    shutil.copytree(filled, cache)
    model = load(step_of())
    first = lower_to_kernels(model)
    damaged, *_ = sorted(cache.glob(f"*.{suffix}"))
    before = read_cached(damaged.name.removesuffix(SUM))
    damage(damaged)
    if suffix == "o":
        first.library.unlink()
    again = lower_to_kernels(model)
    assert again.library == first.library
    assert read_cached(damaged.name.removesuffix(SUM)) == before
    assert [str(node) for node in again.model.graph] == [str(node) for node in first.model.graph]


def test_what_is_kept_is_on_the_disk_first(cache, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda handle: flushed.append(os.fstat(handle).st_size))
    assert write_cached("x.so", b"four").read_bytes() == b"four"
    assert flushed == [4, len((cache / "x.so.sum").read_bytes())]


def test_what_was_used_longest_ago_leaves_a_full_cache(cache, monkeypatch):
    monkeypatch.setattr(cached, "MOST_BYTES", 1000)
    names, day = ["a.so", "b.onnx", "c.o", "new.so"], 24 * 60 * 60
    for name in [*names, "measured-rates.json"]:
        write_cached(name, bytes(600))
    for name in ("killed", "work"):
        (cache / name / "objects").mkdir(parents=True)
    ages = {"a.so": 2, "b.onnx": 3, "c.o": 4, "work": 5, "killed": 8, "measured-rates.json": 9}
    for name, age in ages.items():
        os.utime(cache / name, (0, time.time() - age * day))
    assert read_cached("c.o") == bytes(600)  # the oldest, until it is used again
    cached.trim()
    assert {path.name for path in cache.iterdir()} == {
        "a.so",
        "a.so.sum",
        "c.o",
        "c.o.sum",
        "measured-rates.json",
        "measured-rates.json.sum",
        "new.so",
        "new.so.sum",
        "work",
    }


def test_what_another_process_takes_while_a_full_cache_is_trimmed_stays(cache, monkeypatch):
    monkeypatch.setattr(cached, "MOST_BYTES", 1000)
    for age, name in enumerate(["a.so", "b.so"], start=2):
        write_cached(name, bytes(600))
        os.utime(cache / name, (0, time.time() - age * 24 * 60 * 60))

    def taken(files):
        assert read_cached("b.so") == bytes(600)
        return sorted(files)

    monkeypatch.setattr(cached, "sorted", taken, raising=False)
    cached.trim()
    assert {path.name for path in cache.iterdir()} == {"a.so", "a.so.sum", "b.so", "b.so.sum"}


@pytest.mark.slow
def test_a_damaged_library_does_not_switch_kernels_off(cache, parts):
    step = step_of(mlp((4, 200, 60, 3)))
    lower_to_kernels(load(step)).library.write_bytes(b"damaged")
    assert graphopt.Executor(step, native=True).step(batches(1)[0])["loss"] > 0


def test_if_a_library_does_not_load_the_plain_step_runs(cache, monkeypatch):
    def compiled(command, folder):
        Path(command[command.index("-o") + 1]).write_bytes(b"damaged")
        return 0, ""

    step = step_of(mlp((4, 200, 60, 3)))
    monkeypatch.setattr(toolchain, "_run", compiled)
    with pytest.warns(UserWarning, match="Failed to load library .*; steps run without kernels of their own"):
        executor = graphopt.Executor(step, native="auto")
    assert executor.step(batches(1)[0])["loss"] > 0
    with pytest.raises(graphopt.GraphoptError, match="Failed to load library"):
        graphopt.Executor(step, native=True)


PACKAGE = Path(graphopt.__file__).parent


def imported(path):
    """Return the files of graphopt that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            first, *rest = name.split(".")
            for file in (PACKAGE.joinpath(*rest).with_suffix(".py"), PACKAGE.joinpath(*rest, "__init__.py")):
                if first == "graphopt" and rest and file.exists():
                    yield file


def test_the_digest_covers_all_that_lowering_imports():
    reached, waiting = set(), [Path(lowering.__file__)]
    while waiting:
        path = waiting.pop()
        reached.add(path)
        waiting += [each for each in imported(path) if each not in reached]
    assert {path.parent.name for path in reached} >= {"graph", "native", "graphopt"}
    assert reached <= set(cached.sources())


@pytest.mark.slow
def test_any_change_of_the_code_or_of_the_environment_changes_the_digest(cache, tmp_path, monkeypatch):
    model = load(step_of())

    def digest():
        for function in (cached.own_version, toolchain._environment):
            function.cache_clear()
        with strict(False):  # what the cache keeps is a stand-in
            return lowering.lower_to_kernels(model, threads=2).digest

    monkeypatch.setattr(lowering, "_kept", lambda digest, _: lowering.Lowered(model, Path(), None, [], digest))
    copies = {path: tmp_path / f"{i}.py" for i, path in enumerate(cached.sources())}
    for path, copy in copies.items():
        shutil.copy(path, copy)
    shutil.copytree(toolchain.FOLDER, tmp_path / "c")
    monkeypatch.setattr(cached, "sources", lambda: [*copies.values()])
    monkeypatch.setattr(toolchain, "FOLDER", tmp_path / "c")
    digests = [digest()]
    for path in [*copies.values(), *(tmp_path / "c").iterdir()]:
        path.write_text(path.read_text() + " ")
        digests.append(digest())
    version = cached.metadata.version
    for package in ("graphopt", "onnx", "onnx_ir", "onnxscript", "numpy"):
        with monkeypatch.context() as patch:
            patch.setattr(cached.metadata, "version", lambda name, of=package: version(name) + "+" * (name == of))
            digests.append(digest())
    for name, value in (("FLAGS", ("-O1",)), ("processor", lambda: "a processor")):
        with monkeypatch.context() as patch:
            patch.setattr(toolchain, name, value)
            digests.append(digest())
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "compiler", lambda: (sys.executable,))
        digests.append(digest())
    assert digest() == digests[-9]
    assert len({*digests}) == len(digests)
    toolchain._environment.cache_clear()
    cached.own_version.cache_clear()


# --- The compiler ---


def compiler_of(monkeypatch, program, **limits):
    monkeypatch.setattr(toolchain, "compiler", lambda: (sys.executable, "-c", program))
    for name, value in limits.items():
        monkeypatch.setattr(toolchain, name, value)


@pytest.mark.slow
def test_a_compiler_that_takes_too_long_is_ended(cache, monkeypatch):
    compiler_of(monkeypatch, "import sys, time; '--version' in sys.argv or time.sleep(60)", _SECONDS=1)
    with pytest.raises(graphopt.GraphoptError, match="compile the kernels in 1 seconds, found that it takes longer"):
        lower_to_kernels(load(step_of()))
    assert not [*cache.glob("*.so")]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no such limit")
def test_a_compiler_that_takes_too_much_memory_fails(cache, monkeypatch):
    compiler_of(monkeypatch, "import sys; '--version' in sys.argv or bytes(2**30)", BYTES=2**29)
    with pytest.raises(graphopt.GraphoptError, match=r"does not compile the kernels: .*MemoryError"):
        lower_to_kernels(load(step_of()))


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.slow
def test_a_compiler_does_not_outlive_a_killed_process(tmp_path):
    """Neither does what the compiler starts."""
    mark = tmp_path / "alive"
    inner = f"import time, pathlib\nwhile True: pathlib.Path({str(mark)!r}).touch(); time.sleep(0.05)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    program = f"""import sys, pathlib
from graphopt.targets.native.toolchain import _run
_run([sys.executable, "-c", {outer!r}], pathlib.Path({str(tmp_path)!r}))"""
    process = subprocess.Popen([sys.executable, "-c", program])
    while not mark.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    time.sleep(0.5)
    mark.unlink()
    time.sleep(0.5)
    assert not mark.exists()


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_to_forgets(cache, parts, monkeypatch):
    step, full = step_of(mlp((4, 200, 60, 3))), OSError("No space left on device")

    def fail(*_):
        raise full

    monkeypatch.setattr("graphopt.runtime.checks.verdicts.write", fail)
    assert graphopt.Executor(step, native="auto").step(batches(1)[0])["loss"] > 0
    monkeypatch.setattr("graphopt.targets.native.lowering.write_cached", fail)
    for path in cache.glob("*.onnx"):
        path.unlink()
    with pytest.warns(UserWarning, match="expected a cache folder to write to, found none: No space left"):
        graphopt.Executor(step, native="auto")


def test_the_environment_lowers_nothing_for_other_providers(cache, monkeypatch):
    monkeypatch.setenv("GRAPHOPT_NATIVE", "true")
    monkeypatch.setattr(graphopt.Device, "on_cpu", False)
    assert graphopt.Executor(step_of()).step(batches(1)[0])["loss"] > 0
    assert not cache.exists()


@pytest.mark.slow
def test_frozen_weights_are_not_in_the_cache(cache, parts):
    step = step_of(mlp((4, 400, 3)), parameters=passes.Parameters(freeze="fc1.weight"))
    x, target = batches(1)[0].values()
    losses = [graphopt.Executor(step, native=native).step(x=x, target=target)["loss"] for native in (False, True, True)]
    np.testing.assert_allclose(losses[1:], losses[0], rtol=1e-5)
    (kept,) = cache.glob("*.onnx")
    weight = graphopt.load(step).graph.initializers["fc1.weight"].const_value.tobytes()
    assert weight not in kept.read_bytes()


@pytest.mark.slow
def test_processes_may_compile_at_once(cache, parts, tmp_path):
    graphopt.save(step_of(), tmp_path / "step.onnx")
    code = "import graphopt, sys; graphopt.Executor(sys.argv[1], native=True); print('opened')"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parents[1])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "step.onnx")], env=environment, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    assert [process.communicate()[0].strip() for process in started] == [b"opened"] * 2
    files = {path.name for path in cache.iterdir()}
    sums = {name for name in files if name.endswith(".sum")}
    assert {f"{name}.sum" for name in files - sums} == sums
    assert sorted({Path(name).suffix for name in files - sums}) == [".json", ".o", ".onnx", ".so"]


def test_without_a_compiler_the_plain_step_runs(monkeypatch):
    monkeypatch.setattr(toolchain, "compiler", lambda: None)
    step = step_of(mlp((4, 201, 60, 3)))
    with pytest.warns(UserWarning, match="expected a C compiler, found none: .* pip install ziglang"):
        executor = graphopt.Executor(step, native="auto")
    assert executor.step(batches(1)[0])["loss"] > 0
    with pytest.raises(graphopt.GraphoptError, match="native: expected a C compiler, found none"):
        graphopt.Executor(step, native=True)


@pytest.mark.slow
def test_if_the_compiler_fails_the_plain_step_runs(cache, monkeypatch):
    monkeypatch.setattr(toolchain, "compiler", lambda: (sys.executable, "-c", "raise SystemExit('error: no C')"))
    with pytest.warns(UserWarning, match="does not compile the kernels: error: no C"):
        executor = graphopt.Executor(step_of(mlp((4, 200, 60, 3))), native="auto")
    assert executor.step(batches(1)[0])["loss"] > 0
    assert not [*cache.glob("*.so")]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_a_cache_that_others_may_write_to_is_refused(cache):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(graphopt.GraphoptError, match="expected a folder that only you can write to: chmod 700"):
        graphopt.Executor(step_of(), native=True)


def test_generated_code_has_no_name_of_the_model():
    proto = mlp((4, 64, 3))
    for node in proto.graph.node:
        node.name = '*/ #include "/etc/passwd"'
    renamed = {"fc0.weight": 'w"; system("rm"); //', "h0": "\n#error secret\n"}
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for weight in proto.graph.initializer:
        weight.name = renamed.get(weight.name, weight.name)
    lowered = plan(load(step_of(proto)))
    text = source(lowered.kernels, threads=1)
    assert not any(word in text for word in ("system", "secret", "passwd", "fc1", "bias"))


def test_auto_leaves_numbers_of_16_bits_to_the_runtime(cache):
    """Whether float16 overflows depends on which results are rounded, and must not depend on a measurement."""
    steps = {"precision": passes.MixedPrecision(), "gradient": passes.Gradient(loss_scale=2.0**15)}
    step = step_of(mlp((4, 200, 60, 3)), **steps, loss_scale=passes.DynamicLossScale())
    executor = graphopt.Executor(step, native="auto", deterministic=True)
    assert executor.step(batches(1)[0])["loss"] > 0
    assert not cache.exists()


def test_the_environment_sets_the_default(monkeypatch):
    step = step_of()
    for word, expected in (("true", True), ("FALSE", False), ("auto", "auto")):
        monkeypatch.setenv("GRAPHOPT_NATIVE", word)
        assert graphopt.Device("cpu").native == expected
        assert graphopt.Device("cpu", native=False).native is False
    monkeypatch.setenv("GRAPHOPT_NATIVE", "yes")
    with pytest.raises(graphopt.GraphoptError, match="GRAPHOPT_NATIVE: expected auto, true or false, found 'yes'"):
        graphopt.Executor(step)


@pytest.mark.parametrize("call", messages.calls("native_mistakes"))
def test_wrong_options(call: str) -> None:
    messages.refused("native_mistakes", call, globals())


def test_lowerings_can_be_left_out(cache):
    assert lower_to_kernels(load(step_of()), KERNEL_KINDS) is None
    assert not cache.exists()


@pytest.mark.slow
def test_targets_are_listed_and_run():
    step, batch = step_of(), batches(1)[0]
    mine = graphopt.Target("mine", graphopt.Pipeline(fuse=passes.Fuse(leave_out=["column_sums_as_product"])))
    losses = [
        graphopt.Executor(step, target=target, verify=True).step(batch)["loss"]
        for target in ("plain", "onnxruntime", "native", "portable", mine)
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    lowered = graphopt.lower(step, "native")
    assert "ai.graphopt" in {node.domain for node in lowered.graph}
    assert [list(TARGETS[name].pipeline) for name in ("plain", "onnxruntime", "native", "webgpu")] == [
        [],
        ["fuse"],
        ["kernels"],
        ["fuse", "forms"],
    ]


def test_headers_are_part_of_the_package():
    for name in toolchain.HEADERS:
        assert (toolchain.FOLDER / name).exists()


@pytest.mark.slow
def test_a_lowered_step_notices_a_state_that_is_not_finite():
    """The gradient overflows in the square of Adam's second moment, though the loss is finite."""
    step = step_of(linear(4, 3), optimizer=passes.Adam(0.1))
    assert lower_to_kernels(load(step)).check
    x, target = batches(1)[0].values()
    for native in (False, True):
        executor = graphopt.Executor(step, native=native)
        before = executor.state
        with pytest.raises(graphopt.NonFiniteLoss, match="finite numbers in state"):
            executor.step(x=x * 1e12, target=target)
        for name, value in executor.state.items():
            np.testing.assert_array_equal(value, before[name])
        executor.step(x=x, target=target)


def test_what_is_read_by_others_too_stays_joined():
    proto = model(
        """g (float[2] a, float[3] b, float s) => (float[2] u, float[3] v, float[5] w) {
            j = Concat<axis=0>(a, b)  k = Mul(j, s)  l = Exp(k)  m = Neg(k)  w = Tanh(m)
            u, v = Split<axis=0>(l, sizes) }""",
        sizes=np.array([2, 3]),
    )
    proto = onnx.shape_inference.infer_shapes(proto)
    feeds = {"a": np.ones(2, np.float32), "b": np.arange(3, dtype=np.float32), "s": np.array(0.5, np.float32)}
    device, lowered = graphopt.Device("cpu"), lower_to_kernels(load(proto))
    expected = Session(device, load(proto)).compute_arrays(feeds)
    found = Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6)


def test_a_value_that_may_be_fed_is_no_constant():
    step = load(step_of())  # with initial values of its state and of the learning rate
    reads = {x.name for node in plan(step).model.graph for x in node.inputs}
    assert {"learning_rate", "step"} <= reads


@pytest.mark.parametrize("optimizer", [passes.SGD(0.1), passes.Adam(0.01)], ids=["SGD", "Adam"])
def test_a_step_and_its_file_are_lowered_to_the_same_kernels(optimizer, tmp_path):
    """A file has numbers of attributes in float32, such as those of the mask of a Relu."""
    step = graphopt.load(graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=optimizer))
    graphopt.save(step, tmp_path / "step.onnx")
    lowered = [TARGETS["native"].pipeline.rewrite(x) for x in (step.clone(), graphopt.load(tmp_path / "step.onnx"))]
    one, other = map(Content.of, lowered)
    assert one == other
