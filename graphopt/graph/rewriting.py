"""Define the base class of all passes, and protect nodes from rewriters."""

from __future__ import annotations

import contextlib
import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol, final

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import NameFixPass, RemoveUnusedNodesPass

from graphopt.arguments import Checked
from graphopt.errors import GraphoptError, cause, kind_of
from graphopt.fields import check_options
from graphopt.graph import metadata, origins
from graphopt.graph.authored import ask
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.opsets import IR_VERSION
from graphopt.graph.postprocessing import STORED
from graphopt.graph.roles import Role, updated, with_role
from graphopt.graph.state import detached
from graphopt.graph.storage import Content
from graphopt.graph.strictness import check_model, is_strict
from graphopt.graph.traversal import all_nodes, is_sorted, subgraphs, values_in
from graphopt.graph.values import name_of


class Read(Protocol):
    """Return the training rows of the array of an input or a target, in pieces.

    `run` returns the outputs of a model on some of these rows, which are drawn, by name, in pieces. `outputs` returns
    the number of outputs that predict the target: one for each class, also for classes in rows that do not train, or
    one for each column of numbers.
    """

    def outputs(self) -> int: ...

    def run(self, model: ir.Model, rows: int = ..., /) -> Iterator[Mapping[str, np.ndarray]]: ...

    def __call__(self, name: str, /) -> Iterator[np.ndarray]: ...


# Exceptions of ONNX's packages for models that pass the checker but that they cannot handle.
LIBRARIES = (
    DecodeError,
    ir.passes.InvariantError,
    ir.passes.PassError,
    ir.serde.SerdeError,
    onnx.checker.ValidationError,
    onnx.defs.SchemaError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
)


@dataclass(frozen=True)
class Pass(ir.passes.InPlacePass, Checked):
    """Rewrite an onnx_ir model in place. A pass is a frozen dataclass whose fields are its options.

    A subclass implements `rewrite`, and declares intervals of numeric options by `graphopt.intervals.within`. Between
    passes, the model is valid, self-contained ONNX, whose nodes are sorted and whose names differ. While `rewrite`
    runs, initial values of state are detached (see `graphopt.graph.state`), so that any rewriter is safe.

    A subclass that depends on other passes declares this in `requires`, which runs before `rewrite`, and what it leaves
    in `ensures`, which runs after it. A call returns onnx_ir's result, which tells whether the model has changed.

    A pass that learns options from data says so in `learns`, and `adapted` returns the pass with these options.

    Attributes:
        alters: how the pass makes predictions other than those of the file, for a pass that does so on purpose.
        follows: whether a pass that learns options learns them from the model that the passes before it make.
        changes_forward: whether the pass changes the forward pass, so that it must run before Gradient.
    """

    alters: ClassVar[str] = ""
    follows: ClassVar[bool] = False
    changes_forward: ClassVar[bool] = False

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        for name in vars(cls):
            defined = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
            if defined is not None and getattr(vars(defined)[name], "__final__", False):
                due = sorted(getattr(defined, "__abstractmethods__", ())) or ["another method"]
                raise GraphoptError(
                    f"{cls.__name__}.{name}: expected the method of {defined.__name__}, which calls those of a "
                    f"subclass, found another: define {' and '.join(due)} in its place"
                )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def learns(self) -> bool:
        """Return whether options are to be learnt from the training rows."""
        return False

    def adapted(self, model: ir.Model, read: Read) -> Pass:
        """Return the pass with the options that it learns from the training rows; see `graphopt.adapt`.

        Args:
            model: the model before the pipeline, or before the pass.
            read: returns the training rows of the array of an input or a target, in pieces.
        """
        return self

    def planned(self, steps: int) -> Pass:
        """Return the pass for a training of so many steps, if it has no number of its own."""
        return self

    @final
    def __call__(self, model: ir.Model | ir.passes.PassResult, /) -> ir.passes.PassResult:
        return self.call(model.model if isinstance(model, ir.passes.PassResult) else model)

    @final
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self._check(model)
        before = Content.of(model)
        self.apply(model)
        return ir.passes.PassResult(model, modified=Content.of(model) != before)

    @final
    def apply(self, model: ir.Model) -> None:
        """Rewrite a model in place as a call does, in less time, since nothing tells whether it has changed."""
        self._check(model)
        ask(self, "requires", model)
        try:
            with detached(model):
                self._check_result(model, ask(self, "rewrite", model))
                if model.functions or not (is_sorted(model.graph) and has_names(model)):
                    model.graph.sort()
                    fix_names(model)
        except LIBRARIES as error:
            raise GraphoptError(f"{type(self).__name__}: {cause(error)}") from error
        ask(self, "ensures", model)
        if is_strict():
            check_model(model, type(self).__name__)

    def _check(self, model: ir.Model) -> None:
        if not isinstance(model, ir.Model):
            raise GraphoptError(
                f"{type(self).__name__}: expected an onnx_ir.Model, found {kind_of(model)}: graphopt.load reads one"
            )

    def _check_result(self, model: ir.Model, found: object) -> None:
        """Raise an error if `rewrite` has returned another model, which nothing would read."""
        inner = found.model if isinstance(found, ir.passes.PassResult) else found
        if inner is not None and inner is not model:
            raise GraphoptError(
                f"{type(self).__name__}.rewrite: expected changes of the model itself, and no result, found "
                f"{kind_of(found)}: change the model in place"
            )

    def requires(self, model: ir.Model) -> None:
        """Raise an error unless a model has what the pass needs, such as the results of passes that run before it."""
        if self.changes_forward:
            self.precedes_gradient(model)

    def ensures(self, model: ir.Model) -> None:
        """Raise an error unless a rewritten model has what the pass promises."""

    @abstractmethod
    def rewrite(self, model: ir.Model) -> None:
        """Rewrite `model` in place."""

    def required(self, model: ir.Model, role: Role, advice: str) -> list[ir.Value]:
        """Return the values with a role that the pass cannot do without.

        Raises:
            GraphoptError: there are none. The message ends with the advice.
        """
        values = with_role(model, role)
        if not values:
            found = "none"
            if role is Role.GRADIENT and updated(model):
                found, advice = "an update that has used them", "run it before the optimizer"
            raise GraphoptError(f"{type(self).__name__} needs {role.value}s, found {found}: {advice}")
        return values

    def precedes_gradient(self, model: ir.Model) -> None:
        """Raise an error if a model has gradients, in which a change of the forward pass would be missing."""
        if with_role(model, Role.GRADIENT) or updated(model):
            raise GraphoptError(
                f"{type(self).__name__}: expected a model without gradients, found gradients: run it before Gradient"
            )

    def follows_optimizer(self, model: ir.Model) -> list[ir.Value]:
        """Return the parameters that an optimizer updates.

        Raises:
            GraphoptError: there are none.
        """
        if not (parameters := updated(model)):
            raise GraphoptError(
                f"{type(self).__name__} needs an optimizer's update, found none: run the optimizer first"
            )
        return parameters


