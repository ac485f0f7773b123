"""Prove which operators have gradients, by finite differences of ONNX Runtime's forward pass on ONNX's node tests.

`python tests/onnx_node_tests.py [OPERATOR ...]` prints a table: operator, cases, passed cases, compared elements,
vacuous cases, and the reasons for refused cases. Below the table, it lists what computed the forward pass and what
the gradients were compared with. In a checkout, `python tests/torch_oracle.py` uses PyTorch's autograd as the oracle,
and finite differences for operators that PyTorch lacks. `--runtime` checks that ONNX Runtime computes the same
gradients in float32. `--gradient onnxruntime` checks that onnxruntime-training's own gradients are the same, and
reports the cause of each refusal.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import onnx
import onnx.backend.test.case.node
import onnx_ir as ir

from graphopt.derivatives import normal_form
from graphopt.errors import GraphoptError, NoGradient
from graphopt.graph.loading import Source
from graphopt.graph.operators import DRAWING
from graphopt.graph.values import gradient_of
from graphopt.runtime.executor import run as execute
from graphopt.testing.gradients import (
    FATAL,
    NamedArrays,
    Oracle,
    Proof,
    distance,
    finite,
    gradient_model,
    in_precision,
    in_types,
    is_floating_array,
    prove,
    random_seeds,
)
from graphopt.testing.gradients import evaluate_reference as evaluate
from passes import GradientSource

# Floating-point inputs that determine sizes, not values: small changes have no effect, or change everything.
FIXED_INPUTS = {
    "Dropout": {"ratio"},
    "MelWeightMatrix": {"lower_edge_hertz", "upper_edge_hertz"},
    "OneHot": {"indices", "depth"},
    "Range": {"limit"},
    "Resize": {"roi", "scales"},
    "Upsample": {"scales"},
}

# Operators whose integer inputs, such as shapes and axes, must be constants in a differentiated model.
CONSTANT = {"Col2Im", "DFT", "Resize"}

# Operators that are defined for inputs above 1 only.
ABOVE = {"Acosh"}

# Operators that always compute in float32, and the best step of finite differences for them.
FLOAT32_ALONE = {"Celu": 1e-2, "DequantizeLinear": 1e-2, "DynamicQuantizeLinear": 1e-3}

# Gradient passes by the name of their recipe.
SOURCES = {"standard": "Gradient", "onnxruntime": "OrtGradient"}

# How far two float32 gradients may be apart, relative to the largest element.
SOURCE_TOLERANCE = 1e-5

# How far a float32 gradient may be from the float64 one, relative to the largest element.
RUNTIME_TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """Hold a node test and the operator that it tests."""

    name: str
    op_type: str
    model: onnx.ModelProto
    inputs: NamedArrays

    @property
    def fixed_inputs(self) -> set[str]:
        """Return the names of the inputs that finite differences do not move."""
        node = next(node for node in self.model.graph.node if node.op_type == self.op_type)
        schema = onnx.defs.get_schema(self.op_type, self.model.opset_import[0].version)
        names = FIXED_INPUTS.get(self.op_type, set())
        return {x for x, formal in zip(node.input, schema.inputs, strict=False) if formal.name.lower() in names}

    def at_a_point(self) -> tuple[onnx.ModelProto, NamedArrays]:
        """Return the model to differentiate and the point at which to differentiate it."""
        model = self.with_constant_integers() if self.op_type in CONSTANT else self.model
        return model, _moved(self, model)

    def with_constant_integers(self) -> onnx.ModelProto:
        """Return the model with its integer inputs as constants."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for x in self.model.graph.input:
            if not _is_floating(x):
                model.graph.input.remove(x)
                model.graph.initializer.append(onnx.numpy_helper.from_array(self.inputs[x.name], x.name))
        return model


def cases(op_types: Collection[str] = ()) -> Iterator[Case]:
    """Yield ONNX's node tests, in the default domain and not expanded, with floating inputs and outputs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = onnx.backend.test.case.node.collect_testcases(None)
    for test in tests:
        assert test.model is not None and test.data_sets is not None
        graph = test.model.graph
        if "expanded" in test.name or any(node.domain not in ("", "ai.onnx") for node in graph.node):
            continue
        op_type = graph.node[-1].op_type
        floating = any(map(_is_floating, graph.input)) and any(map(_is_floating, graph.output))
        if floating and (not op_types or op_type in op_types):
            given = map(_array, test.data_sets[0][0])
            names = (x.name for x in graph.input)
            if op_type in DRAWING and not any(x.name == "seed" for x in graph.node[-1].attribute):
                graph.node[-1].attribute.append(onnx.helper.make_attribute("seed", 1.0))
            yield Case(test.name, op_type, test.model, dict(zip(names, given, strict=True)))


def _array(x: Any) -> Any:
    if isinstance(x, onnx.TensorProto):
        return onnx.numpy_helper.to_array(x)
    return np.asarray(x) if isinstance(x, np.generic) else x


def _is_floating(value: onnx.ValueInfoProto) -> bool:
    floating = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    return value.type.tensor_type.elem_type in floating


def refusal(case: Case, oracle: Oracle | None = None) -> str:
    """Return the reason why the gradient of a case is not proved, or ""."""
    return attempt(lambda: proved(case, oracle))


def runtime_refusal(case: Case) -> str:
    """Return how the gradient of a case differs from ONNX Runtime's in float32, or ""."""
    return attempt(lambda: check_runtime(case, proved(case, sample=0).gradients))


