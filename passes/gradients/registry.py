"""Register gradient rules by operator.

A rule is a traced function `rule(op, dy, *inputs, **named)`. It returns the gradients of the inputs in order, with
None for no gradient. Trailing gradients may be left out. `dy` is the gradient of the first output. Keyword parameters
after the inputs request further values: attributes (with the defaults of the schema); `y`, the first output; `dys`, the
gradients of all outputs; `further`, the gradients of the outputs after the first, with None for no gradient; `active`,
the values whose gradients are needed (the rule may return None for others); and `node`. A gradient of a further output
is refused if a rule names neither `dys` nor `further`.

If an operator has bodies, the outer values that the bodies read follow its inputs.

Rules ignore broadcasting: the walk sums each gradient to the shape of its input. An elementwise operator only needs a
row of local derivatives `local(op, *inputs, output, **attributes)`, one for each input. Each returns a value or a
number.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

import onnx
from onnx_ir import Node, Value
from onnxscript import OnnxFunction

from graphopt.arguments import checked
from graphopt.errors import GraphoptError, kind_of, nearest
from graphopt.graph.emitter import Emitter
from graphopt.pipeline import rules_in_use

Active = frozenset[Value]
Gradients = Sequence[Value | None]
Rule = Callable[..., Gradients]
Local = Callable[..., Value | float]
F = TypeVar("F", bound=Callable[..., Any])

RULES: dict[tuple[str, str], Rule] = {}
EXPANSIONS: dict[str, Callable[..., Sequence[Value]]] = {}  # traced functions of the forward pass
NO_GRADIENT: set[tuple[str, str]] = set()
WITH_LOCAL_DERIVATIVES: set[tuple[str, str]] = set()
UNIFORM: set[tuple[str, str]] = set()  # rules that accept one scalar as the gradient of all elements
REFUSED: dict[tuple[str, str], str] = {}
REPLACED: set[tuple[str, str]] = set()  # operators whose rule `gradient` has set
SURROGATES: set[tuple[str, str]] = set()  # rules of users that are not the derivative on purpose

_DECLARED = "graphopt_surrogate"  # an attribute of rules that `surrogate` declares

# Operators whose integers represent floating-point numbers and carry their gradients.
QUANTIZING = {("", "QuantizeLinear"), ("", "DynamicQuantizeLinear")}

# Floating inputs of ONNX operators that receive no gradient: ratios, regions, sizes, running statistics.
WITHOUT_FLOW: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("CastLike", "Dropout", "MaxRoiPool", "Range"), (1,)),
    **{"BatchNormalization": (3, 4), "OneHot": (0, 1), "Resize": (1, 2)},
}


def registering(table: dict[tuple[str, str], Any], domain: str, op_types: Sequence[str]) -> Callable[[F], F]:
    """Return a decorator that enters a function for operators into a table."""

    def register(function: F) -> F:
        for op_type in op_types:
            if table.get((domain, op_type), function) is not function:
                raise GraphoptError(
                    f"{'::'.join(filter(None, (domain, op_type)))}: expected one rule, found a second: "
                    f"passes.gradient replaces a rule"
                )
        table.update(dict.fromkeys([(domain, op_type) for op_type in op_types], function))
        return function

    return register


def rule(*op_types: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the decorated function as the gradient rule of these operators."""
    return registering(RULES, domain, op_types)


def one_line_rules(table: Mapping[str, Rule]) -> None:
    """Register a gradient rule for each row."""
    for op_type, function in table.items():
        rule(op_type)(function)


def has_rule(domain: str, op_type: str) -> bool:
    """Return whether an operator or a function has a gradient rule, of all compilations or of the one that runs."""
    return (domain, op_type) in rules_in_use() or (domain, op_type) in RULES


def rule_of(node: Node) -> Rule | None:
    """Return the gradient rule of a node, by which the pipeline that runs may replace that of all; None without one."""
    operator = node.domain, node.op_type
    own = rules_in_use().get(operator)
    return RULES.get(operator) if own is None else _scripted(own) if isinstance(own, OnnxFunction) else own


def is_in(node: Node, facts: Container[tuple[str, str]]) -> bool:
    """Return whether a table states a fact of the operator of a node that a rule of the pipeline does not replace."""
    operator = node.domain, node.op_type
    return operator in facts and operator not in rules_in_use()


def is_own(node: Node) -> bool:
    """Return whether the rule of a node is a user's, of all compilations or of the one that runs."""
    operator = node.domain, node.op_type
    return operator in REPLACED or operator in rules_in_use()


def is_surrogate(node: Node) -> bool:
    """Return whether the rule of a node is declared not to be the derivative, or cannot be."""
    operator = node.domain, node.op_type
    own = rules_in_use().get(operator)
    if own is None:
        return operator in SURROGATES
    return getattr(own, _DECLARED, False) or operator in NO_GRADIENT


