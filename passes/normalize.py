"""Convert any inference model to the form that the other passes require."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.rewriter import RewriteRule

import passes.lowering as lowering
from graphopt.data.tables import Columns
from graphopt.errors import GraphoptError, line, unknown
from graphopt.graph import operators
from graphopt.graph.checking import refuse_foreign
from graphopt.graph.declarations import find_ranks, forget
from graphopt.graph.emitter import Emitter
from graphopt.graph.encoders import detach_encoders, string_inputs
from graphopt.graph.limits import check_constants
from graphopt.graph.metadata import OF_BATCH, ORIGINAL_NAME, Derived, original_name
from graphopt.graph.operators import POOLS
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.origins import Origin
from graphopt.graph.postprocessing import detach_outputs, remember
from graphopt.graph.rewriting import Pass, interface_kept, needed, protect
from graphopt.graph.roles import STATE, Role, role_of, set_role, with_role
from graphopt.graph.rules import rewrite, rule_set
from graphopt.graph.shapes import fold_shapes, infer, is_ceiled, is_inferred
from graphopt.graph.sizes import has_sizes, sizes_of, unify_sizes
from graphopt.graph.state import make_room
from graphopt.graph.traversal import all_nodes
from graphopt.graph.values import constant_before, constant_of, dims_of, given, is_floating, name_of, swap
from graphopt.graph.windows import Window, is_misplaced, is_same, pad_mode, padded_window, window_of
from passes.free_batch import free_batch, name_squeezed_axes
from passes.gradients.registry import NO_GRADIENT, has_rule
from passes.gradients.rules.shape import spread_pads
from passes.lowering import classical
from passes.lowering.attention import mark_scores
from passes.lowering.caches import choose_branches, remove_caches, set_aside
from passes.lowering.sequences import lower_sequences
from passes.upgrades import align, upgrade
from passes.weights import read_origins

_LEAST_INITIALIZER = 2  # constants of this many numbers and more become initializers
NAMES_OF_THE_RUNTIME = ("gemm_input_shape", "gemm_output_shape")

_SCALED: list[Callable[[ir.Value], ir.Value]] = [lambda x: x / math.sqrt(2), lambda x: x * math.sqrt(0.5)]
_GROUPED: list[Callable[[ir.Value, ir.Value], ir.Value]] = [
    lambda x, phi: (x * phi) * 0.5,
    lambda x, phi: x * (phi * 0.5),
    lambda x, phi: (x * 0.5) * phi,
]


def _gelu_rule(
    scaled: Callable[[ir.Value], ir.Value], grouped: Callable[[ir.Value, ir.Value], ir.Value]
) -> RewriteRule:
    return RewriteRule(lambda op, x: grouped(x, op.Erf(scaled(x)) + 1.0), lambda op, x: op.Gelu(x))


# Exporters before opset 20 write x (1 + erf(x / sqrt 2)) / 2, Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415
GELU = rule_set([_gelu_rule(*forms) for forms in itertools.product(_SCALED, _GROUPED)], commute=True)


def _remove_copies(model: ir.Model) -> None:
    """Remove slices of everything, and expansions to the same sizes, of which files without optimization are full."""
    copies = []
    for node in all_nodes(model.graph):
        x, y = (node.inputs[0], node.outputs[0]) if node.op_type in ("Expand", "Slice") else (None, None)
        if node.domain or x is None or y is None or not (has_sizes(x) and has_sizes(y)):
            continue
        steps = node.inputs[4] if len(node.inputs) > 4 else None
        numbers = None if steps is None else constant_of(steps)
        forward = steps is None or (numbers is not None and bool((numbers == 1).all()))
        if forward and sizes_of(x) == sizes_of(y):
            copies.append(node)
    for node in copies:
        node.op_type = "Identity"
        node.resize_inputs(1)
    if copies:
        with interface_kept(model), protect(needed(model)):
            common.IdentityEliminationPass()(model)
        common.RemoveUnusedNodesPass()(model)


@dataclass(frozen=True)
class Normalize(Pass):
    """Convert to opset 21 and IR version 10, and infer the type of every value.

    - Functions without a gradient rule are inlined.
    - Operators of ONNX Runtime and of classical machine learning become standard operators (see `passes.lowering`), and
      a Gelu in elementary operators becomes a Gelu.
    - Sequences become the tensors that they contain, if the graph determines these.
    - Outputs that are strings, and labels of classical models, are removed. The trained model has them again.
    - Nodes that encode strings are detached, and the numbers that they compute become inputs. Executors take the
      strings and run these nodes before each step. The trained model has them again.
    - Caches of decoders are removed: the past is empty, and inputs that only caches read go. The trained model has the
      outputs of caches again.
    - Weights in nodes (`Constant` and `ConstantOfShape` of more than one number) become initializers, initializers
      are no longer inputs, and unknown dimensions get names.
    - A model that needs a newer opset keeps it, with a warning.

    Args:
        batch: `free` replaces a fixed first dimension of the inputs, such as 1, by one of any size. It is proved from
            the operators that no row depends on another, and ONNX Runtime computes two batches together and one
            after the other. The trained model takes batches of any size, too.
        inputs: numbers in place of inputs, by name, such as a sample rate. The trained model does not have these
            inputs.

    Raises:
        GraphoptError: the model is invalid, the type of a value cannot be inferred, or a lowering does not cover how a
            node uses its operator. The error names the node. With `batch`, also: a node mixes rows. With `inputs`:
            the model has no such input, or one of an open shape.

    >>> model = graphopt.load(models.linear((2,), 1))
    >>> passes.Normalize()(model).model.opset_imports[""]
    21
    """

    batch: Literal["free"] | None = None
    inputs: Mapping[str, float] | None = None

    def rewrite(self, model: ir.Model) -> None:
        _replace_inputs(model, self.inputs or {})
        is_classical = classical.is_classical(model)
        origins = read_origins(model)
        remember(model)
        if not with_role(model, *STATE):
            for node in all_nodes(model.graph):  # in files that graphopt 0.1 trained before its release
                OF_BATCH.remove(node)
        sources = [y for y in model.graph.outputs if y.producer() is None]
        if sources:  # inputs or weights themselves
            detach_outputs(model, sources, lambda value: True)
        _rename_what_the_runtime_names(model)
        read = {name_of(x) for x in model.graph.inputs if x.uses()}
        with interface_kept(model):
            propagate = self._inline(model)
        remove_caches(model)
        if string_inputs(model):
            propagate = _encode_beforehand(model)
        with interface_kept(model):
            propagate = self._prepare(model, propagate)
            if not is_inferred(model):
                infer(model, propagate)
            if lower_sequences(model):
                propagate = forget(model)
            if name_squeezed_axes(model):
                propagate = forget(model)
            fold_shapes(model)
            if self.batch:
                free_batch(model)
            if any(node.op_type == "Erf" for node in model.graph):
                GELU.apply_to_model(model)
        infer(model, propagate)
        unify_sizes(model)  # also those that follow from constants, which the file may compute
        _remove_copies(model)
        pad_all_axes(model)
        refuse_misplaced(model)
        whole_windows(model)
        if is_classical:
            classical.freeze_scaling(model)
            if model.producer_name == "skl2onnx":
                classical.freeze_preprocessing(model)
            rewrite(model, [classical.LOGISTIC])
        outputs = model.graph.outputs
        of_rows = [y for y in outputs if not is_floating(y) and not Derived.is_on(y)]  # a set is no label
        labels = [y for y in of_rows if is_classical or y.dtype == ir.DataType.STRING]
        if labels:
            detach_outputs(model, labels, is_floating, Role.SOURCE if any(map(is_floating, outputs)) else None)
        set_aside(model, read)
        for value in model.graph.initializers.values():
            if name_of(value) in origins and is_floating(value) and Origin.read(value) is None:
                origins[name_of(value)].write(value)
        mark_scores(model.graph)
        check_constants(model)
        make_room(model)
        for value in model.graph.inputs:
            set_role(value, role_of(value) or Role.DATA)
        for value in model.graph.outputs:
            set_role(value, role_of(value) or Role.PREDICTION)

    def _inline(self, model: ir.Model) -> bool:
        def is_inlined(function: ir.Function) -> bool:
            return not has_rule(function.domain, function.name)

        align(model, filter(is_inlined, model.functions.values()))
        try:
            common.InlinePass(criteria=is_inlined)(model)
        except ValueError as error:  # functions have other opsets of further domains than the model
            raise GraphoptError(f"cannot inline the model's functions: {line(error)}") from error
        common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
        refuse_foreign(model)
        for node in all_nodes(model.graph):  # whose default is 1, which inference takes for 0
            if node.op_type == "STFT" and node.domain == "" and "onesided" not in node.attributes:
                node.attributes.add(ir.AttrInt64("onesided", 1))
        choose_branches(model)
        find_ranks(model)
        propagate = forget(model)
        return forget(model) if _unsqueeze_signals(model) else propagate

    def _prepare(self, model: ir.Model, propagate: bool) -> bool:
        pads_for_output_shapes(model)
        upgrade(model)
        before = 0
        while count := sum(lowering.is_lowered(x) or lowering.moves_integers(x) for x in all_nodes(model.graph)):
            with Emitter(model) as op:
                lowering.lower_operators(op, model.graph, is_last=count == before)
            before, propagate = count, forget(model)
        expand(model, propagate)
        convert(model)
        common.RemoveInitializersFromInputsPass()(model)
        materialize(model)
        lift(model)
        try:
            with protect(needed(model)):
                common.IdentityEliminationPass()(model)
        except ValueError as error:
            raise GraphoptError(
                f"expected declared shapes to match the inferred ones, found another: {line(error)}"
            ) from error
        common.RemoveUnusedNodesPass()(model)
        common.NameFixPass()(model)
        return propagate


def _replace_inputs(model: ir.Model, numbers: Mapping[str, float]) -> None:
    known = {name_of(x): x for x in model.graph.inputs if not x.is_initializer()}
    for name, number in numbers.items():
        x = known.get(name)
        if x is None:
            raise GraphoptError(f"Normalize(inputs=...): {unknown('input', name, known)}")
        if x.dtype is None or x.shape is None or not x.shape.is_static():
            raise GraphoptError(f"Normalize(inputs=...): {name}: expected an input of a known shape, found {x.shape}")
        with np.errstate(all="ignore"):
            array = np.full(x.shape.numpy(), number, np.float64).astype(x.dtype.numpy())
        if not np.allclose(array.astype(np.float64), number, rtol=1e-2):
            raise GraphoptError(f"Normalize(inputs=...): {name}: expected a number in {x.dtype}, found {number}")
        node = ir.node("Constant", [], attributes={"value": ir.tensor(array)})
        model.graph.insert_before(next(iter(model.graph)), node)
        x.replace_all_uses_with(node.outputs[0])
        model.graph.inputs.remove(x)


def _encode_beforehand(model: ir.Model) -> bool:
    """Detach the nodes that encode strings, in the opset of the other nodes."""
    if Columns.taken_by(model) is not None:
        name = name_of(string_inputs(model)[0])
        raise GraphoptError(
            f"input {name!r}: expected numbers, found strings: train the model of features, "
            "graphopt.data.Columns.without(model)"
        )
    with interface_kept(model):
        pads_for_output_shapes(model)
        upgrade(model)
        convert(model)
    detach_encoders(model)
    return forget(model)


def expand(model: ir.Model, propagate: bool) -> None:
    """Replace every operator that ONNX defines as a function by the body of the function, unless it has a rule."""
    functions = [name for name in _function_names() if not has_rule("", name) and ("", name) not in NO_GRADIENT]
    nodes = [node for node in model.graph if node.domain == "" and node.op_type in functions]
    version = model.opset_imports.get("", OPSET)
    for node in nodes:  # inference and the inliner ignore the defaults of missing attributes
        defaults = operators.defaults("", node.op_type, version)
        attributes = ir.convenience.convert_attributes(defaults | dict(node.attributes))
        node.attributes.update({x.name: x for x in attributes})
    if nodes:
        infer(model, propagate)
    for node in nodes:
        body = _body(node, version, functions)
        arguments = zip(body.inputs, [x for x in node.inputs if x is not None], strict=True)
        for formal, x in arguments:
            ir.convenience.replace_all_uses_with(formal, x)
        emitted, outputs = list(body), list(body.outputs)
        body.outputs.clear()
        body.remove(emitted)
        for value in [output for part in emitted for output in part.outputs]:
            value.name = f"{node.outputs[0].name}/{value.name}" if value.name else value.name
        used = [y for y in node.outputs if y.name]
        names = [y.name for y in used]
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], emitted, used, outputs)
        for y, name in zip(outputs, names, strict=True):
            y.name = name


@functools.cache
def _function_names() -> frozenset[str]:
    """Return the operators that ONNX defines as functions in any opset."""
    return frozenset(
        schema.name
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == "" and (schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]
    )


def _body(node: ir.Node, version: int, functions: Sequence[str]) -> ir.Graph:
    """Return the function body of an operator for the types of a node's inputs."""
    inputs = [x and ir.Value(name=f"input{i}", type=x.type, shape=x.shape) for i, x in enumerate(node.inputs)]
    outputs = [ir.Value(name=y.name and f"output{i}") for i, y in enumerate(node.outputs)]
    call = ir.Node("", node.op_type, inputs, node.attributes.values(), outputs=outputs)
    present = [x for x in inputs if x is not None], [y for y in outputs if y.name]
    graph = ir.Graph(*present, nodes=[call], opset_imports={"": version}, name="call")
    proto = ir.to_proto(ir.Model(graph, ir_version=IR_VERSION))
    missing = proto.graph.value_info.add(name="")
    missing.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    names = [("", name) for name in functions]
    inlined = onnx.inliner.inline_selected_functions(proto, names, inline_schema_functions=True)
    return ir.from_proto(inlined).graph