def source_refusal(case: Case, gradient: GradientSource) -> str:
    """Return who refuses a gradient and why, or how it differs from that of the rules, or ""."""
    if case.op_type in FATAL:
        return "runtime: onnxruntime 1.19 ends the process on it"
    return attempt(lambda: check_sources(case.at_a_point()[0], case.at_a_point()[1], gradient, case.fixed_inputs))


def attempt(check: Callable[[], object]) -> str:
    """Return the error message of a check, or ""."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            check()
    except GraphoptError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - the evaluator raises what its operators happen to
        return f"{type(error).__name__}: {error}"
    return ""


def proved(case: Case, oracle: Oracle | None = None, sample: int | None = None) -> Proof:
    """Prove a case's gradients, for all elements unless their number is large.

    Raises:
        GraphoptError: the gradients differ from those of the oracle or of finite differences.
    """
    step = FLOAT32_ALONE.get(case.op_type)
    options: dict[str, Any] = {} if step is None else {"double": False, "step": step, "tolerance": 1e-3}
    return prove(*case.at_a_point(), fixed_inputs=case.fixed_inputs, sample=sample, oracle=oracle, **options)


def check_runtime(case: Case, gradients: NamedArrays) -> None:
    """Compare gradients with those of ONNX Runtime in float32, to a thousandth of the largest.

    Raises:
        GraphoptError: the gradients differ, or the runtime does not support an operator or the opset.
    """
    source, point = case.at_a_point()
    model = in_precision(normal_form(source), ir.DataType.FLOAT)
    point = in_types(model, point)
    seeds = random_seeds(evaluate(model, point))
    found = execute(gradient_model(model), point | seeds)
    for name, expected in gradients.items():
        gradient = found.get(gradient_of(name), np.zeros_like(expected))
        error = distance(finite(gradient), finite(expected), 1e-3)
        if not error <= RUNTIME_TOLERANCE:
            raise GraphoptError(f"ONNX Runtime's gradient differs by {error:.1e}")


def check_sources(source: Source, point: NamedArrays, gradient: GradientSource, fixed: Collection[str] = ()) -> None:
    """Compare the float32 gradients of two passes for each input separately, to 1e-5 of the largest.

    If float32 itself differs that much from float64, compare with float64 gradients.

    Raises:
        GraphoptError: the gradients differ, or a pass or the runtime refuses the model.
    """
    model = in_precision(normal_form(source), ir.DataType.FLOAT)
    point = in_types(model, point)
    seeds = random_seeds(evaluate(model, point))
    problems: dict[str, list[str]] = {}
    for name in (str(x.name) for x in model.graph.inputs if x.name not in fixed):
        if is_floating_array(point[name]):
            problem = attempt(functools.partial(_check_source, model, point, seeds, gradient, name))
            problems.setdefault(problem, []).append(repr(name))
    by = "" if len(problems) == 1 else " (by {})"
    lines = [line + by.format(", ".join(names)) for line, names in sorted(problems.items()) if line]
    if lines:
        raise GraphoptError("; ".join(lines))


def _check_source(model: ir.Model, point: NamedArrays, seeds: NamedArrays, gradient: GradientSource, name: str) -> None:
    with _said_by(type(gradient).__name__):
        theirs = gradient_model(model, gradient, [name])
    with _said_by("Gradient"):
        ours = gradient_model(model, by=[name])
        precise = gradient_model(in_precision(model, ir.DataType.DOUBLE), by=[name])
        exact = evaluate(precise, in_types(precise, point | seeds))
    with _said_by("runtime"):
        found = execute(theirs, point | seeds)
    error = _apart(found, exact)
    if error > SOURCE_TOLERANCE:
        with _said_by("runtime"):
            error = min(error, _apart(found, execute(ours, point | seeds)))
    if error > SOURCE_TOLERANCE:
        raise GraphoptError(f"differs by {error:.1e}")


def _apart(found: NamedArrays, expected: NamedArrays) -> float:
    """Return the distance between gradients; a missing gradient counts as zero."""
    return max(
        (
            distance(finite(found.get(name, np.zeros_like(gradient))), finite(gradient), 1e-3)
            for name, gradient in expected.items()
        ),
        default=0.0,
    )


@contextlib.contextmanager
def _said_by(who: str) -> Iterator[None]:
    """Add the name of the refusing component to errors in the block."""
    try:
        yield
    except NoGradient as error:
        raise GraphoptError(f"{who}: {'; '.join(f'{x.op_type}: {x.reason}' for x in error.operators)}") from error
    except Exception as error:
        raise GraphoptError(f"{who}: {' '.join(str(error).split()).removeprefix(f'{who}: ')}") from error


def _moved(case: Case, model: onnx.ModelProto) -> NamedArrays:
    """Return a case's inputs, moved away from round numbers, where many operators have kinks."""
    random = np.random.default_rng(0)
    point = {}
    inputs = {x.name for x in model.graph.input}
    for name, x in case.inputs.items():
        if name not in inputs:
            continue
        if is_floating_array(x) and name not in case.fixed_inputs:
            move = random.uniform(0.002, 0.02, x.shape)
            x = np.where(x == 0, 10 * move, x * (1.1 + move if case.op_type in ABOVE else 1 - move)).astype(x.dtype)
        point[name] = x
    return point


