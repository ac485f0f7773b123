"""The first step is checked against the file, against slopes of the loss and against formulas, and sees mistakes."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest
from builders import attention, mlp, model
from planted_mistakes import (
    BEYOND,
    MISTAKES,
    NETWORKS,
    SGD,
    Planted,
    batch_for,
    edited,
    images,
    layers,
    times,
    tokens,
)
from steps import assert_equal, outputs
from test_local_sgd import together

import graphopt
import passes
from graphopt import cli, models
from graphopt.graph import provenance
from graphopt.graph.roles import FED, Role, with_role
from graphopt.runtime.checks import first_check, updates, verdicts
from graphopt.runtime.checks.findings import CheckTable, Disagreement, Finding
from graphopt.runtime.checks.first_check import FirstCheck
from graphopt.runtime.checks.forward import forward_of
from graphopt.runtime.checks.rows import ROWS, some_rows
from graphopt.runtime.checks.slopes import DOUBLE, SINGLE, Question, agree_at_once, slope_along
from passes.gradients.registry import RULES, SURROGATES

RNG = np.random.default_rng(0)
MEAN = passes.MeanSquaredError()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Give each test a cache of its own, which has checked nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("GRAPHOPT_VERIFY", raising=False)
    return tmp_path / "cache" / "graphopt" / "steps"


@pytest.fixture
def rules():
    """Put the rules of gradients back after a test."""
    before, surrogates = dict(RULES), set(SURROGATES)
    yield
    RULES.clear()
    RULES.update(before)
    SURROGATES.clear()
    SURROGATES.update(surrogates)


def compiled(proto=None, **steps):
    return graphopt.compile(proto or layers(), **{"loss": MEAN, "optimizer": passes.SGD(0.1), **steps})


def table_of(proto, batch, verify="first", **steps) -> CheckTable:
    step = compiled(proto, **steps)
    types = {x.name: x.dtype.numpy() for x in step.graph.inputs}
    return graphopt.check(step, {name: x.astype(types[name]) for name, x in batch.items()}, verify=verify)


def reasons(table: CheckTable) -> set[str]:
    return {x.reason for x in table.findings if x.verdict == "not checked"}


@pytest.fixture(params=["all", "some"])
def numbers(request, monkeypatch):
    """Check updates on all numbers of the parameters, and on some, as those of large ones."""
    if request.param == "some":
        monkeypatch.setattr(first_check, "MANY", 0)
        monkeypatch.setattr(updates, "UPDATE_SAMPLE", 4)


# Mistakes.


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_planted_mistake_is_noticed(mistake):
    told = mistake.noticed()
    assert told.startswith("output" if mistake.part == "file" else "parameter"), told
    assert "please report it with the files in" in told


def test_a_mistake_in_one_of_many_parameters_names_it(numbers):
    """A difference along one direction of 51 parameters is halved down to the parameter."""
    told = [x.noticed() for x in MISTAKES if "of 51 parameters" in x.name]
    assert [re.match(r"parameter '(\w+)'", text)[1] for text in told] == ["b7", "k9"]


@pytest.mark.parametrize("mistake", BEYOND, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_what_is_smaller_than_rounding_is_seen_by_the_full_check_of_one_parameter_at_most(mistake):
    assert not mistake.noticed()
    assert mistake.noticed("full").startswith("parameter 'k9'") == ("too long" in mistake.name)


LEVELS = [  # a network, a parameter, the factor of its gradient, and which levels see it
    ("layers", "w1", 1.01, ["first", "full"]),
    ("layers", "b0", 1.01, ["first", "full"]),
    ("layers", "w1", 1.005, ["full"]),
    *(("deep", "k9", factor, ["first", "full"]) for factor in (1.2, 1.25, 1.3, 1.35)),
    ("images", "k0", 1.1, ["full"]),
    ("deep", "k9", 1.05, ["full"]),
]


@pytest.mark.parametrize(("network", "name", "factor", "seen"), LEVELS)
def test_what_each_level_sees(network, name, factor, seen):
    """Convolutions are computed in float32, products of matrices in float64."""
    mistake = Planted("too long", "gradient", network, edit=edited(**{name: times(factor)}))
    assert [level for level in ("first", "full") if mistake.noticed(level)] == seen


def test_sixty_mistakes_are_planted():
    assert len(MISTAKES) >= 60
    assert {mistake.part for mistake in MISTAKES} == {"file", "gradient", "update"}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_networks_of_the_mistakes_agree_without_them(name):
    table = table_of(NETWORKS[name](), batch_for(name), verify="full")
    assert {x.verdict for x in table.findings} == {"agrees"}, str(table)
    assert {x.part for x in table.findings} == {"file", "gradient", "update"}


def test_a_disagreement_names_the_parameter_both_numbers_and_a_reproducer(cache):
    mistake = next(x for x in MISTAKES if x.name == "a weight's gradient twice")
    with pytest.raises(
        Disagreement,
        match=r"^parameter 'w2': expected a gradient with the slope (\S+) .* found (\S+): [^\n]*$",
    ) as error:
        mistake.executor().step(batch_for("layers"))
    expected, found = map(float, re.search(r"slope (\S+) of .*, found (\S+):", str(error.value)).groups())
    assert found == pytest.approx(2 * expected, rel=1e-3)
    (folder,) = cache.glob("difference-*")
    assert str(folder) in str(error.value)
    assert {path.name for path in folder.iterdir()} == {"plain.onnx", "inputs.npz", "difference.json"}
    assert np.isfinite(outputs(folder / "plain.onnx", np.load(folder / "inputs.npz"))["loss"])


def test_nothing_trains_before_a_disagreement():
    mistake = next(x for x in MISTAKES if x.name == "Relu's sign")
    executor = mistake.executor()
    before = executor.state
    for _ in range(2):  # the second time, the machine remembers
        with pytest.raises(Disagreement):
            executor.step(batch_for("layers"))
    assert_equal(executor.state, before)


def test_several_steps_per_call_are_checked_before_the_first():
    mistake = next(x for x in MISTAKES if x.name == "Relu's sign")
    executor = mistake.executor()
    with pytest.raises(Disagreement):
        executor.run([batch_for("layers")] * 4)
    assert executor.batches == 0


def test_a_gradient_of_zeros_is_seen():
    """The slope along a gradient does not see entries of it that are lost."""
    mistakes = [x for x in MISTAKES if "zeros in" in x.name or "lost" in x.name or "third" in x.name]
    assert len(mistakes) == 3
    assert all(mistake.noticed() for mistake in mistakes)


# No false alarms.

OPTIMIZERS = [
    passes.SGD(0.1),
    passes.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    passes.SGD(0.1, momentum=0.9, dampening=0.5, rate_in_velocity=True),
    passes.Adam(1e-3, weight_decay=0.1),
    passes.AdamW(1e-2, groups=(passes.Group("b*", weight_decay=0.0, learning_rate=3.0),)),
    passes.AdamW(1e-2, groups=(passes.Group("b*", optimizer=passes.SGD(0.1)),)),
    passes.LAMB(1e-2, weight_decay=0.1),
    passes.Adagrad(0.1),
    passes.RMSprop(0.1, momentum=0.9, centered=True),
    passes.Lion(1e-3, weight_decay=0.1),
    passes.ScheduleFreeAdamW(1e-2, weight_decay=0.1, weight_power=1.0),
    passes.Muon(0.02, groups=(passes.Group("w0", learning_rate=2.0),)),
    passes.Muon(0.02, nesterov=False, adjust="match_rms_adamw", others=passes.SGD(0.1, momentum=0.5)),
    passes.Adafactor(weight_decay=0.1),
    passes.Adafactor(0.1, scale_parameter=False, relative_step=False, epsilon=1e-3),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda x: type(x).__name__)
def test_updates_follow_formulas(optimizer):
    table = table_of(layers(), batch_for("layers"), optimizer=optimizer, clip=passes.ClipGlobalNorm(0.5))
    found = [x for x in table.findings if x.part == "update"]
    assert [x.verdict for x in found] == 6 * ["agrees"], str(table)


def after_steps(steps, network=layers, batch=None, **kinds) -> list[Finding]:
    """Return what is found about updates after some steps, when slots are not their initial values."""
    executor = graphopt.Executor(compiled(network(), **kinds), native=False, verify=False)
    batch = batch_for("layers") if batch is None else batch
    for _ in range(steps):
        executor.step(batch)
    first = FirstCheck(executor._device, executor._model, executor._parts.buffers)
    return [x for x in first.findings(batch) if x.part == "update"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda x: type(x).__name__)
@pytest.mark.usefixtures("numbers")
def test_later_updates_follow_formulas_with_their_slots(optimizer):
    found = after_steps(3, optimizer=optimizer)
    assert [x.verdict for x in found] == 6 * ["agrees"], [*map(str, found)]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", [passes.AdamW, passes.Lion, passes.Muon, passes.Adafactor, passes.ScheduleFreeAdamW])
def test_slots_of_8_bits_follow_formulas_within_their_own_step(kind, steps):
    network = lambda: models.mlp((64,), 3, hidden=[128])  # noqa: E731
    rng = np.random.default_rng(5)
    batch = {"x": rng.standard_normal((8, 64), np.float32), "target": rng.integers(0, 3, 8)}
    found = after_steps(steps, network, batch, loss=passes.CrossEntropy(), optimizer=kind(slot_bits=8))
    assert [x.verdict for x in found] == 4 * ["agrees"], [*map(str, found)]


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize(
    "average",
    [passes.EMA(0.9), passes.SWA(), passes.SWA(start=3, every=2), passes.EMA(0.5, every=3)],
    ids=str,
)
@pytest.mark.usefixtures("numbers")
def test_averages_follow_formulas(average, steps):
    found = after_steps(steps, average=average)
    assert [x.verdict for x in found] == 6 * ["agrees"], [*map(str, found)]


@pytest.mark.parametrize("steps", [0, 2, 3])
@pytest.mark.parametrize(
    "accumulate", [passes.Accumulate(4), passes.Accumulate(3, mean=False), passes.Accumulate()], ids=str
)
@pytest.mark.parametrize("clip", [passes.ClipGlobalNorm(0.5), None], ids=["clipped", "elementwise"])
@pytest.mark.usefixtures("numbers")
def test_sums_of_gradients_follow_the_rule(accumulate, steps, clip):
    found = after_steps(
        steps,
        accumulate=accumulate,
        optimizer=passes.AdamW(),
        clip=clip,
        average=passes.EMA(0.9),
    )
    assert found[0].name == "accumulated"
    assert [x.verdict for x in found] == 7 * ["agrees"], [*map(str, found)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda x: type(x).__name__)
def test_only_updates_that_read_nothing_but_their_own_place_are_checked_on_some_numbers(optimizer):
    for clip in (None, passes.ClipGlobalNorm(0.5)):
        step = graphopt.load(compiled(optimizer=optimizer, clip=clip))
        reads_more = isinstance(optimizer, passes.LAMB | passes.Muon | passes.Adafactor) or clip is not None
        assert (updates.update_part(step, forward_of(step).gradients) is None) == reads_more


@pytest.mark.usefixtures("numbers")
def test_a_wrong_update_of_some_numbers_is_found(monkeypatch):
    own = passes.AdamW.update

    def wrong(self, op, w, g, rate, t, *slots):
        new, *rest = own(self, op, w, g, rate, t, *slots)
        return (w + 1.01 * (new - w), *rest)

    monkeypatch.setattr(passes.AdamW, "update", wrong)
    found = after_steps(2, optimizer=passes.AdamW())
    assert {x.verdict for x in found} == {"differs"}


@pytest.mark.usefixtures("numbers")
def test_a_wrong_update_of_one_parameter_is_found_beside_equal_ones(monkeypatch):
    step = graphopt.load(compiled(optimizer=passes.AdamW()))
    part = updates.update_part(step, forward_of(step).gradients)
    assert sum(x.op_type == "Sqrt" for x in part.model.graph) < len(with_role(step, Role.PARAMETER))
    own, updated = passes.AdamW.update, []

    def wrong(self, op, w, g, rate, t, *slots):
        updated.append(w)
        new, *rest = own(self, op, w, g, rate, t, *slots)
        return (w + 1.01 * (new - w) if len(updated) == 2 else new, *rest)

    monkeypatch.setattr(passes.AdamW, "update", wrong)
    found = after_steps(2, optimizer=passes.AdamW())
    assert [x.name for x in found if x.verdict == "differs"] == ["b1"]


class Halfway(passes.Average):
    def share(self, op, count):
        return op.constant(0.5, like=count)


class SignDescent(passes.Optimizer):
    def update(self, op, w, g, rate, t):
        return (w - rate * op.Sign(g),)


@pytest.mark.parametrize("step", [{"optimizer": SignDescent()}, {"average": Halfway()}], ids=str)
def test_an_update_without_a_formula_is_listed(step):
    table = table_of(layers(), batch_for("layers"), **step)
    assert table.agrees
    assert f"no formula of {type(next(iter(step.values()))).__name__} is known" in reasons(table)


def normalized(activation):
    """Return two layers with a normalization between them, whose batch statistics may be those of equal rows."""
    rng = np.random.default_rng(0)
    return model(
        f"""g (float[N,6] x) => (float[N,3] y) {{
            h = Gemm(x, w0, b0) n = BatchNormalization(h, scale, shift, mean, variance) a = {activation}(n)
            y = Gemm(a, w1, b1)
        }}""",
        w0=rng.standard_normal((6, 8)) / 2,
        b0=np.zeros(8),
        scale=np.ones(8),
        shift=np.zeros(8),
        mean=np.zeros(8),
        variance=np.ones(8),
        w1=rng.standard_normal((8, 3)) / 2,
        b1=np.zeros(3),
    )


ODD = {
    "zeros": lambda x: 0 * x,
    "constant": lambda x: 0 * x + 0.7,
    "equal rows": lambda x: np.broadcast_to(x[:1], x.shape),
    "tiny": lambda x: 1e-6 * x,
    "huge": lambda x: 1e4 * x,
    "far from zero": lambda x: x + 1000,
    "whole": lambda x: np.round(2 * x),
    "pixels": lambda x: np.round(100 * np.abs(x)),
}


@pytest.mark.parametrize("activation", ["Relu", "Identity", "Tanh"])
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("odd", ODD)
def test_odd_data_are_no_alarm(odd, rows, activation):
    rng = np.random.default_rng(rows)
    batch = {"x": ODD[odd](rng.standard_normal((rows, 6))), "target": rng.integers(0, 3, rows)}
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.AdamW(), "training": passes.TrainingMode()}
    table = table_of(normalized(activation), batch, **steps)
    assert table.agrees, str(table)


def test_a_difference_is_not_remembered_for_other_data(monkeypatch):
    step = compiled()
    monkeypatch.setattr(CheckTable, "agrees", property(lambda self: False))
    monkeypatch.setattr(CheckTable, "differences", property(lambda self: list(self.findings)))
    with pytest.raises(Disagreement):
        graphopt.Executor(step).step(batch_for("layers"))
    monkeypatch.undo()
    graphopt.Executor(step).step(batch_for("layers"))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize("network", [mlp, attention])
def test_no_false_alarm_in_other_types(network, dtype):
    shape = {mlp: ((8, 4), (8, 3)), attention: ((8, 6, 4), (8, 6, 4))}[network]
    batch = {name: RNG.standard_normal(size) for name, size in zip(("x", "target"), shape, strict=True)}
    table = table_of(network(dtype=dtype), batch, verify="full")
    assert table.agrees, str(table)
    assert {x.verdict for x in table.findings if x.part != "file"} == {"agrees"}, str(table)  # 1.19 refuses a file


def test_masks_of_dropout_are_those_of_the_step():
    network = models.transformer((16,), 10, vocabulary=30)
    batch = {"x": RNG.integers(0, 30, (8, 16)), "target": RNG.integers(0, 16, (8, 10))}
    training = passes.TrainingMode(seed=1)
    table = table_of(network, batch, loss=passes.CrossEntropy(), training=training)
    assert {x.verdict for x in table.findings} == {"agrees"}, str(table)


def test_a_kink_at_the_point_is_no_alarm():
    """Biases of 0 and pixels of 0 put each Relu at its kink, where the slopes of both sides differ."""
    proto = images()
    for tensor in proto.graph.initializer:
        if tensor.name in ("c0", "c1", "b", "mean", "shift"):
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.zeros(tensor.dims, np.float32), tensor.name))
    batch = batch_for("images")
    batch["x"][:, :, 2:6] = 0
    table = table_of(proto, batch, verify="full")
    assert table.agrees, str(table)


QDQ = """g (float[N,4] x) => (float[N,3] y) {
    q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) h = MatMul(d, w0) r = Relu(h)
    qr = QuantizeLinear(r, s, z) dr = DequantizeLinear(qr, s, z) y = MatMul(dr, w1)
}"""
STEPPED = """g (float[N,4] x) => (float[N,3] y) {
    h = MatMul(x, w0) r = Round(h) f = Floor(h) o = Sign(h) g = Greater(h, f) k = Where(g, h, r)
    a = Add(k, o) y = MatMul(a, w1)
}"""


@pytest.mark.parametrize("text", [QDQ, STEPPED], ids=["quantized", "steps"])
def test_what_no_gradient_passes_is_held(text):
    rng = np.random.default_rng(1)
    weights = {"w0": rng.standard_normal((4, 8)), "w1": rng.standard_normal((8, 3))}
    if text is QDQ:
        weights |= {"s": np.array(0.05), "z": np.array(3, np.int8)}
    table = table_of(model(text, **weights), batch_for("layers"), verify="full")
    assert {x.verdict for x in table.findings if x.part == "gradient"} == {"agrees"}, str(table)
    assert table.agrees


def binarized():
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 21, "v" : 1]>
        g (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w0) s = v.Binary(h) y = MatMul(s, w1) }
        <domain: "v", opset_import: ["" : 21]> Binary (x) => (s) { s = Sign(x) }""")
    rng = np.random.default_rng(1)
    for name, shape in {"w0": (4, 8), "w1": (8, 3)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def test_a_surrogate_gradient_is_declared(rules):
    """Bengio et al., https://arxiv.org/abs/1308.3432."""

    def straight_through(op, dy, x):
        return [dy * op.Cast(op.Less(op.Abs(x), 1.0), to=dy.dtype)]

    passes.gradient("v", "Binary")(straight_through)
    with pytest.raises(Disagreement, match=r"parameter 'w0': .* passes.gradient has to declare by surrogate=True"):
        graphopt.Executor(compiled(binarized()), native=False).step(batch_for("layers"))
    passes.gradient("v", "Binary", surrogate=True)(straight_through)
    step = compiled(binarized())
    graphopt.Executor(step, native=False).step(batch_for("layers"))
    table = graphopt.check(step, batch_for("layers"))
    assert reasons(table) == {"the rule of Binary declares a surrogate gradient"}
    assert [x.name for x in table.findings if x.verdict == "not checked"] == ["w0"]


# The file.


@pytest.mark.parametrize("kind", ["path", "bytes", "message", "model"])
def test_the_file_is_the_one_that_was_given(kind, tmp_path):
    path = tmp_path / "my.onnx"
    onnx.save(layers(), path)
    given = {
        "path": lambda: path,
        "bytes": path.read_bytes,
        "message": lambda: onnx.load(path),
        "model": lambda: graphopt.load(path),
    }[kind]()
    table = graphopt.check(compiled(given), batch_for("layers"))
    assert [x.verdict for x in table.findings if x.part == "file"] == ["agrees"]


def test_a_file_that_is_not_known_is_not_compared(tmp_path):
    path = tmp_path / "step.onnx"
    graphopt.save(compiled(), path)
    assert b"provenance" not in path.read_bytes()
    table = graphopt.check(path, batch_for("layers"))
    assert reasons(table) == {"the file is not known", "the optimizer is not known"}
    assert table.agrees


def test_a_file_that_has_changed_is_not_compared(tmp_path):
    path = tmp_path / "my.onnx"
    onnx.save(layers(), path)
    step = compiled(path)
    onnx.save(layers("Tanh"), path)
    assert reasons(graphopt.check(step, batch_for("layers"))) == {"the file has changed since it was compiled"}


def test_a_message_that_has_changed_is_not_compared():
    proto = layers()
    step = compiled(proto)
    proto.graph.node[2].op_type = "Tanh"
    assert reasons(graphopt.check(step, batch_for("layers"))) == {"the file has changed since it was compiled"}


def test_another_state_is_not_compared_with_the_file():
    executor = graphopt.Executor(compiled(), native=False)
    executor._parts.buffers.update({"b0": np.ones(8, np.float32)})
    found = executor._steps.first.findings(batch_for("layers"))
    assert reasons(CheckTable(found)) == {"the state is no longer that of the file"}
    executor.step(batch_for("layers"))


def test_a_pass_of_ones_own_may_change_predictions():
    def doubled(model):
        pass

    table = table_of(layers(), batch_for("layers"), normalize=[passes.Normalize(), doubled])
    assert reasons(table) == {"doubled is a pass of your own, which may change predictions"}


def test_a_file_in_training_mode_is_compared_in_this_mode():
    """The file normalizes by its batch on purpose; inference does not."""
    rng = np.random.default_rng(0)
    proto = model(
        """g (float[N,4] x) => (float[N,4] y) {
            y, m, v = BatchNormalization<training_mode=1>(x, scale, shift, mean, variance)
        }""",
        scale=rng.random(4) + 1,
        shift=rng.random(4),
        mean=rng.random(4),
        variance=rng.random(4) + 1,
    )
    batch = {name: RNG.standard_normal((8, 4)) for name in ("x", "target")}
    table = table_of(proto, batch)
    assert [x.verdict for x in table.findings if x.part == "file"] == ["agrees"], str(table)


@pytest.mark.parametrize("gradient", [{}, {"gradient": None, "optimizer": None}], ids=["trained", "alone"])
@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize(
    ("training", "kept"),
    [
        (None, (0, 1)),
        (passes.TrainingMode(as_exported=True), (0, 1)),
        (passes.TrainingMode(), (1,)),
        (passes.TrainingMode(batch_normalization=False), ()),
        (passes.TrainingMode(leave_out="scale"), ()),
    ],
)
def test_a_mode_that_a_pass_changes_on_purpose_is_not_compared(training, kept, inner, gradient):
    rng = np.random.default_rng(0)
    weights = {name: rng.random(4) + 0.5 for name in ("scale", "shift", "mean", "variance")}
    proto = model(
        f"""g (float[N,4] x) => (float[N,4] y) {{
            a, m, v = BatchNormalization<training_mode=1>(x, scale, shift, mean, variance)
            b{", n, u" * inner} = BatchNormalization<training_mode={inner}>(a, scale2, shift2, mean2, variance2)
            y = MatMul(b, w)
        }}""",
        **weights,
        **{f"{name}2": x + 0.25 for name, x in weights.items()},
        w=rng.random((4, 4)),
    )
    batch = {name: RNG.standard_normal((8, 4)) for name in ("x", "target")}
    table = table_of(proto, batch, training=training, **gradient)
    (found,) = [x for x in table.findings if x.part == "file"]
    assert table.agrees
    if inner in kept:
        assert found.verdict == "agrees", found
    else:
        assert found.reason == "TrainingMode changes the mode of the file on purpose"


# Once.


def test_a_machine_remembers(monkeypatch):
    calls = []
    right = FirstCheck.findings
    monkeypatch.setattr(FirstCheck, "findings", lambda self, batch: calls.append(1) or right(self, batch))
    step = compiled()
    for verify, count in (
        ("first", 1),
        ("first", 1),
        ("auto", 1),
        (None, 1),
        ("full", 2),
        ("full", 2),
        (True, 3),
        (True, 4),
    ):
        graphopt.Executor(step, native=False, verify=verify).step(batch_for("layers"))
        assert len(calls) == count, verify
    graphopt.Executor(step, native=False, verify=False).step(batch_for("layers"))
    other = {name: x[:5] for name, x in batch_for("layers").items()}
    assert len(calls) == 4
    graphopt.Executor(step, native=False).step(other)
    assert len(calls) == 5
    monkeypatch.setenv("GRAPHOPT_VERIFY", "full")
    assert graphopt.Device("cpu").verify == "full"


def test_only_the_first_step_is_checked(monkeypatch):
    executor = graphopt.Executor(compiled(), native=False, verify=True)
    executor.step(batch_for("layers"))
    monkeypatch.setattr(FirstCheck, "check", lambda self, batch: pytest.fail("checked again"))
    executor.step(batch_for("layers"))
    assert provenance.of(executor._model) is None  # the file can be released


def test_another_machine_of_the_same_home_remembers_nothing(cache, monkeypatch):
    step = compiled()
    executor = graphopt.Executor(step, verify="first")
    executor.step(batch_for("layers"))
    notes = [path for path in cache.parent.rglob("*.json") if not path.name.startswith("difference")]
    assert notes and all(path.name.startswith(f"{verdicts.machine()}-") for path in notes)
    assert verdicts.read_note("steps", notes[0].name.partition("-")[2], "difference", str) == ""
    monkeypatch.setattr(verdicts, "machine", lambda: "another")
    assert verdicts.read_note("steps", notes[0].name.partition("-")[2], "difference", str) is None


def test_a_processor_is_a_machine_of_its_own(monkeypatch):
    before = verdicts.machine.__wrapped__()
    monkeypatch.setattr(verdicts, "processor", lambda: "another processor")
    assert verdicts.machine.__wrapped__() != before


def test_models_in_memory_are_told_apart_by_their_content():
    def digest(scale):
        proto = layers()
        proto.graph.initializer[0].CopyFrom(
            onnx.numpy_helper.from_array(np.full((4, 8), scale, np.float32), proto.graph.initializer[0].name)
        )
        return provenance.SourceFile.of(graphopt.load(proto)).digest()

    assert digest(1.0) == digest(1.0) != digest(2.0)


# Several workers.


def halves():
    loss = {"loss": MEAN, "optimizer": SGD}
    return graphopt.split_step(graphopt.standard(**loss), layers())


WORKERS = {
    "LocalSGD": lambda workers: graphopt.LocalSGD(
        compiled(), communicator=workers, sync_every=2, native=False, verify="first"
    ),
    "DataParallel": lambda workers: graphopt.DataParallel(halves(), communicator=workers, native=False, verify="first"),
}


@pytest.mark.parametrize("rows", [(8, 8), (16, 0), (0, 16)])
@pytest.mark.parametrize("kind", WORKERS)
def test_all_workers_end_with_the_error_of_one(kind, rows):
    mistake = next(x for x in MISTAKES if x.name == "Relu's sign")
    whole = batch_for("layers")

    def work(workers):
        start = sum(rows[: workers.rank])
        batch = {name: x[start : start + rows[workers.rank]] for name, x in whole.items()}
        executor = WORKERS[kind](workers)
        before = executor.state
        with pytest.raises(Disagreement) as error:
            executor.step(batch)
        assert_equal(executor.state, before)
        return str(error.value)

    with mistake.plant():
        first, second = together(work)
    assert first == second
    assert first.startswith("parameter ")


@pytest.mark.parametrize("kind", WORKERS)
def test_workers_train_after_their_check(kind, monkeypatch):
    calls = []
    right = FirstCheck.check
    monkeypatch.setattr(FirstCheck, "check", lambda self, batch: calls.append(1) or right(self, batch))

    def work(workers):
        executor = WORKERS[kind](workers)
        for _ in range(4):
            executor.step({name: x[8 * workers.rank :][:8] for name, x in batch_for("layers").items()})
        return executor.state

    first, second = together(work)
    assert len(calls) == 2
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


# The table.


def test_random_inputs_have_the_declared_types():
    table = graphopt.check(tokens())
    assert table.agrees
    assert "random inputs of the declared types" in str(table)
    assert {"the optimizer is not known"} == reasons(table)


def test_random_targets_have_the_sizes_of_the_predictions():
    numbers = ", ".join(f"{x}.5" for x in range(18))
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
        agraph (float[n, 1, height, width] x) => (float[n, 2, places] y)
        <float[2, 1, 3, 3] w = {{{numbers}}}, int64[3] flat = {{0, 0, -1}}> {{
            each = Conv<strides = [2, 2]>(x, w)
            y = Reshape(each, flat)
        }}"""
    table = graphopt.check(onnx.parser.parse_model(text))
    assert ("gradient", "w", "agrees") in {(x.part, x.name, x.verdict) for x in table.findings}, table


def test_a_training_graph_takes_no_steps():
    with pytest.raises(graphopt.GraphoptError, match=r"^check: expected a training graph alone, found it with loss$"):
        graphopt.check(compiled(), loss=MEAN)


@pytest.mark.slow
def test_the_command_checks_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    graphopt.save(models.mlp((1, 8, 8), 10), "my.onnx")
    assert cli.main(["check", "my.onnx"]) == 0
    assert "on random inputs" in capsys.readouterr().out
    assert cli.main(["check", "my.onnx", "data=digits", "optimizer=sgd"]) == 0
    assert "on the data" in capsys.readouterr().out
    assert not list(tmp_path.glob("runs/*/*/*"))
    monkeypatch.setattr(passes.SGD, "update", lambda self, op, w, g, rate, t, *slots: (w - 2 * rate * g,))
    assert cli.main(["check", "my.onnx", "optimizer=sgd"]) == 1
    assert re.search(r"check: expected no differences, found \d+: update", capsys.readouterr().err)


# Slopes.

CURVES = {
    "line": (lambda x: 3 * x + 1, 3.0),
    "parabola": (lambda x: x * x, 2.0),
    "bend": (lambda x: 1 + x**3 / 3, 1.0),
}


@pytest.mark.parametrize(("curve", "precision"), [*itertools.product(CURVES, [SINGLE, DOUBLE])])
def test_slopes(curve, precision):
    function, right = CURVES[curve]
    point = {"x": np.array([1.0])}

    def verdict(found):
        loss = lambda p: float(function(p["x"][0]))  # noqa: E731
        asked = Question({"x": np.array([1.0])}, found, 1e-9, precision)
        return slope_along(loss, point, loss(point), asked).verdict

    assert verdict(right) == "agrees"
    assert verdict(1.1 * right) == verdict(-right) == verdict(0.0) == "differs"


def test_the_other_side_is_computed_only_where_one_does_not_decide():
    def passes_for(function, precision):
        points = []

        def loss(point):
            points.append(float(point["x"][0]))
            return float(function(points[-1]))

        asked = Question({"x": np.ones(1)}, 3.0, 1e-9, precision)
        slope = slope_along(loss, {"x": np.ones(1)}, function(1.0), asked)
        assert slope.verdict == "agrees"
        return len(points)

    curved = lambda x: 1 + 3 * (x - 1) + 1e4 * (x - 1) ** 2  # noqa: E731
    assert passes_for(lambda x: 3 * x + 1, SINGLE) == passes_for(lambda x: 3 * x + 1, DOUBLE) == 1
    assert passes_for(curved, SINGLE) == 2


def test_there_is_no_verdict_where_rounding_hides_the_slope():
    rng = np.random.default_rng(0)

    def loss(point):
        return float(np.float32(1e6 + 0.01 * point["x"][0] + 0.5 * rng.standard_normal()))

    asked = Question({"x": np.array([1.0])}, 0.02, 1e-9, SINGLE)
    slope = slope_along(loss, {"x": np.array([1.0])}, 1e6, asked)
    assert slope.verdict == "not checked"


def test_a_slope_that_rounding_hides_is_taken_at_the_farthest_step():
    """The loss of a decoder is about 10 in float32, and moves by some roundings where weights move by 1 %."""
    calls = []

    def loss(point):
        calls.append(1)
        return float(np.float32(10.5 + 1.3e-3 * (point["x"][0] - 1)))

    together = replace(SINGLE, tolerance=5e-3, doubted=5e-3)  # as of many parameters

    def verdict(found):
        asked = Question({"x": np.array([1.0])}, found, 1e-9, together)
        return slope_along(loss, {"x": np.array([1.0])}, 10.5, asked).verdict

    assert verdict(1.3e-3) == "agrees"
    assert len(calls) == 4
    assert verdict(1.5 * 1.3e-3) == "differs"


@pytest.mark.parametrize("precision", [SINGLE, DOUBLE])
def test_one_pass_tells_of_two_directions_whether_both_agree(precision):
    """Each direction has its own step, and either error is seen as if it were the only direction."""
    point = {"x": np.array([1.0, 2.0])}
    loss = lambda p: float(3 * p["x"][0] + 0.01 * p["x"][1])  # noqa: E731

    def told(*found):
        ways = {"x": np.array([1.0, 0.0])}, {"x": np.array([0.0, 1.0])}
        asked = [Question(way, slope, 1e-9, precision) for way, slope in zip(ways, found, strict=True)]
        return agree_at_once(loss, point, loss(point), asked)

    assert told(3.0, 0.01) == pytest.approx(told(3.0, 0.01)[::-1], rel=1e-6)
    for error in (1 - precision.tolerance, 1 + precision.tolerance, -1):
        assert told(3.0 * error, 0.01) is told(3.0, 0.01 * error) is None


@pytest.mark.parametrize("slope", [1.0, -1.0])
def test_a_factor_of_all_slopes_is_seen_by_one_pass(slope):
    """Steps that change the loss by as much, up and down, would cancel for every factor."""
    loss = lambda p: float(p["x"][0] + slope * p["x"][1])  # noqa: E731
    point, ways = {"x": np.array([1.0, 2.0])}, ({"x": np.array([1.0, 0.0])}, {"x": np.array([0.0, 1.0])})
    for factor in (-3, -1, 0.5, 2):
        asked = [Question(way, factor * found, 1e-9, DOUBLE) for way, found in zip(ways, (1, slope), strict=True)]
        assert agree_at_once(loss, point, loss(point), asked) is None


def test_any_subgradient_agrees():
    loss = lambda p: 1 + abs(float(p["x"][0]) - 1.0)  # noqa: E731
    point, along = {"x": np.array([1.0])}, {"x": np.array([1.0])}
    for found in (-1.0, -0.5, 0.5, 1.0):
        assert slope_along(loss, point, 1.0, Question(along, found, 1e-9, DOUBLE)).verdict != "differs"


@pytest.mark.parametrize("step", ["gradient", "clip"])
def test_a_step_that_goes_on_from_a_file_is_not_held_against_passes_that_nobody_knows(step, tmp_path):
    pipeline = graphopt.standard(
        loss=passes.CrossEntropy(), clip=passes.ClipGlobalNorm(0.01), optimizer=passes.SGD(1.0)
    )
    graphopt.save(pipeline.until(step)(mlp()), tmp_path / "begun.onnx")
    begun = graphopt.load(tmp_path / "begun.onnx")
    for source in (tmp_path / "begun.onnx", begun):
        compiled = pipeline.after(step)(source)
        executor = graphopt.Executor(compiled, threads=1, native=False)
        inputs = {x.name: x for x in compiled.graph.inputs}
        rng = np.random.default_rng(0)
        width = inputs["x"].shape[1]
        executor.step(x=rng.normal(size=(6, width)).astype(np.float32), target=rng.integers(0, 2, 6))


# Some rows of the batch.


def _ids(text: str):
    rng = np.random.default_rng(3)
    table, m = rng.standard_normal((12, 6)), rng.standard_normal((6, 3))
    return model(f"g (int64[N,S] x) => (float[N,3] y) {{ {text} }}", table=table, m=m, axes=np.array([1]))


LOOKED_UP = "e = Gather(table, x) p = ReduceMean<keepdims=0>(e, axes) y = MatMul(p, m)"
MASKED = """
    z = Constant<value_int=0>() k = Greater(x, z) f = Cast<to=1>(k) l = Constant<value_ints=[2]>() u = Unsqueeze(f, l)
    g = Gather(table, x) e = Mul(g, u) p = ReduceMean<keepdims=0>(e, axes) y = MatMul(p, m)"""


@pytest.mark.parametrize(
    ("proto", "loss", "rows", "is_cut"),
    [
        (layers, MEAN, 16, True),
        (layers, MEAN, 7, False),
        (layers, passes.MeanSquaredError(reduction="sum"), 16, False),
        (layers, passes.MeanSquaredError(sample_weight=True), 16, False),
        (layers, passes.CrossEntropy(ignore_index=-100), 16, False),
        (
            lambda: model("g (float[16,4] x) => (float[16,3] y) { y = MatMul(x, w) }", w=np.ones((4, 3))),
            MEAN,
            16,
            False,
        ),
        (lambda: _ids(LOOKED_UP), MEAN, 16, True),
        (lambda: _ids(MASKED), MEAN, 16, False),
    ],
    ids=["mean", "few rows", "sum", "weights", "ignored labels", "fixed batch", "looked up", "masked"],
)
def test_rows_are_left_out_only_if_they_show_no_more(proto, loss, rows, is_cut):
    step = graphopt.load(compiled(proto(), loss=loss))
    batch = {}
    for x in with_role(step, *FED):
        shape = [rows, *(size if isinstance(size, int) else 5 for size in x.shape[1:])]
        batch[x.name] = RNG.integers(0, 3, shape).astype(x.dtype.numpy())
    found = some_rows(step, batch)
    assert (found is not None) == is_cut
    assert found is None or {x.shape[0] for x in found.values()} == {ROWS}


def test_rows_whose_gradient_is_zero_show_nothing():
    batch = batch_for("layers")
    batch["x"][:ROWS] = 0  # the gradient of w0 is then 0 in these rows, twice 0, too
    step = graphopt.load(compiled())
    edited(w0=times(1.5))(step)
    assert {x.name for x in graphopt.check(step, batch).differences} == {"w0"}


def test_updates_are_checked_with_the_gradients_themselves(monkeypatch):
    """A direction is written over the gradients, of which some numbers are those of the update's check."""
    monkeypatch.setattr(first_check, "MANY", 0)
    made, read = first_check._Step._updates, []

    def updates_of(step):
        outputs = step.run(step.state)
        read.extend((step._some[name].ravel(), outputs[y].ravel()) for name, y in step.forward.gradients.items())
        return made(step)

    monkeypatch.setattr(first_check._Step, "_updates", updates_of)
    table_of(layers(), batch_for("layers"))
    assert read
    for some, gradient in read:
        np.testing.assert_array_equal(some, gradient)


def test_the_only_row_of_a_file_may_lose_its_axis():
    proto = model(
        "g (float[N,4] x) => (float[A,B] y) { h = MatMul(x, w) u = Unsqueeze(h, one) y = Squeeze(u) }",
        w=RNG.standard_normal((4, 3)),
        one=np.array([1]),
    )
    batch = {"x": RNG.standard_normal((1, 4)), "target": RNG.standard_normal((1, 3))}
    assert [x.verdict for x in table_of(proto, batch).findings if x.part == "file"] == ["agrees"]
