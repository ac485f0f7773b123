"""Try a pass, a loss, an optimizer or a gradient rule on small networks, and return a table of what was tried.

Each trial is a program of a few lines, which is run as it is shown: the one of the first failure reproduces it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.errors import GraphoptError, kind_of, line, nearest
from graphopt.graph.loading import Source, load
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import FED, Role, labels_of, role_of, with_role
from graphopt.graph.values import dtype_of, is_floating, name_of
from graphopt.targets.native.toolchain import compiler

if TYPE_CHECKING:
    from passes import Loss, Optimizer

_Verdict = Literal["passed", "failed", "skipped"]

MLP = "models.mlp((6,), 3, hidden=[8])"
# Networks by the kinds of their parameters: vectors and matrices; filters, too; a matrix of 4,096 numbers.
NETWORKS = {
    "mlp": MLP,
    "cnn": "models.cnn((1, 8, 8), 3, channels=(2,), hidden=4)",
    "wide": "models.mlp((64,), 3, hidden=[64])",
}
IN_FLOAT64 = "in_precision({}, ir.DataType.DOUBLE)"
ROWS, OTHER_ROWS = 4, (1, 7)  # of a batch, whose size the graph leaves open
BESIDE, ROUGHLY = "trains_as_the_reference(step, batch{})", ", rounding=properties.COARSE"
_FEW = 64  # numbers of an array that a program spells out
LEARNT_ROWS = 64  # from which a pass learns
OPEN = 3  # the size of other axes that a graph leaves open

HEAD = """import numpy as np
import onnx_ir as ir