def _rename_what_the_runtime_names(model: ir.Model) -> None:
    """Rename constants that have names of ONNX Runtime's own, as in files it wrote (tests/faults.py: names)."""
    for value in list(model.graph.initializers.values()):
        if name_of(value).startswith(NAMES_OF_THE_RUNTIME) and not value.is_graph_output():
            ORIGINAL_NAME.write(value, original_name(value))
            value.name = f"from_file/{value.name}"


def convert(model: ir.Model) -> None:
    """Convert the default domain from a newer opset to the working opset, unless the model needs the newer one."""
    version = model.opset_imports[""]
    if version > OPSET:
        nodes = [node for node in all_nodes(model.graph) if node.domain == "" and not _is_older(node)]
        newer = {x.op_type for x in nodes if onnx.defs.get_schema(x.op_type, version).since_version > OPSET}
        if newer:
            warnings.warn(
                f"the model uses opset {version} for {', '.join(sorted(newer))}: its training graph keeps that opset "
                f"and needs a runtime that supports it",
                stacklevel=2,
            )
            return
        model.opset_imports[""] = OPSET
        for node in all_nodes(model.graph):
            node.version = node.version if node.domain else None
    model.ir_version = IR_VERSION


def _is_older(node: ir.Node) -> bool:
    """Return whether a node uses only features of its operator's working version."""
    old = operators.schema_of("", node.op_type, OPSET)
    # Since opset 22, a last pooling window does not start in the padding.
    if old is None or len(node.inputs) > old.max_input or is_ceiled(node):
        return False
    return set(node.attributes) <= set(old.attributes) and operators.fits(old, node.inputs)