def has_names(model: ir.Model) -> bool:
    """Return whether all values have different names, and so have the nodes of each graph."""
    names: list[str | None] = []  # of values

    def visit(graph: ir.Graph) -> bool:
        names.extend(x.name for x in {*graph.inputs, *graph.initializers.values()})
        for node in graph:
            names.extend([y.name for y in node.outputs])
            if not all(map(visit, subgraphs(node))):
                return False
        return _differ([node.name for node in graph])

    return visit(model.graph) and _differ(names)


def _differ(names: Sequence[str | None]) -> bool:
    """Return whether there are no two equal names, and none is missing."""
    return all(names) and len(set(names)) == len(names)


def fix_names(model: ir.Model) -> None:
    """Name all values and nodes, each value of a body unlike all values around it, those of later nodes included."""
    NameFixPass()(model)
    _separate(model.graph, set())


def _separate(graph: ir.Graph, around: Set[str]) -> None:
    """Rename the values of a body, and of those in it, that have the name of a value around it."""
    own = [*values_in(graph), *graph.initializers.values()]
    names = {*around, *map(name_of, own)}
    for x in own:
        if name_of(x) in around:
            x.name = next(new for i in itertools.count(1) if (new := f"{x.name}_{i}") not in names)
            names.add(x.name)
    for node in graph:
        for body in subgraphs(node):
            _separate(body, names)


@contextlib.contextmanager
def interface_kept(model: ir.Model) -> Iterator[None]:
    """Restore the names of inputs and outputs, and the outputs' metadata, after the rewriters in the block."""
    outputs = model.graph.outputs
    names = [(value, value.name) for value in [*model.graph.inputs, *model.graph.initializers.values()]]
    before = [(name_of(output), dict(metadata.all_of(output))) for output in outputs]
    taken = {name for name, _ in before}
    try:
        yield
    finally:
        with Emitter(model) as op:
            for i, (name, notes) in enumerate(before):
                output = outputs[i]
                if output.producer() is not None and output.name not in taken:
                    output.name = name
                if output.name != name:
                    outputs[i] = op.Identity(output, _outputs=[name])
                metadata.all_of(outputs[i]).update(notes)
        for value, own in names:
            if value.name != own:
                value.name = own


