"""Compare the predictions of a training graph before its first step with those of its file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph import inference
from graphopt.graph.checking import messages_of
from graphopt.graph.dequantization import dequantize_late
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import original_name
from graphopt.graph.operators import DRAWING
from graphopt.graph.provenance import Provenance
from graphopt.graph.roles import STATE, Role, outputs_of_model, with_role
from graphopt.graph.traversal import extracted_model
from graphopt.graph.values import given as given_of
from graphopt.graph.values import is_floating, name_of
from graphopt.runtime.checks.findings import Finding
from graphopt.runtime.checks.slopes import ROUNDINGS, ROUNDINGS_OF_NOISE, Arrays, allowed_error, norm_of
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session

PART = 2**22  # numbers that are compared at once
NOISY_RUNS = 4  # of the training graph, to see how much of a difference is rounding
OWN_PACKAGES = ("passes", "graphopt")


def file_findings(
    device: Device, model: ir.Model, origin: Provenance | None, state: Arrays, batch: Arrays
) -> Iterator[Finding]:
    """Yield a finding for each output of the file, or one that says why it is not compared."""
    reason = _obstacle(model, origin, state)
    if reason is None:
        assert origin is not None and origin.file is not None
        content = None
        try:
            outline = origin.file.outline()
            _check_modes(origin.passes, messages_of(onnx.NodeProto, outline))
            content = origin.file.content()
            found = _compared(device, model, content, outline, state, batch)
        except Exception as error:  # noqa: BLE001 - the runtime raises many types; the table says which
            found, reason = [], line(error)
        # What agrees needs no proof that the file is the same.
        if not (found and all(x.verdict == "agrees" for x in found)) and not origin.file.is_same(content):
            found, reason = [], "the file has changed since it was compiled"
        yield from found
        if not found and reason is None:
            reason = "the training graph has no output of the file"
    if reason is not None:
        yield Finding("file", "all", "not checked", reason=reason)


def _obstacle(model: ir.Model, origin: Provenance | None, state: Arrays) -> str | None:
    """Return why the predictions need not be those of the file, or None."""
    if origin is None or origin.file is None:
        return "the file is not known"
    for given in origin.passes.values():
        for item in given:
            if type(item).__module__.partition(".")[0] not in OWN_PACKAGES:
                name = getattr(item, "__name__", type(item).__name__)
                return f"{name} is a pass of your own, which may change predictions"
            if reason := item.alters:
                return f"{type(item).__name__} {reason}"
    own = {name_of(x) for x in with_role(model, *STATE)}
    if not origin.is_initial({name: x for name, x in state.items() if name in own}):
        return "the state is no longer that of the file"
    return None


def _check_modes(passes: Mapping[str, Sequence[object]], nodes: Sequence[onnx.NodeProto]) -> None:
    """Raise an error if the file is in training mode, and a pass lets other operators train than it does."""
    from passes.training_mode import SWITCHES, TrainingMode

    trains = [(SWITCHES[node.op_type], _is_in_training(node)) for node in nodes if node.op_type in SWITCHES]
    if not any(is_training for _, is_training in trains):
        return
    for item in (item for given in passes.values() for item in given):
        if isinstance(item, TrainingMode) and not item.as_exported:
            kept = all(getattr(item, switch) == is_training for switch, is_training in trains)
            if item.leave_out or not kept:
                raise GraphoptError("TrainingMode changes the mode of the file on purpose")


def _compared(
    device: Device,
    model: ir.Model,
    content: bytes | str | None,
    outline: onnx.ModelProto,
    state: Arrays,
    batch: Arrays,
) -> list[Finding]:
    if content is None:
        raise GraphoptError("its weights are too many to be opened again")
    nodes = messages_of(onnx.NodeProto, outline)
    if any(node.op_type in DRAWING for node in nodes):
        raise GraphoptError("the file draws random numbers")
    if any(node.op_type == "DynamicQuantizeLSTM" for node in nodes):
        raise GraphoptError("each thread of its DynamicQuantizeLSTM rounds the states of its own rows by their range")
    if any(x.name == "accuracy_level" and x.i > 1 for node in nodes for x in node.attribute):
        raise GraphoptError("its accuracy_level lets the runtime round what it multiplies by weights in few bits")
    trains = {node.op_type for node in nodes if _is_in_training(node)}
    if "Dropout" in trains:
        raise GraphoptError("the file has Dropout in training mode, which draws random numbers")
    outputs = outputs_of_model(model)
    if trains:
        part = extracted_model(model, list(model.graph.inputs), outputs)
    else:
        part = inference.extract(model, outputs)
        dequantize_late(part)
    own_names = {original_name(y): name_of(y) for y in part.graph.outputs}
    is_loss = not with_role(model, Role.PREDICTION, Role.SOURCE)
    if is_loss and with_role(model, Role.METRIC):
        raise GraphoptError("the loss is more than the file's own, such as with a penalty")
    is_low = device.frozen == "low"
    options = device.new_session_options(optimized=False, low_memory=is_low)
    if is_low:  # else, kernels of products take copies of the weights
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        session = device.open(content, options)
    except Exception as error:
        raise GraphoptError(f"onnxruntime refuses the file as it is: {line(error)}") from error
    for x in session.get_inputs():
        if x.name not in batch:
            raise GraphoptError(f"the file takes {x.name!r}, which the training graph does not")
    if is_loss and len(session.get_outputs()) == 1:
        own_names = {session.get_outputs()[0].name: name for name in own_names.values()}
    names = [y.name for y in session.get_outputs() if y.name in own_names]
    feeds = {x.name: _typed(batch[x.name], x.type) for x in session.get_inputs()}
    try:
        expected = dict(zip(names, session.run(names, feeds), strict=True)) if names else {}
    except Exception as error:
        raise GraphoptError(f"onnxruntime cannot run the file on this batch: {line(error)}") from error
    del session  # and its memory
    own = Session(device, part)
    given = {**state, **batch}
    found = own.compute_arrays(given)
    types = [y.dtype for node in part.graph.all_nodes() for y in node.outputs if y.dtype]
    units = [ROUNDINGS.get(dtype, 2.0**-52) for dtype in types]
    unit = max(
        [ROUNDINGS.get(ir.DataType.from_numpy(np.asarray(x).dtype), 2.0**-23) for x in expected.values()]
        + [u for u in units if u <= 2.0**-7]
    )
    findings = []
    for name, x in expected.items():
        here = own_names[name]
        noisy = (arrays[here] for arrays in _noisy(own, given, unit))
        off_ties = (arrays[here] for arrays in _off_ties(device, part, given, unit))
        findings.append(_finding(name, np.asarray(x), found[here], unit, noisy, off_ties))
    return findings


def _finding(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    unit: float,
    noisy: Iterator[np.ndarray],
    off_ties: Iterator[np.ndarray],
) -> Finding:
    """Compare an output of the file with the training graph's, and with what rounding makes of that."""
    if x.size == y.size == 1:
        x, y = x.reshape(()), y.reshape(())
    if (1, *x.shape) == y.shape:  # a Squeeze without axes leaves out the only row, too
        y = y[0]
    if x.shape != y.shape:
        return Finding("file", name, "differs", x.size, y.size, reason=f"shapes {x.shape} and {y.shape}")
    if x.dtype.kind not in "fV":
        if np.array_equal(x, y):
            return Finding("file", name, "agrees")
        return Finding("file", name, "not checked", reason="other whole numbers, which rounding may explain")
    parts = max(1, x.size // PART)  # so that not all numbers are in memory once more

    def compared(x: np.ndarray, y: np.ndarray) -> tuple[bool, list[float], tuple[float, float]]:
        """Return whether the same numbers are finite, norms of both and of the difference, and where it is most."""
        same, squares, worst, numbers = True, np.zeros(3), -1.0, (0.0, 0.0)
        for some in zip(np.array_split(x.ravel(), parts), np.array_split(y.ravel(), parts), strict=True):
            a, b = (part.astype(np.float64) for part in some)
            same = same and np.array_equal(np.isfinite(a), np.isfinite(b))
            a, b = np.nan_to_num(a, posinf=0, neginf=0), np.nan_to_num(b, posinf=0, neginf=0)
            squares += [norm_of(each) ** 2 for each in (a, b, a - b)]
            if a.size and np.abs(a - b).max() > worst:
                at = int(np.abs(a - b).argmax())
                worst, numbers = abs(a[at] - b[at]), (float(a[at]), float(b[at]))
        return same, [*np.sqrt(squares)], numbers

    same, (*norms, off), numbers = compared(x, y)
    scale = max(*norms, 1e-300)
    off /= scale
    limit = allowed_error(unit)  # relative to the norm of the predictions
    if not same or off > limit:
        noises = itertools.chain(
            (20 * compared(other, y)[1][-1] for other in noisy),
            (compared(other, y)[1][-1] for other in off_ties),
        )
        if not same or all(off > 10 * limit + noise / scale for noise in noises):
            return Finding("file", name, "differs", *numbers, reason=f"off by {100 * off:.2g} %")
    return Finding("file", name, "agrees", *numbers)


def _noisy(session: Session, given: Arrays, unit: float) -> Iterator[Arrays]:
    """Yield predictions whose state and data have noise of some roundings, to see what rounding does."""
    rng = np.random.default_rng(0)
    for _ in range(NOISY_RUNS):
        moved = {
            name: np.asarray(x * (1 - ROUNDINGS_OF_NOISE * unit * rng.random(x.shape)), x.dtype)
            if x.dtype.kind in "fV"
            else x
            for name, x in given.items()
        }
        yield session.compute_arrays(moved)


def _off_ties(device: Device, part: ir.Model, given: Arrays, unit: float) -> Iterator[Arrays]:
    """Yield predictions in which numbers half way between two integers are rounded to the other one."""
    part = part.clone()
    quantizers = [node for node in part.graph if node.op_type == "QuantizeLinear" and is_floating(node.inputs[0])]
    with Emitter(part) as op:
        for node in quantizers:
            x = given_of(node.inputs[0])
            with op.before(node):
                node.replace_input_with(0, x * (1 + ROUNDINGS_OF_NOISE * unit))
    if quantizers:
        yield Session(device, part).compute_arrays(given)


def _is_in_training(node: onnx.NodeProto) -> bool:
    """Return whether a node of a file behaves as in training; of a Dropout, whether its mode is an input."""
    if node.op_type == "Dropout":
        return len(node.input) > 2 and bool(node.input[2])
    return any(x.name == "training_mode" and x.i for x in node.attribute)


def _typed(x: np.ndarray, kind: str) -> np.ndarray:
    """Return an array in the type that ONNX Runtime names."""
    names = {"float": "float32", "double": "float64"}
    name = kind.removeprefix("tensor(").removesuffix(")")
    if name == "bfloat16":
        return x
    return x.astype(names.get(name, name)) if name != "string" else x