@dataclasses.dataclass
class Tally:
    """Hold the results of an operator's cases: the proofs, and the reasons for refusals."""

    proofs: list[Proof] = dataclasses.field(default_factory=list)
    refusals: list[str] = dataclasses.field(default_factory=list)

    @property
    def compared(self) -> str:
        """Return the number of compared elements and the number of all elements."""
        return f"{sum(x.compared for x in self.proofs)} of {sum(x.total for x in self.proofs)}"

    def vacuous(self, by_nature: bool) -> int:
        """Return the number of vacuous proofs."""
        return sum(x.vacuous and x.by_nature == by_nature for x in self.proofs)


def tally(op_types: Collection[str] = (), oracle: Oracle | None = None) -> dict[str, Tally]:
    """Prove ONNX's node tests and return the results by operator."""
    found: dict[str, Tally] = {}
    for case in cases(op_types):
        of = found.setdefault(case.op_type, Tally())
        reason = attempt(lambda case=case, of=of: of.proofs.append(proved(case, oracle)))  # type: ignore[misc]
        of.refusals += [reason] if reason else []
    return found


def report(found: dict[str, Tally]) -> Iterator[str]:
    """Yield the lines of a table of results."""
    yield f"{'operator':<28}{'cases':>6}{'passed':>8}{'elements compared':>20}{'vacuous':>9}  refused because"
    for op_type, of in sorted(found.items()):
        passed, count = len(of.proofs), len(of.proofs) + len(of.refusals)
        vacuous = of.vacuous(True) + of.vacuous(False)
        yield f"{op_type:<28}{count:>6}{passed:>8}{of.compared:>20}{vacuous:>9}  {_reasons(of.refusals)}"
    total = Tally()
    for of in found.values():
        total.proofs += of.proofs
        total.refusals += of.refusals
    yield _total([*[""] * len(total.proofs), *total.refusals], [x.refusals for x in found.values()])
    yield f"elements compared: {total.compared}"
    yield (
        f"vacuous, so that a rule of zeros would pass: {total.vacuous(True)} by nature (nothing on the way has a "
        f"slope, or there are no elements), {total.vacuous(False)} others"
    )
    for name, values in (
        ("forward", [x.forward for x in total.proofs]),
        ("oracle", [x.oracle for x in total.proofs]),
    ):
        counts = collections.Counter(values).most_common()
        yield f"{name}: {', '.join(f'{count} by {value}' for value, count in counts)}"


def _reasons(refusals: Collection[str]) -> str:
    return " | ".join(sorted({" ".join(reason.split())[:160] for reason in refusals if reason}))


def _total(refusals: Collection[str], by_operator: Collection[Collection[str]]) -> str:
    passed, whole = sum(not x for x in refusals), sum(not any(x) for x in by_operator)
    return f"{passed} of {len(refusals)} cases; all cases of {whole} of {len(by_operator)} operators"


def main(oracle: Oracle | None = None) -> None:
    """Print the table; compare with the oracle if given, otherwise with finite differences."""
    parser = argparse.ArgumentParser(prog="python tests/onnx_node_tests.py", description=__doc__.splitlines()[0])
    parser.add_argument("operator", nargs="*", help="these operators alone")
    parser.add_argument(
        "--runtime",
        action="store_true",
        help="compare with ONNX Runtime in float32, not with finite differences",
    )
    parser.add_argument(
        "--gradient",
        choices=SOURCES,
        default="standard",
        help="compare this source of gradients with the rules",
    )
    options = parser.parse_args()
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    if not options.runtime and options.gradient == "standard":
        print(*report(tally(options.operator, oracle)), sep="\n")
        return
    check = runtime_refusal
    if options.gradient != "standard":
        import passes

        check = functools.partial(source_refusal, gradient=getattr(passes, SOURCES[options.gradient])())
    found: dict[str, list[str]] = {}
    for case in cases(options.operator):
        found.setdefault(case.op_type, []).append(check(case))
    print(f"{'operator':<28}{'cases':>6}{'passed':>8}  refused because")
    for op_type, refusals in sorted(found.items()):
        print(f"{op_type:<28}{len(refusals):>6}{refusals.count(''):>8}  {_reasons(refusals)}")
    print(_total([x for refusals in found.values() for x in refusals], found.values()))


if __name__ == "__main__":
    main()