def materialize(model: ir.Model) -> None:
    """Replace `ConstantOfShape` nodes of a constant floating-point shape by initializers that contain the numbers."""
    for node in list(model.graph):
        if node.op_type != "ConstantOfShape" or node.domain != "":
            continue
        shape, fill = constant_of(node.inputs[0]), node.attributes.get_tensor("value", None)
        array = np.zeros(1, np.float32) if fill is None else fill.numpy()
        if shape is None or array.dtype.kind != "f" or array.size != 1 or (shape < 0).any():
            continue
        if math.prod(shape.tolist()) < 2:
            continue
        tensor = ir.tensor(np.full(shape, array.item(), array.dtype))
        model.graph.register_initializer(swap(node.outputs[0], ir.val(None, const_value=tensor)))
        model.graph.remove(node, safe=True)


def lift(model: ir.Model) -> None:
    """Replace `Constant` nodes of several numbers by initializers."""
    constants = [node for node in all_nodes(model.graph) if node.op_type == "Constant" and node.domain == ""]
    for node in constants:
        if (floats := node.attributes.pop("value_floats", None)) is not None:
            tensor = ir.tensor(np.array(floats.as_floats(), np.float32), name=node.outputs[0].name)
            node.attributes.add(ir.AttrTensor("value", tensor))
    with protect(
        node for node in constants if (x := node.attributes.get("value")) and x.value.size < _LEAST_INITIALIZER
    ):
        common.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=_LEAST_INITIALIZER)(model)