@contextlib.contextmanager
def protect(nodes: Iterable[ir.Node]) -> Iterator[None]:
    """Hide nodes from rewriters by moving them to private domains while the block runs.

    Nodes with different notes are in different domains, so that no rewriter takes one for another.
    """
    domains = {node: node.domain for node in nodes}
    kinds: dict[object, int] = {}
    for node, domain in domains.items():
        holders: list[metadata.Holder] = [node, *node.outputs]
        notes = [tuple(sorted(metadata.all_of(holder).items())) for holder in holders]
        node.domain = f"graphopt.hidden.{kinds.setdefault((domain, *notes), len(kinds))}"
    try:
        yield
    finally:
        for node, domain in domains.items():
            node.domain = domain


def needed(model: ir.Model) -> list[ir.Node]:
    """Return the nodes that rewriters must keep although they look redundant or equal to others.

    They have a meaning that rewriters do not see: they stop gradients, round weights to their form in the file,
    compute something else in inference, mix rows, or show where a step is cut for several workers. Some keep outer
    values from becoming outputs of bodies, which would be invalid.
    """
    nodes = list(all_nodes(model.graph))
    results = {output for node in nodes for body in subgraphs(node) for output in body.outputs}
    return [
        node
        for node in nodes
        if (node.op_type == "Identity" and node.outputs[0] in results)
        or (metadata.has_notes(node) and (_is_seam(node) or _has_meaning(node)))
    ]


def _has_meaning(node: ir.Node) -> bool:
    flags = (metadata.STOP_GRADIENT, STORED, metadata.MIXED, metadata.FAKE)
    return any(flag.is_set(node) for flag in flags) or any(map(InferenceForm.is_on, node.outputs))


def seams(model: ir.Model) -> list[ir.Node]:
    """Return the nodes at which a training graph is cut for several workers."""
    return [node for node in model.graph if metadata.has_notes(node) and _is_seam(node)]


def _is_seam(node: ir.Node) -> bool:
    flags = (metadata.POSITIONS, metadata.BATCH_COUNT, metadata.BATCH_CORRECTION, metadata.BATCH_GRADIENT)
    return any(flag.is_set(node) for flag in flags) or any(
        metadata.GRADIENT_OF.read(y) or metadata.BATCH_WEIGHT.read(y) for y in node.outputs
    )


def retire(model: ir.Model, output: ir.Value) -> None:
    """Remove an output's role and rename it, so that another value can have its role and name."""
    metadata.ROLE.remove(output)
    output.name = f"{output.name}.before.{len(model.graph)}"


def remove_unused_nodes(body: ir.Graph) -> None:
    """Remove the nodes of a body whose outputs nothing reads."""
    RemoveUnusedNodesPass()(ir.Model(body, ir_version=IR_VERSION))


Pattern = str | tuple[str, ...] | list[str] | None


def matches(name: str | None, pattern: Pattern) -> bool:
    """Return whether `name` matches at least one shell-style pattern; None matches nothing."""
    patterns = [pattern] if isinstance(pattern, str) else pattern or []
    return any(fnmatchcase(name or "", pattern) for pattern in patterns)


def no_match(where: str, what: str, names: Iterable[str | None], owns: str = "trains") -> GraphoptError:
    """Return the error of a pattern that matches nothing; `names` are what the model trains or has."""
    return GraphoptError(f"{where} matches no {what}; the model {owns}: {', '.join(map(str, names)) or 'none'}")


def selects(pattern: Pattern, value: ir.Value) -> bool:
    """Return whether a pattern matches a name of an initializer."""
    return bool(pattern) and any(matches(name, pattern) for name in names_of(value))


def names_of(value: ir.Value) -> list[str]:
    """Return the names by which patterns select an initializer: its own, its paths in the framework, and its copies'.

    An initializer whose path the file does not tell belongs to the module that reads it: `encoder.onnx::Add_7`.
    """
    name, origin = str(value.name), origins.Origin.read(value)
    if origin is None:
        return [name]
    module = [f"{origin.module}.{name}"] if origin.module else []
    return [name, *origin.sources, *module, *(copy.name for copy in origin.copies)]
