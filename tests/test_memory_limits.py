"""A step fits into the memory that it may take, or is refused; checks run where there is memory, and say if not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from builders import model

import graphopt
import passes
from graphopt import models
from graphopt.graph.memory import estimate
from graphopt.runtime import fitting, frozen, runners, system_memory, translation
from graphopt.runtime.checks import first_check
from graphopt.runtime.checks.rows import ROWS, ROWS_OF_TOKENS, TOKENS, TOKENS_OF_A_KIND, some_tokens
from graphopt.runtime.checks.slopes import Slope
from graphopt.runtime.device import Device
from graphopt.runtime.evaluation import ChosenEvaluation
from graphopt.runtime.frozen import placement_by_size
from graphopt.runtime.session import Session
from graphopt.runtime.system_memory import available, bytes_of_size, taken

RNG = np.random.default_rng(0)
X = RNG.integers(0, 16, (8, 12))
FEEDS = {"x": X, "target": X}


def compiled(**steps):
    network = models.transformer((12,), 16, width=16, heads=2, layers=3)
    chosen = {"loss": passes.CrossEntropy(axis=-1), "optimizer": passes.SGD(0.05), **steps}
    return graphopt.compile(network, **chosen)


def losses(step, count=3, feeds=FEEDS, **options):
    executor = graphopt.Executor(step, threads=1, native=False, **options)
    return [executor.step(feeds)["loss"] for _ in range(count)], executor


@pytest.fixture
def nothing_held(monkeypatch):
    monkeypatch.setattr(runners, "taken", lambda: 0)


# The option `memory`.


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2 GB", 2 * 10**9),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("512 MiB", 2**29),
        ("100 kB", 10**5),
        ("1 KiB", 1024),
    ],
)
def test_sizes_have_a_unit(text, size):
    assert bytes_of_size(text) == size


@pytest.mark.parametrize(
    "text", ["2  GB", "2 gb", "2 G", "-1 GB", "0 MB", "1e3 GB", " 2 GB", "2 GB\n", "٢ GB", "9" * 40 + " GB"]
)
def test_other_sizes_are_refused_before_a_step(text):
    with pytest.raises(graphopt.GraphoptError, match=r"^memory: expected a positive number with a unit, [^\n]*$"):
        graphopt.Executor(compiled(), memory=text)


def test_a_step_that_fits_is_as_it_was(nothing_held):
    step = compiled()
    (found, fits), (expected, plain) = losses(step, memory="1 GB"), losses(step, static_shapes=True)
    assert found == expected
    assert len(fits._steps.runner.forms[0].model.graph) == len(plain._steps.runner.forms[0].model.graph)
    assert fits.frozen == "low"


def test_a_step_that_does_not_fit_recomputes_and_computes_the_same(nothing_held):
    step = compiled()
    expected, plain = losses(step, static_shapes=True)
    whole = estimate(plain._steps.runner.forms[0].model, {}).step
    found, fits = losses(step, memory=f"{1.15 * whole / 1000:.1f} kB")
    assert found == pytest.approx(expected, rel=1e-6)
    run = fits._steps.runner.forms[0].model
    assert (1 + fitting.RESERVED) * estimate(run, {}).step <= 1.15 * whole
    assert len(run.graph) > len(plain._steps.runner.forms[0].model.graph)


def test_a_step_that_cannot_fit_is_refused_with_the_least_that_would_do(nothing_held):
    step = compiled()
    with pytest.raises(
        graphopt.GraphoptError,
        match=r"^memory='1 kB': expected room [^\n]*: give memory='(\d+) MB', or [^\n]*$",
    ) as error:
        losses(step, memory="1 kB")
    least = str(error.value).partition("give memory='")[2].partition("'")[0]
    assert losses(step, memory=least)[0] == pytest.approx(losses(step)[0], rel=1e-6)


def test_what_the_process_holds_counts_once_for_all_shapes(monkeypatch):
    held = iter([10**9])
    monkeypatch.setattr(runners, "taken", lambda: next(held))
    _, executor = losses(compiled(), memory="2 GB")
    executor.step(x=X[:5], target=X[:5])
    monkeypatch.setattr(runners, "taken", lambda: 2 * 10**9)
    with pytest.raises(graphopt.GraphoptError, match=r"found that it takes 20"):
        losses(compiled(), memory="2 GB")


@pytest.mark.parametrize("options", [{"in_place": True}, {"device": "cuda"}])
def test_options_that_take_more_memory_are_refused(options):
    with pytest.raises(graphopt.GraphoptError):
        graphopt.Executor(compiled(), memory="2 GB", **options)


# Where frozen weights lie.


def test_a_step_with_large_frozen_weights_has_no_copies_of_them(monkeypatch):
    step = compiled(adapter=passes.LoRA())
    size = frozen.frozen_bytes(step)
    assert placement_by_size(step) == "packed"
    monkeypatch.setattr(frozen, "_LOW_STEP_FROM", size)
    expected = losses(step, frozen="packed")[0]
    found, executor = losses(step)
    assert executor.frozen == "low"
    assert found == pytest.approx(expected, rel=1e-5)
    assert placement_by_size(step) == "low"
    assert placement_by_size(step, on_cpu=False) == "packed"
    assert isinstance(executor._evaluations._open("predict"), ChosenEvaluation)  # of packed weights


# The first check on some tokens.

TEXT = "g (int64[N,S] x) => (float[N,S,7] y) { e = Gather(table, x) y = MatMul(e, m) }"


def language_model():
    proto = model(TEXT, table=RNG.standard_normal((300, 6)), m=RNG.standard_normal((6, 7)))
    return graphopt.load(
        graphopt.compile(proto, loss=passes.CrossEntropy(axis=-1, ignore_index=-100), optimizer=passes.SGD(0.1))
    )


def batch_of(rows, tokens):
    return {"x": RNG.integers(0, 300, (rows, tokens)), "target": RNG.integers(0, 7, (rows, tokens))}


def test_some_tokens_are_those_of_a_batch():
    step, batch = language_model(), batch_of(6, 200)
    few = some_tokens(step, batch)
    assert {x.shape for x in few.values()} == {(ROWS_OF_TOKENS, TOKENS)}
    np.testing.assert_array_equal(few["x"][:, :-1], batch["x"][:ROWS_OF_TOKENS, : TOKENS - 1])
    assert some_tokens(step, batch_of(ROWS_OF_TOKENS, TOKENS)) is None


def test_an_ignored_token_is_among_some_tokens_wherever_it_is():
    step, batch = language_model(), batch_of(6, 200)
    batch["target"][4, 150] = -100
    few = some_tokens(step, batch)
    assert {x.shape for x in few.values()} == {(ROWS_OF_TOKENS + 1, TOKENS + 1)}
    assert few["target"][-1, -1] == -100
    assert (few["target"] == -100).sum() == 1


def test_labels_after_a_long_prompt_are_among_some_tokens():
    step, batch = language_model(), batch_of(1, 200)
    batch["target"][:, :120] = -100
    few = some_tokens(step, batch)
    assert few["target"].shape == (1, TOKENS + TOKENS_OF_A_KIND)
    np.testing.assert_array_equal(few["target"][0, TOKENS:], batch["target"][0, 120:][:TOKENS_OF_A_KIND])


def test_numbers_repeat_in_some_tokens_if_they_do_in_all():
    step = language_model()
    batch = {"x": np.r_[0:200, 199][None], "target": np.zeros((1, 201), np.int64)}
    few = some_tokens(step, batch)["x"]
    assert np.unique(few).size < few.size
    batch = {"x": np.arange(200)[None], "target": np.zeros((1, 200), np.int64)}
    few = some_tokens(step, batch)["x"]
    assert np.unique(few).size == few.size


def test_a_mark_stays_where_a_number_is_repeated():
    """The last token of a part that has none twice, as its batch has, becomes the first one, unless it has a mark."""
    batch = {"x": np.r_[0:200, 199][None], "target": np.r_[0:200, 199][None]}
    batch["target"][0, 150] = -100
    few = some_tokens(language_model(), batch)
    assert (few["target"] == -100).any()
    assert np.unique(few["target"]).size < few["target"].size


@pytest.mark.parametrize("text", [TEXT.replace("S]", "200]"), TEXT.replace("int64[N,S]", "int64[S,S]")])
def test_a_graph_that_is_not_open_is_checked_on_all_tokens(text):
    step = graphopt.compile(
        model(text, table=np.ones((300, 6)), m=np.ones((6, 7))),
        loss=passes.CrossEntropy(axis=-1),
        optimizer=passes.SGD(0.1),
    )
    assert some_tokens(graphopt.load(step), batch_of(200, 200)) is None


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_mistake_is_seen_on_some_tokens(factor, monkeypatch, cache):
    sizes, opened = [], first_check._Step.__init__

    def init(self, device, step, state, batch, is_full):
        sizes.append(batch["x"].shape)
        opened(self, device, step, state, batch, is_full)

    monkeypatch.setattr(first_check._Step, "__init__", init)
    step = language_model()
    if factor != 1.0:
        from planted_mistakes import edited, times

        edited(m=times(factor))(step)
    executor = graphopt.Executor(step, frozen="low", native=False, threads=1)
    if factor == 1.0:
        executor.step(batch_of(2, 200))
        assert sizes == [(2, TOKENS)]
        return
    with pytest.raises(graphopt.GraphoptError, match=r"^parameter .m.: expected a gradient with the slope"):
        executor.step(batch_of(2, 200))
    assert sizes == [(2, TOKENS), (2, 200)]


def test_what_stays_open_on_some_tokens_is_not_repeated_on_all(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sizes, opened = [], first_check._Step.__init__

    def init(self, device, step, state, batch, is_full):
        sizes.append(batch["x"].shape)
        opened(self, device, step, state, batch, is_full)

    monkeypatch.setattr(first_check._Step, "__init__", init)
    open_slope = lambda *_: Slope(1.0, 1.0, 1.0, "not checked")  # noqa: E731
    monkeypatch.setattr(first_check, "slope_along", open_slope)
    monkeypatch.setattr(first_check, "agree_at_once", lambda *_: None)
    graphopt.Executor(language_model(), frozen="low", native=False, threads=1).step(batch_of(2, 200))
    assert sizes == [(2, TOKENS)]


def test_a_form_is_compared_on_some_tokens_where_memory_is_low(monkeypatch):
    sizes, run = [], translation.Translation._run

    def compared(self, form, source, feeds, state):
        sizes.append(feeds["x"].shape)
        return run(self, form, source, feeds, state)

    monkeypatch.setattr(translation.Translation, "_run", compared)
    step, batch = language_model(), batch_of(2, 200)
    found, expected = (
        graphopt.Executor(step, frozen="low", native=False, threads=1, verify=verify) for verify in (True, False)
    )
    for _ in range(2):
        assert found.step(batch)["loss"] == pytest.approx(expected.step(batch)["loss"], rel=1e-6)
    assert sizes == [(2, TOKENS)]


def test_no_value_lives_for_its_shape_where_memory_is_low(tmp_path):
    """By default, the runtime may run Shape just before what reads it: of a step, in the backward pass."""
    nodes = "a = Exp(x) s = Shape(a) z = Cast<to = 1>(s) b = Tanh(a) y = Tanh(b)"
    device = Device("cpu", threads=1)
    options = device.new_session_options(low_memory=True, optimized=False)
    options.enable_profiling, options.profile_file_prefix = True, str(tmp_path / "profile")
    graph = ir.from_proto(model(f"g (float[N,2] x) => (float[N,2] y, float[2] z) {{ {nodes} }}"))
    session = Session(device, graph, options)
    session.compute_arrays({"x": np.zeros((3, 2), np.float32)})
    events = json.loads(Path(session.ort.end_profiling()).read_text())
    ran = [x["args"]["op_name"] for x in events if x["name"].endswith("_kernel_time")]
    assert ran == ["Exp", "Shape", "Cast", "Tanh", "Tanh"]


# Where there is no memory.


def test_a_check_on_the_whole_batch_is_left_out_without_memory(monkeypatch, cache):
    monkeypatch.setattr(system_memory, "available", lambda: 1000)
    step = graphopt.load(compiled())
    executor = graphopt.Executor(step, frozen="low", native=False, verify="first")
    for _ in range(2):  # nothing is remembered
        check = first_check.FirstCheck(executor._device, executor._model, executor._parts.buffers)
        with pytest.warns(UserWarning, match=r"^the first check: a step on the whole batch needs about"):
            check.check({"x": X[:ROWS], "target": X[:ROWS]})


def test_a_comparison_is_left_out_without_memory_and_says_so(monkeypatch, cache):
    grown = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(translation, "taken", lambda: next(grown))
    monkeypatch.setattr(system_memory, "available", lambda: 10**8)
    text = "the comparison with the plain step needs about 1,000 MB of memory, and 100 are left"
    executor = graphopt.Executor(compiled(), native=False, threads=1)
    with pytest.warns(UserWarning, match=text):
        executor.step(FEEDS)
    with pytest.raises(graphopt.GraphoptError, match=text):
        graphopt.Executor(compiled(), native=False, threads=1, verify=True).step(FEEDS)


@pytest.mark.parametrize(
    ("groups", "limit", "used", "stat"),
    [
        ("0::/a/b\n", "memory.max", "memory.current", "inactive_file 100\n"),
        (
            "4:memory:/a/b\n0::/\n",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file 100\n",
        ),
    ],
)
def test_control_groups_limit_what_is_available(monkeypatch, tmp_path, groups, limit, used, stat):
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    own = root / ("memory" if "memory" in groups else "") / "a" / "b"
    own.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    (proc / "meminfo").write_text("MemTotal:  9 kB\nMemAvailable:   5 kB\n")
    monkeypatch.setattr(system_memory, "_PROC", proc)
    monkeypatch.setattr(system_memory, "_GROUPS", root)
    assert available() == 5 * 1024
    (own / limit).write_text("max\n")
    assert available() == 5 * 1024
    for folder, most in ((own.parent, 2000), (own, 3000)):
        (folder / limit).write_text(f"{most}\n")
        (folder / used).write_text("1000\n")
        (folder / "memory.stat").write_text(f"cache 1\n{stat}")
    assert available() == 2000 - 1000 + 100


def test_without_linux_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(system_memory, "_PROC", tmp_path)
    assert available() == float("inf")
    assert taken() == 0
    system_memory.give_back()