import graphopt
import passes
from graphopt import models
from graphopt.testing import properties, prove, strict
from graphopt.testing.gradients import in_precision
from graphopt.pipeline import using_rules
"""


@dataclass(frozen=True)
class Trial:
    """Hold what was tried, and what was found.

    Args:
        property: what has to hold.
        case: the network, the element type, the number of rows or the option.
        verdict: `passed`, `failed` or `skipped`.
        reason: the error of a failure, or why it was skipped.
        program: the program that was run.
    """

    property: str
    case: str
    verdict: _Verdict
    reason: str = ""
    program: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:8} {self.property:32} {self.case:24} {self.reason}".rstrip()


@dataclass(frozen=True, repr=False)
class Trials:
    """Hold the trials of a pass, a loss, an optimizer or a gradient rule. Its text is a table.

    Args:
        subject: what was tried.
        trials: what was found, in the order of the trials.

    >>> from graphopt.testing import try_loss
    >>> found = try_loss(passes.Huber(), kernels=False)
    >>> found.passed, found.failures
    (True, ())
    """

    subject: str
    trials: tuple[Trial, ...]

    @property
    def failures(self) -> tuple[Trial, ...]:
        """Return the trials that failed."""
        return tuple(trial for trial in self.trials if trial.verdict == "failed")

    @property
    def passed(self) -> bool:
        """Return whether no trial failed."""
        return not self.failures

    @property
    def program(self) -> str:
        """Return the program of the first failure, or an empty text."""
        return self.failures[0].program if self.failures else ""

    def raise_(self) -> Trials:
        """Return the trials.

        Raises:
            GraphoptError: a trial failed. The message has the first failure; `program` reproduces it.
        """
        if self.failures:
            first = self.failures[0]
            raise GraphoptError(
                f"{self.subject}: expected {len(self.trials)} trials to pass, found {len(self.failures)} that fail, "
                f"first {first.property} ({first.case}): {first.reason}"
            )
        return self

    def __str__(self) -> str:
        verdicts = [trial.verdict for trial in self.trials]
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("passed", "failed", "skipped"))
        table = "\n".join([self.subject, *map(str, self.trials), counts])
        return f"{table}\n\n{self.program}" if self.failures else table

    __repr__ = __str__


@dataclass
class _Bench:
    """Run programs about something that an author has written.

    Args:
        own: the thing.
        model: a network of the author's, in place of those here.
        data: its batch.
    """

    own: object
    model: Source | None = None
    data: Mapping[str, np.ndarray] | None = None
    names: dict[str, Any] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    made: dict[tuple[object, ...], str] = field(default_factory=dict)
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)

    def written(self, thing: object) -> str:
        """Return an expression of a thing: the call of its class with the options that are not the defaults."""
        kind = type(thing)
        if is_dataclass(thing) and kind.__name__ not in ("CustomLoss",):
            given = [f for f in fields(thing) if _default(f) is MISSING or getattr(thing, f.name) != _default(f)]
            call = f"{kind.__name__}({', '.join(f'{f.name}={getattr(thing, f.name)!r}' for f in given)})"
            self.names[kind.__name__] = kind
            with contextlib.suppress(Exception):
                if eval(call, dict(self.names)) == thing:
                    return call
        name = "own" if thing is self.own else f"own_{len(self.names)}"
        self.names[name] = thing
        return name

    def network(self, case: str) -> str:
        """Return the expression of a network."""
        return NETWORKS[case] if self.model is None else self.source(self.model)

    def source(self, model: Source) -> str:
        """Return the expression of a model of the author's."""
        if isinstance(model, str):
            return repr(model)
        self.names["my_model"] = model
        return "my_model"

    def array(self, array: np.ndarray) -> str:
        """Return the expression of an array, with its numbers if they are few."""
        if array.size <= _FEW:
            return f"np.array({array.tolist()}, {str(array.dtype)!r})"
        name = f"array_{len(self.names)}"
        self.names[name] = array
        return name

    def function(self, function: Callable[..., Any]) -> str:
        """Return the name of a function of the author's."""
        name = getattr(function, "__name__", "")
        name = name if name.isidentifier() else f"rule_{len(self.names)}"
        self.names[name] = function
        return name

    def batch(self, inputs: Sequence[ir.Value], rows: int) -> str:
        """Return the expression of a batch for these inputs."""
        if self.data is not None:
            self.names["my_data"] = self.data
            return "my_data"
        drawn = ", ".join(f"{name_of(x)!r}: {_drawn(x, rows)}" for x in inputs)
        return f"{{{drawn}}}"

    def compiled(self, case: str, steps: Mapping[str, str], *, rows: int = ROWS, dtype: str = "{}") -> str:
        """Return the program that compiles a training graph, and makes a batch for it."""
        key = (case, *steps.items(), rows, dtype)
        if key not in self.made:
            self.made[key] = self._compiled(case, steps, rows, dtype)
        return self.made[key]

    def _compiled(self, case: str, steps: Mapping[str, str], rows: int, dtype: str) -> str:
        model = dtype.format(self.network(case))
        arguments = ", ".join(f"{name}={step}" for name, step in steps.items())
        lines = [
            "rng = np.random.default_rng(0)",
            f"model = {model}",
            f"pipeline = graphopt.standard({arguments}).planned(100)",
        ]
        names = self.environment()
        with _quiet():
            exec("\n".join(lines), names)
            if names["pipeline"].learns:
                inputs = load(names["model"]).graph.inputs
                rows_to_learn = self.batch([*inputs, _target()], LEARNT_ROWS)
                lines.append(f"pipeline = graphopt.adapt(pipeline, model, {rows_to_learn}, validation=0)")
                exec(lines[-1], names)
            graph = names["pipeline"](names["model"])
        lines += ["with strict():", "    step = pipeline(model)"]
        return "\n".join([*lines, f"batch = {self.batch(with_role(graph, *FED), rows)}", ""])

    def environment(self) -> dict[str, Any]:
        """Return the names that programs have."""
        names: dict[str, Any] = {"__name__": "trial"}
        exec(HEAD, names)
        return names | self.names

    def run(self, property: str, case: str, head: Callable[[], str], body: str) -> None:
        """Run a program, whose head is run once for all programs that begin with it, and note what comes of it."""
        program = body
        try:
            made = head()
            program = f"{made}{body}"
            with _quiet():
                if made not in self.heads:
                    names = self.environment()
                    exec(made, names)
                    self.heads[made] = names
                exec(body, self.heads[made] | self.names)
        except Exception as error:  # noqa: BLE001 - an author's code raises what it likes
            self.trials.append(Trial(property, case, "failed", _text_of(error), self.whole(program)))
        else:
            self.trials.append(Trial(property, case, "passed", "", self.whole(program)))

    def train(
        self,
        property: str,
        case: str,
        steps: Mapping[str, str],
        body: str,
        *,
        rows: int = ROWS,
        dtype: str = "{}",
    ) -> None:
        """Run a program that reads a training graph and a batch."""
        self.run(property, case, lambda: self.compiled(case, steps, rows=rows, dtype=dtype), f"properties.{body}")

    def skip(self, property: str, case: str, reason: str) -> None:
        self.trials.append(Trial(property, case, "skipped", reason))

    def whole(self, program: str) -> str:
        """Return a program with its imports, and with the class of the author's thing."""
        return f"{HEAD}{self.imports(program)}\n{program}"

    def imports(self, program: str) -> str:
        """Return the lines that define what a program reads of the author's."""
        lines = []
        for name, thing in self.names.items():
            if name not in program:
                continue
            module = getattr(thing, "__module__", None)
            if isinstance(thing, type) or inspect.isfunction(thing):
                if module == "__main__" or "<locals>" in thing.__qualname__:
                    with contextlib.suppress(OSError, TypeError):
                        source = textwrap.dedent(inspect.getsource(thing))
                        lines.append(f"from dataclasses import dataclass\n\n\n{source}\n")
                        continue
                lines.append(f"from {module} import {thing.__name__} as {name}".removesuffix(f" as {thing.__name__}"))
            else:
                lines.append(f"{name} = ...  # {kind_of(thing)}: yours")
        return "\n".join(lines)

    def result(self) -> Trials:
        return Trials(str(self.own) if not inspect.isfunction(self.own) else self.own.__name__, tuple(self.trials))