def pads_for_output_shapes(model: ir.Model) -> None:
    """Replace the `output_shape` of a ConvTranspose by equivalent pads if its input has known sizes, and SAME padding.

    ONNX infers a wrong rank if the output is smaller than the input, and with SAME padding adds `output_padding` to
    the sizes, which ONNX Runtime crops (tests/faults.py: ConvTranspose).
    """
    for node in model.graph:
        if node.op_type != "ConvTranspose" or node.domain != "":
            continue
        x, w = map(given, node.inputs[:2])
        sizes = [size for size in (x.shape or ())[2:] if isinstance(size, int)]
        taps = [size for size in (w.shape or ())[2:] if isinstance(size, int)]
        if w.shape is None or len(taps) < len(w.shape) - 2:
            continue
        window = window_of(node, taps)
        more = node.attributes.get_ints("output_padding", [0] * len(taps))
        if "output_shape" not in node.attributes:
            if is_same(node):
                _set_pads(node, window.same_of_transposed(more, pad_mode(node)))
        elif sizes and len(sizes) == len(taps):
            wanted = node.attributes.get_ints("output_shape")[-len(taps) :]
            totals = window.cropped(sizes, wanted, more)
            if (totals >= 0).all():
                node.attributes.pop("output_shape")
                _set_pads(node, window.halved(totals, pad_mode(node)))


