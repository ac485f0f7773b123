"""Check training graphs without training, and return what is found as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.compiler import compile
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.loading import Source, load
from graphopt.graph.roles import FED, Role, with_role
from graphopt.graph.values import is_floating, name_of
from graphopt.runtime.checks.findings import CheckTable, Finding
from graphopt.runtime.checks.first_check import FirstCheck
from graphopt.runtime.device import Device
from graphopt.runtime.inputs import encoding_of
from graphopt.runtime.random_inputs import SIZES, random_inputs
from graphopt.runtime.signature import Signature
from graphopt.runtime.state_buffers import StateBuffers


@checked()
def check(
    model: Source,
    data: Mapping[str, Any] | None = None,
    *,
    verify: Literal["first", "full"] = "full",
    threads: int | None = None,
    **steps: Any,
) -> CheckTable:
    """Check a model's training graph on a batch without training, by oracles that share nothing with what made it.

    The training graph's predictions are compared with those of the file, run by ONNX Runtime as it is; gradients with
    central differences of the loss; updates with the published formula of the optimizer. Executors do the same before
    their first step; see their option `verify`. Which weights train is not checked: `report` lists them.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model: an inference model, which is compiled, or a training
            graph.
        data: a batch, arrays by the names of the training graph's inputs; random numbers of the declared types by
            default.
        verify: compare the gradient of each parameter (`full`), or of all along one direction (`first`).
        threads: the number of threads per operator; by default, the runtime's choice.
        steps: the steps of `compile`, such as `loss=passes.CrossEntropy()`. Without a loss, all is checked on a mean
            squared error, and without an optimizer no update.

    Raises:
        GraphoptError: the model cannot be compiled, or the data does not fit. A difference is in the table, and is no
            error.

    >>> from graphopt import models
    >>> table = graphopt.check(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> table.agrees, {finding.verdict for finding in table.findings}
    (True, {'agrees'})
    """
    loaded = _compiled(model, steps)
    device = Device("cpu", threads=threads, verify=verify, native=False)
    buffers = StateBuffers(device, loaded)
    first = FirstCheck(device, loaded, buffers)
    signature = Signature(device, with_role(loaded, *FED))
    if data is not None:
        if not isinstance(data, Mapping):
            raise GraphoptError(f"data: expected arrays by name, found {kind_of(data)}")
        encoding = encoding_of(device, loaded)
        tensors = signature.completed(data if encoding is None else encoding.encoded(data))
        signature.check(tensors)
        signature.check_labels(tensors)
        texts = {name: x for name, x in data.items() if name not in signature.accepted}
        return CheckTable(first.findings({**texts, **signature.arrays(tensors)}), "the data")
    shapes: list[tuple[int, ...]] = []
    findings = list[Finding]()
    for size in SIZES:
        batch = random_inputs(loaded, size, device, buffers)
        if shapes == (shapes := [x.shape for x in batch.values()]):
            break
        findings = first.findings(batch)
        if any(x.part == "gradient" and x.name != "all" for x in findings):
            break
    return CheckTable(findings, "random inputs of the declared types")


def _compiled(model: Source, steps: Mapping[str, Any]) -> ir.Model:
    """Return a training graph, or a copy of the one that is given."""
    given = load(model)
    if with_role(given, Role.PARAMETER):
        if steps:
            raise GraphoptError(f"check: expected a training graph alone, found it with {', '.join(steps)}")
        return given
    if steps.get("loss") is None:
        import passes

        outputs = [name_of(y) for y in given.graph.outputs if is_floating(y)]
        steps = {**steps, "loss": passes.MeanSquaredError(output=outputs[0] if len(outputs) > 1 else None)}
    return load(compile(model, **steps))
