"""Write the proof of a host folder: a batch, and sums of what the plain step computes from it.

A host compares its first call of each graph with them. A sum adds the numbers of an output, or the change of a state,
with random signs. The plain step computes in float64, where the runtime has kernels for it. A sum may differ by what
some roundings of state, data and products change, which is measured in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.memory import step_bytes
from graphopt.graph.roles import STATE, Role, with_role
from graphopt.graph.storage import weight_bytes
from graphopt.graph.values import dtype_of, name_of, next_of
from graphopt.runtime.checkpoint import state_bytes
from graphopt.runtime.checks.first_check import MOST_CONVERTED
from graphopt.runtime.checks.precise import in_float64
from graphopt.runtime.checks.slopes import ROUNDINGS, ROUNDINGS_OF_NOISE, Arrays, allowed_error, norm_of
from graphopt.runtime.device import Device, installed_runtime
from graphopt.runtime.random_inputs import ROWS, SIZES, open_sizes, random_inputs
from graphopt.runtime.session import Session
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.translation import round_products

_log = logging.getLogger(__name__)

PROOF, DEBUG = "proof.safetensors", "debug.safetensors"
_PERIOD = 1021  # numbers of a feed, after which they repeat
MOST_BYTES, MOST_SHOWN = (
    2**30,
    2**26,
)  # that a step takes of which there is a proof, and of which all values are compared
NOISY_STEPS, NOISE = 3, 20  # how many steps measure rounding, and how many times as much of it is allowed
SIGNS = 3  # sums of each output


def proof_batch(step: ir.Model) -> Arrays | None:
    """Return a batch of random numbers for a training graph with its initial state.

    None if weights are too many, sizes of feeds cannot be chosen, or there is no ONNX Runtime here.
    """
    try:
        installed_runtime()
    except GraphoptError:
        return None
    device = Device("cpu", native=False, verify=False)
    if weight_bytes(step) > MOST_CONVERTED or (sizes := open_sizes(step, ROWS)) is None:
        return None
    copy = step.clone()
    batch = random_inputs(copy, sizes[1] or SIZES[0], device, StateBuffers(device, copy))
    if _bytes(copy, batch) > MOST_BYTES:
        return None
    return {name: np.resize(x.ravel()[:_PERIOD], x.shape) for name, x in batch.items()}


def proof_files(
    plain: Mapping[str, ir.Model],
    lowered: ir.Model,
    outputs: Mapping[str, Sequence[str]],
    initial: Arrays,
    batch: Arrays,
) -> dict[str, bytes]:
    """Return the files of a proof by name; none if a report is not finite, or the runtime stops on the batch.

    The proof has, of each feed, numbers that repeat, `feed.NAME`, and its shape, `shape.NAME`; and of each graph
    `graph.NAME` [outputs, 1 + SIGNS] in float64: how much the sums of an output may differ, and the sums. The debug
    file has the same of each value of the training graph, `debug.numbers`; a line for each with its operator and
    name, `debug.names`; and bytes that make these values outputs of a training graph which they follow, `debug.graph`.

    Args:
        plain: the graphs of a host by name, before they are lowered.
        lowered: the training graph that a host runs.
        outputs: the names of the outputs that are compared, by graph.
        initial: the state and hyperparameters by name.
        batch: as `proof_batch` returns it.
    """
    for fed in _batches(plain["train"], batch):
        arrays = {**initial, **fed}
        if proof := _tables(plain, outputs, arrays):
            break
    else:
        return {}
    for name, x in fed.items():
        proof[f"feed.{name}"], proof[f"shape.{name}"] = x.ravel()[:_PERIOD], np.array(x.shape, np.int64)
    files = {PROOF: state_bytes(proof)}
    try:
        if _bytes(plain["train"], batch) <= MOST_SHOWN:
            files[DEBUG] = state_bytes(_debug(lowered, arrays))
    except Exception as error:  # noqa: BLE001 - as above; hosts name no node then
        _log.info("no %s: %s", DEBUG, line(error))
    return files


def _batches(step: ir.Model, batch: Arrays) -> Iterator[Arrays]:
    """Yield a batch, and others whose whole numbers are above 0: they may be lengths by which a network divides."""
    yield batch
    whole = [name_of(x) for x in with_role(step, Role.DATA) if batch[name_of(x)].dtype.kind in "iu"]
    for values in ([1, 2], [1]) if whole else ():
        repeated = np.resize(values, _PERIOD)
        yield {**batch, **{name: np.resize(repeated, batch[name].shape).astype(batch[name].dtype) for name in whole}}


def _tables(plain: Mapping[str, ir.Model], outputs: Mapping[str, Sequence[str]], arrays: Arrays) -> Arrays:
    """Return what hosts compare by the names of the proof; none if a loss is not finite or the runtime stops."""
    tables = {}
    try:
        for name, graph in plain.items():
            rows = _rows(graph, arrays, outputs[name])
            if not np.isfinite(rows.get("loss", np.zeros(1))).all():
                return {}
            tables[f"graph.{name}"] = np.array([rows[y] for y in outputs[name]])
    except Exception as error:  # noqa: BLE001 - the runtime raises many types; hosts say that nothing is proven
        _log.info("no proof: %s", line(error))
        return {}
    return tables


def _bytes(step: ir.Model, batch: Arrays) -> int:
    return step_bytes(step, {name: x.shape for name, x in batch.items()})


def _debug(lowered: ir.Model, arrays: Arrays) -> Arrays:
    """Return the arrays of the file that finds the first value of a training graph that differs."""
    shown, suffix = lowered.clone(), onnx.ModelProto()
    known = {y.name for y in shown.graph.outputs}
    found = [(node, y) for node in shown.graph for y in node.outputs if y.name and y.name not in known]
    found = [(node, y) for node, y in found if y.dtype is not None and y.dtype.is_floating_point()]
    shown.graph.outputs.extend(y for _, y in found)
    rows = _rows(shown, arrays, [name_of(y) for _, y in found])
    suffix.graph.output.extend(onnx.ValueInfoProto(name=y.name) for _, y in found)
    text = "".join(f"{node.op_type} {y.name}\n" for node, y in found)
    bytes_of = {"debug.names": text.encode(), "debug.graph": suffix.SerializeToString()}
    numbers = {"debug.numbers": np.array([rows[name_of(y)] for _, y in found]).reshape(-1, 1 + SIGNS)}
    return {**numbers, **{name: np.frombuffer(content, np.uint8) for name, content in bytes_of.items()}}


def _rows(graph: ir.Model, arrays: Arrays, outputs: Sequence[str]) -> dict[str, np.ndarray]:
    """Return how much the sums of an output may differ, and the sums, of each output that is compared."""
    device, rng = Device("cpu", native=False, verify=False), np.random.default_rng(0)
    starts = {next_of(x): name_of(x) for x in with_role(graph, *STATE)} if with_role(graph, Role.NEXT) else {}
    data = {name_of(x) for x in with_role(graph, Role.DATA, *STATE)}
    unit = max(ROUNDINGS.get(y.dtype, 2.0**-52) for node in graph.graph for y in node.outputs if y.dtype is not None)

    def changes(session: Session, model: ir.Model, given: Arrays) -> Arrays:
        types = {name_of(x): dtype_of(x).numpy() for x in model.graph.inputs}
        found = session.compute_arrays({x: np.asarray(given[x], kind) for x, kind in types.items()})
        wide = {y: found[y].astype(np.float64) for y in outputs}
        with np.errstate(invalid="ignore"):
            return {y: x - given[starts[y]] if y in starts else x for y, x in wide.items()}

    exact, spread = changes(*in_float64(device, graph), arrays), dict.fromkeys(outputs, 0.0)
    for trial in range(NOISY_STEPS):
        noisy, given = graph.clone(), dict(arrays)
        if trial:
            round_products(noisy, ROUNDINGS_OF_NOISE * unit, trial)
            for name, x in arrays.items():
                if name in data and x.dtype.kind == "f":
                    given[name] = (x * (1 - ROUNDINGS_OF_NOISE * unit * rng.random(x.shape))).astype(x.dtype)
        found = changes(Session(device, noisy), noisy, given)
        with np.errstate(invalid="ignore"):
            spread = {y: float(np.maximum(spread[y], norm_of(found[y] - x))) for y, x in exact.items()}  # NaN if one is
    rows = {}
    for y, x in exact.items():
        start = norm_of(arrays[starts[y]].astype(np.float64)) if y in starts else float(not x.ndim)
        allowed = allowed_error(unit) * norm_of(x) + 4 * unit * start + NOISE * spread[y]
        rows[y] = np.array([allowed, *sums(x)]) if np.isfinite(allowed) else np.array([np.inf, 0, 0, 0])
    return rows


def sums(x: np.ndarray) -> np.ndarray:
    """Return sums of the numbers of an array with random signs [SIGNS], which hosts compute as this does."""
    i = np.arange(1, x.size + 1, dtype=np.uint32) * np.uint32(0x9E3779B1)
    i = (i ^ (i >> np.uint32(15))) * np.uint32(0x85EBCA6B)
    i ^= i >> np.uint32(13)
    signs = [1.0 - 2.0 * ((i >> np.uint32(k)) & np.uint32(1)) for k in range(SIGNS)]
    return np.array([np.dot(x.ravel(), each) for each in signs])