def _set_pads(node: ir.Node, window: Window) -> None:
    node.attributes.pop("auto_pad", None)
    node.attributes.add(ir.AttrInt64s("pads", [*window.begin, *window.end]))


def _unsqueeze_signals(model: ir.Model) -> bool:
    """Give signals [batch, samples] of an STFT, which ONNX Runtime takes, the last axis that ONNX requires.

    Returns: whether there are such signals.
    """
    found = False
    for node in all_nodes(model.graph):
        x = node.inputs[0] if node.op_type == "STFT" and node.domain == "" else None
        if x is None or x.shape is None or len(x.shape) != 2:
            continue
        signal = ir.val(f"{node.outputs[0].name}/signal")
        inputs = [x, constant_before(node, np.array([2]), "axis")]
        node.graph.insert_before(node, ir.node("Unsqueeze", inputs, outputs=[signal]))  # type: ignore[union-attr]
        node.replace_input_with(0, signal)
        found = True
    return found


def pad_all_axes(model: ir.Model) -> None:
    """Extend a Pad of some axes to all axes: Transposes are moved past `axes` (tests/faults.py: Pad-axes)."""
    for node in all_nodes(model.graph):
        if node.op_type != "Pad" or node.domain != "" or len(node.inputs) < 4:
            continue
        x, pads, _, axes = node.inputs
        widths, at = constant_of(pads), constant_of(axes)
        if x is None or x.shape is None or widths is None or at is None:
            continue
        spread = constant_before(node, spread_pads(len(x.shape), widths, at), "pads")
        node.replace_input_with(1, spread)
        node.resize_inputs(3)


def refuse_misplaced(model: ir.Model) -> None:
    """Raise an error for pools whose SAME pads ONNX Runtime places otherwise than the standard."""
    for node in all_nodes(model.graph):
        if node.op_type not in POOLS or node.domain != "":
            continue
        x = node.inputs[0]
        if x is not None and x.shape is not None and is_misplaced(node, x.shape[2:]):
            raise GraphoptError(
                f"{node.op_type} that computes {node.outputs[0].name!r}: expected pads, found "
                f"auto_pad={pad_mode(node)!r}, for which ONNX Runtime moves dilated windows, and windows with gaps "
                "between them: write the pads that you mean"
            )


def whole_windows(model: ir.Model) -> None:
    """Drop the `ceil_mode` of pools where it adds no window: ONNX infers one more (tests/faults.py: ceil-mode)."""
    for node in filter(is_ceiled, all_nodes(model.graph)):
        x, y = given(node.inputs[0]), node.outputs[0]
        window = padded_window(node, dims_of(x)[2:])
        axes = list(zip(dims_of(x)[2:], dims_of(y)[2:], strict=True))
        if window is not None and all(
            isinstance(size, int) and isinstance(count, int) and window.reach(i, count) <= size + window.end[i]
            for i, (size, count) in enumerate(axes)
        ):
            node.attributes.pop("ceil_mode")