def surrogate(function: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """Return a gradient rule for `graphopt.compile(rules=...)` that is declared not to be the derivative on purpose.

    Executors then do not compare the gradient of what is before the operator with the slope of the loss.

    Args:
        function: a rule as `passes.gradient` takes it.

    >>> @passes.surrogate
    ... def soft(op, dy, x):
    ...     return [dy * op.Sigmoid(x)]
    >>> step = graphopt.compile(models.mlp((4,), 1), loss=passes.MeanSquaredError(), rules={("", "Relu"): soft})
    """
    _check_function(function, "@passes.surrogate")
    own = _scripted(function) if isinstance(function, OnnxFunction) else function

    @functools.wraps(own)
    def declared(*values: object, **named: object) -> Gradients:
        return own(*values, **named)

    setattr(declared, _DECLARED, True)
    return declared


@checked()
def gradient(domain: str, op_type: str, *, surrogate: bool = False) -> Callable[[F], F]:
    """Register the decorated function as the gradient rule of an operator, or of a function in models, in any domain.

    The rule is a traced function as `passes.gradients.registry` describes, or an `@onnxscript.script` function that
    takes the gradients of the operator's outputs, then the inputs, and returns the gradients of the inputs. It replaces
    an existing rule: of several, the last one counts. A function in a model that has a rule is not inlined, so that
    the rule applies.

    Args:
        domain: the domain of the operator, "" for ONNX.
        op_type: the name of the operator or the function.
        surrogate: whether the rule is not the derivative on purpose, as of a step function. Executors then do not
            compare the gradient of what is before the operator with the slope of the loss.

    >>> @passes.gradient("my.domain", "Step", surrogate=True)
    ... def straight_through(op, dy, x, *, threshold):
    ...     return [dy * op.Cast(op.Less(op.Abs(x), threshold), to=dy.dtype)]
    """

    for part in (domain, op_type):
        if not isinstance(part, str):
            raise GraphoptError(
                f'passes.gradient: expected a domain and an operator, such as ("", "Relu"), found {kind_of(part)}'
            )

    if not domain and op_type not in (known := {schema.name for schema in onnx.defs.get_all_schemas()}):
        near = f", nearest: {meant!r}" if (meant := nearest(op_type, known)) else ""
        raise GraphoptError(
            f"passes.gradient: expected an operator of ONNX, found {op_type!r}{near}: give the domain of another one"
        )

    def register(function: F) -> F:
        _check_function(function, f"@passes.gradient({domain!r}, {op_type!r})")
        REPLACED.add((domain, op_type))
        RULES[domain, op_type] = _scripted(function) if isinstance(function, OnnxFunction) else function
        for facts in (
            NO_GRADIENT,
            UNIFORM,
            WITH_LOCAL_DERIVATIVES,
            SURROGATES,
        ):  # of the rule that it replaces
            facts.discard((domain, op_type))
        if surrogate:
            SURROGATES.add((domain, op_type))
        return function

    return register


def _check_function(function: object, where: str) -> None:
    if not callable(function) or isinstance(function, type):
        raise GraphoptError(
            f"{where}: expected a function of op, dy and the operator's inputs, found {kind_of(function)}"
        )


@functools.cache
def _scripted(function: OnnxFunction[..., Any]) -> Rule:
    def traced(op: Emitter, dy: Value, *inputs: Value, dys: Sequence[Value]) -> Gradients:
        gradients = op.trace(function, *dys, *inputs, outputs=None)
        return [gradients] if isinstance(gradients, Value) else gradients

    return traced


def elementwise(table: Mapping[str, tuple[Local, ...]]) -> None:
    """Register a gradient rule for each row of local derivatives."""
    one_line_rules({op_type: _chain(locals_) for op_type, locals_ in table.items()})
    WITH_LOCAL_DERIVATIVES.update(("", op_type) for op_type in table)


def no_gradient(*op_types: str, domain: str = "") -> None:
    """Declare operators whose outputs depend on no input differentiably. Differentiation stops at them."""
    NO_GRADIENT.update((domain, op_type) for op_type in op_types)


def refused(reason: str, *op_types: str, domain: str = "") -> None:
    """Declare operators that block gradients. The error contains `reason`, which says what to do instead."""
    for op_type in op_types:
        if REFUSED.setdefault((domain, op_type), reason) != reason:
            raise GraphoptError(f"{op_type}: expected one reason for which it is refused, found a second: {reason}")


def carries(node: Node, index: int) -> bool:
    """Return whether a gradient can flow to an input of a node, regardless of the input's type."""
    return node.domain != "" or index not in WITHOUT_FLOW.get(node.op_type, ())


def accepted(function: Callable[..., object], named: Mapping[str, object]) -> dict[str, object]:
    """Return those of the `named` values that are parameters of `function`."""
    parameters = parameters_of(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in named.items() if takes_all or name in parameters}


@functools.cache
def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name."""
    return inspect.signature(function).parameters


def _chain(locals_: tuple[Local, ...]) -> Rule:
    def chained(op: Emitter, dy: Value, *inputs: Value, y: Value, active: Active, **attributes: object) -> Gradients:
        return [
            _scale(dy, local(op, *inputs, y, **accepted(local, attributes))) if x in active else None
            for x, local in zip(inputs, locals_, strict=False)
        ]

    return chained


def _scale(dy: Value, local: Value | float) -> Value | None:
    if isinstance(local, Value):
        return dy * local
    if local == 0:
        return None
    if local == 1:
        return dy
    return -dy if local == -1 else dy * local