def _default(option: Any) -> object:
    return option.default if option.default_factory is MISSING else option.default_factory()


def _target() -> ir.Value:
    return ir.Value(name="target", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", OPEN]))


def _drawn(x: ir.Value, rows: int) -> str:
    """Return an expression of random numbers that an input may have."""
    sizes = [dim if isinstance(dim, int) else (OPEN if axis else rows) for axis, dim in enumerate(x.shape or ())]
    shape, labels, dtype = tuple(sizes), labels_of(x), str(dtype_of(x).numpy())
    if labels is not None:
        options = labels.all() if np.isfinite(labels.high) else np.array([0, 1])
        return f"rng.choice({options.tolist()}, {shape}).astype({dtype!r})"
    if role_of(x) is Role.SAMPLE_WEIGHT:
        return f"rng.uniform(0.5, 1.5, {shape}).astype({dtype!r})"
    if is_floating(x):
        return f"rng.standard_normal({shape}).astype({dtype!r})"
    return f"rng.integers(0, 2, {shape}).astype({dtype!r})"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _standard(bench: _Bench, case: str, steps: Mapping[str, str], *, kernels: bool) -> None:
    """Try the properties of all training graphs."""
    for said, call in (
        ("valid ONNX", "is_valid(step)"),
        ("slopes of the loss", "agrees_with_slopes(step, batch)"),
        ("the reference evaluator", "trains_as_the_reference(step, batch)"),
        ("saved and resumed", "resumes(step, batch)"),
        ("the model's interface", "keeps_the_interface(step, model, batch)"),
    ):
        bench.train(said, case, steps, call)
    if kernels and compiler() is not None:
        bench.train("compiled kernels", case, steps, "trains_as_the_reference(step, batch, native=True)")
    else:
        bench.skip("compiled kernels", case, "no compiler" if kernels else "kernels=False")


def _types_and_sizes(bench: _Bench, case: str, steps: Mapping[str, str]) -> None:
    """Try other element types and other numbers of rows, beside the reference evaluator."""
    if bench.model is None:
        bench.train("float64", case, steps, BESIDE.format(""), dtype=IN_FLOAT64)
    bench.train("16 bits", case, {**steps, "precision": "passes.MixedPrecision()"}, BESIDE.format(ROUGHLY))
    if bench.data is None:
        for rows in OTHER_ROWS:
            bench.train(f"{rows} rows", case, steps, BESIDE.format(""), rows=rows)


def _own(thing: object, kind: type, call: str, example: str) -> None:
    if not isinstance(thing, kind):
        raise GraphoptError(f"{call}: expected {example}, found {kind_of(thing)}")


def _twin(bench: _Bench, twin: Callable[..., Any] | None, case: str, head: Callable[[], str], body: str) -> None:
    """Compare with a function of PyTorch that the author has given."""
    if twin is None:
        bench.skip("PyTorch", case, "no twin given")
    elif importlib.util.find_spec("torch") is None:
        bench.skip("PyTorch", case, "PyTorch is not installed")
    else:
        bench.names["twin"] = twin
        bench.run("PyTorch", case, head, body)


@checked()
def try_loss(
    loss: Loss,
    *,
    twin: Callable[..., Any] | None = None,
    model: Source | None = None,
    data: Mapping[str, np.ndarray] | None = None,
    between_rows: bool = False,
    kernels: bool = True,
) -> Trials:
    """Try a loss: its gradient, types, sizes, reductions, weights, and steps of training with it.

    Args:
        loss: the loss.
        twin: a function of PyTorch's tensors `prediction, target` that returns the same number. Then loss and gradient
            are compared with its.
        model: a network for it; by default, one that predicts 3 numbers for each row.
        data: a batch, arrays by the names of the inputs; by default, random numbers.
        between_rows: whether the loss compares rows with one another, so that it is no sum over rows.
        kernels: try compiled kernels, too, if there is a compiler.

    Raises:
        GraphoptError: it is no loss. A failure is in the table.

    >>> from graphopt.testing import try_loss
    >>> try_loss(passes.MeanSquaredError(), kernels=False).passed
    True
    """
    import passes

    _own(loss, passes.Loss, "try_loss", "a loss such as passes.Huber()")
    bench, case = _Bench(loss, model, data), "mlp"
    steps = {"loss": bench.written(loss), "optimizer": "passes.SGD(0.1)"}
    _standard(bench, case, steps, kernels=kernels)
    _types_and_sizes(bench, case, steps)
    if loss.reduction == "mean":
        for option, other in (("sum", {"reduction": "sum"}), ("sample weights", {"sample_weight": True})):
            own = {**steps, "loss": bench.written(replace(loss, **other))}
            bench.train(option, case, own, "agrees_with_slopes(step, batch)")
    if model is None and data is None:
        kind, alone = "(ir.DataType.FLOAT, ['N', 3])", "the loss alone"
        made = f"rng = np.random.default_rng(0)\nfunction = properties.loss_model({steps['loss']}, {kind})"

        def point() -> str:
            names = bench.environment()
            exec(made, names)
            return f"{made}\nbatch = {bench.batch(names['function'].graph.inputs, ROWS)}\n"

        bench.run("finite differences in float64", alone, point, "prove(function, batch)")
        if between_rows:
            bench.skip("a sum over rows", alone, "between_rows=True")
        else:
            call = f"properties.adds_over_rows({steps['loss']}, {kind}, batch)"
            bench.run("a sum over rows", alone, point, call)
        _twin(bench, twin, alone, point, "properties.agrees_with_torch(function, batch, twin)")
    return bench.result()


@checked()
def try_optimizer(
    optimizer: Optimizer, *, twin: Callable[[list[Any]], Any] | None = None, kernels: bool = True
) -> Trials:
    """Try an optimizer: on vectors, matrices and filters, with its options, in all types, saved and resumed.

    Args:
        optimizer: the optimizer.
        twin: a function that returns PyTorch's optimizer of a list of parameters. Then parameters are compared after
            each of six steps by the same gradients.
        kernels: try compiled kernels, too, if there is a compiler.

    Raises:
        GraphoptError: it is no optimizer. A failure is in the table.

    >>> from graphopt.testing import try_optimizer
    >>> try_optimizer(passes.SGD(0.1, momentum=0.9), kernels=False).passed
    True
    """
    import passes

    _own(optimizer, passes.Optimizer, "try_optimizer", "an optimizer such as passes.AdamW()")
    bench = _Bench(optimizer)
    steps = {"loss": "passes.CrossEntropy()", "optimizer": bench.written(optimizer)}
    for case in ("mlp", "cnn"):
        _standard(bench, case, steps, kernels=kernels and case == "mlp")
    _types_and_sizes(bench, "mlp", steps)
    others: dict[str, dict[str, str]] = {
        "weight decay": {"optimizer": bench.written(replace(optimizer, weight_decay=0.1))},
        "groups": {"optimizer": bench.written(replace(optimizer, groups=(passes.Group("*.bias", learning_rate=0.5),)))},
        "a schedule": {"schedule": "passes.Cosine()"},
        "accumulated gradients": {"accumulate": "passes.Accumulate(2)"},
    }
    for said, other in others.items():
        bench.train(said, "mlp", {**steps, **other}, BESIDE.format(""))
    if optimizer.slot_bits != 8 and not optimizer.fused:
        own = {**steps, "optimizer": bench.written(replace(optimizer, slot_bits=8))}
        bench.train("slots of 8 bits", "wide", own, BESIDE.format(ROUGHLY))

    def reporting() -> str:
        return bench.compiled("mlp", {**steps, "clip": "passes.ReportGradients()"}, dtype=IN_FLOAT64)

    _twin(bench, twin, "mlp", reporting, "properties.trains_as_torch(step, batch, twin)")
    return bench.result()


@checked()
def try_pass(
    item: Pass,
    *,
    step: str | None = None,
    model: Source | None = None,
    data: Mapping[str, np.ndarray] | None = None,
    kernels: bool = True,
) -> Trials:
    """Try a pass at its step of the standard pipeline: its graphs, steps of training, and a file after it.

    A loss and an optimizer are tried by `try_loss` and `try_optimizer`.

    Args:
        item: the pass.
        step: the keyword of `graphopt.compile` at which the pass stands; by default, that of its family, or the first
            of clip, standardize, training and average at which it compiles, which the table names.
        model, data, kernels: as in `try_loss`; by default, the networks are a perceptron and a small convolutional one.

    Raises:
        GraphoptError: it is no pass, or it compiles at none of these steps.

    >>> from graphopt.testing import try_pass
    >>> try_pass(passes.ClipValue(0.5), kernels=False).passed
    True
    """
    import passes

    _own(item, Pass, "try_pass", "a pass such as passes.ClipValue()")
    if isinstance(item, passes.Loss):
        return try_loss(item, model=model, data=data, kernels=kernels)
    if isinstance(item, passes.Optimizer):
        return try_optimizer(item, kernels=kernels)
    bench = _Bench(item, model, data)
    own = bench.written(item)
    base = {"loss": "passes.MeanSquaredError()", "optimizer": "passes.SGD(0.01, momentum=0.9)"}
    place = step or _place(bench, own, base)
    steps = {**base, place: own}
    for case in ("mlp", "cnn") if model is None else ("mlp",):
        _standard(bench, case, steps, kernels=kernels and case == "mlp")
        bench.train(f"saved after {place}", case, steps, f"survives_a_file(pipeline, model, {place!r}, batch)")
    _types_and_sizes(bench, "mlp", steps)
    return bench.result()


def _text_of(error: Exception) -> str:
    return line(error) if isinstance(error, GraphoptError) else f"{type(error).__name__}: {line(error)}"


def _place(bench: _Bench, own: str, base: Mapping[str, str]) -> str:
    """Return the step at which a pass stands: that of its family, or the first at which it compiles."""
    import passes

    families = {
        "clip": (passes.Clip,),
        "regularizer": (passes.Regularizer,),
        "schedule": (passes.Schedule,),
        "average": (passes.Average,),
        "adapter": (passes.Adapter,),
    }
    for name, kinds in families.items():
        if isinstance(bench.own, kinds):
            return name
    errors = []
    for name in ("clip", "standardize", "training", "average"):
        try:
            bench.compiled("mlp", {**base, name: own})
        except Exception as error:  # noqa: BLE001 - an author's code raises what it likes
            errors.append(f"{name}: {_text_of(error)}")
        else:
            return name
    raise GraphoptError(
        f"try_pass: expected the step of the pipeline for {own}, found none where it compiles "
        f"({'; '.join(errors)}): write try_pass(..., step=...)"
    )


@checked()
def try_gradient(
    operator: Source,
    inputs: Sequence[np.ndarray] | Mapping[str, np.ndarray] | None = None,
    *,
    rule: Callable[..., Any] | None = None,
    rules: Mapping[tuple[str, str], Callable[..., Any]] | None = None,
    twin: Callable[..., Any] | None = None,
    **attributes: Any,
) -> Trials:
    """Try the gradient of an operator or of a model beside finite differences, and beside PyTorch if a twin is given.

    Args:
        operator: the name of an ONNX operator; or a model, as a path, an onnx.ModelProto or an onnx_ir.Model, such as
            one that calls an operator or a function of yours.
        inputs: the arrays of an operator in order, or those of a model by name; by default, random numbers for the
            inputs that a model declares.
        rule: a rule for this operator, in place of the registered one.
        rules: rules for a model, as `graphopt.compile` takes them.
        twin: a function of PyTorch's tensors, one for each input, and of the attributes, that returns the outputs.
        attributes: those of the operator.

    Raises:
        GraphoptError: the operator is unknown, or its inputs are missing. A failure is in the table.

    >>> from graphopt.testing import try_gradient
    >>> try_gradient("Elu", [numpy.linspace(-1, 1, 6)], alpha=0.5).passed
    True
    """
    if callable(operator):
        raise GraphoptError("try_gradient: expected an operator's name or a model first, found a function: write rule=")
    names = {schema.name for schema in onnx.defs.get_all_schemas()}
    single = isinstance(operator, str) and operator in names
    if isinstance(operator, str) and operator.isidentifier() and not single:
        near = f", nearest: {found!r}" if (found := nearest(operator, names)) else ""
        raise GraphoptError(f"try_gradient: expected the name of an operator, or a model, found {operator!r}{near}")
    if isinstance(inputs, str) or (single and (not isinstance(inputs, Sequence) or not inputs)):
        raise GraphoptError(f"try_gradient({operator!r}): expected the arrays of its inputs, found {kind_of(inputs)}")
    if not single and (rule is not None or attributes):
        raise GraphoptError("try_gradient: expected `rules` beside a model, found a rule or attributes: write rules=")
    if isinstance(inputs, Mapping) or inputs is None:
        arrays = None if inputs is None else dict(inputs)
    else:
        arrays = {f"x{i}": np.asarray(x) for i, x in enumerate(inputs)}
    bench = _Bench(_called(operator, rule))
    options = "".join(f", {name}={value!r}" for name, value in attributes.items())
    lines = ["rng = np.random.default_rng(0)"]
    if arrays is not None:
        lines.append(f"batch = {{{', '.join(f'{name!r}: {bench.array(x)}' for name, x in arrays.items())}}}")
    if single:
        lines.append(f"function = properties.operator_model({operator!r}, batch{options})")
    else:
        lines.append(f"function = graphopt.load({bench.source(operator)})")
    own = {("", str(operator)): rule} if rule is not None else dict(rules or {})
    if own:
        lines.append(f"rules = {{{', '.join(f'{key!r}: {bench.function(each)}' for key, each in own.items())}}}")
    points = {"your inputs": 0} if arrays is not None else {f"{rows} rows": rows for rows in (ROWS, *OTHER_ROWS)}
    for case, rows in points.items():
        drawn = [f"batch = {bench.batch(load(operator).graph.inputs, rows)}"] if rows else []
        head = "\n".join([*lines, *drawn, ""])
        block = "with using_rules(rules):\n    properties." if own else "properties."
        for said, call in (
            ("finite differences in float64", "is_proved(function, batch)"),
            ("finite differences in float32", "is_proved(function, batch, double=False)"),
            ("each input alone", "agrees_alone(function, batch)"),
        ):
            bench.run(said, case, lambda head=head: head, f"{block}{call}")  # type: ignore[misc]
        call = f"agrees_with_torch(function, batch, twin{options})"
        _twin(bench, twin, case, lambda head=head: head, f"{block}{call}")  # type: ignore[misc]
    return bench.result()


def _called(operator: Source, rule: Callable[..., Any] | None) -> str:
    name = operator if isinstance(operator, str) else load(operator).graph.name or "a model"
    return name if rule is None else f"{name} by {getattr(rule, '__name__', 'a rule')}"
