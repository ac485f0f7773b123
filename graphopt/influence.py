"""Compute from gradients of single rows which rows a prediction follows from, and which weights matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.compiler import standard
from graphopt.errors import GraphoptError
from graphopt.graph.loading import Source
from graphopt.graph.rewriting import Pass
from graphopt.runtime.executor import run


@checked()
def influence(
    model: Source,
    train: Mapping[str, np.ndarray],
    test: Mapping[str, np.ndarray] | None,
    loss: Pass,
    *,
    checkpoints: Sequence[Source] | None = None,
    project: int | None = None,
) -> np.ndarray:
    """Return how much each training row lowers the loss of each test row [test, train] (TracIn).

    A number is the inner product of both rows' gradients, summed over the checkpoints (Pruthi et al. 2020,
    arXiv:2002.08484). Without `test`, it is the influence of each row on itself [train], which is large for
    mislabelled and unusual rows; compare it with the loss of the row.

    Args:
        model: as in `graphopt.grad`, trained.
        train: arrays by the names of inputs and `target`, with as many rows.
        test: other rows, or None.
        loss: the loss, as `passes.CrossEntropy()`.
        checkpoints: the model at several times of its training, in place of `model`.
        project: the number of columns onto which gradients are projected by random signs, for large models.

    Raises:
        GraphoptError: arrays have different numbers of rows, or gradients of rows are refused.

    >>> rows = {"x": numpy.eye(4, dtype=numpy.float32), "target": numpy.arange(4) % 3}
    >>> graphopt.influence(models.mlp((4,), 3), rows, rows, passes.CrossEntropy()).shape
    (4, 4)
    """
    import passes

    total: np.ndarray | float = 0.0
    for each in checkpoints or [model]:
        graph = _of_examples(each, loss, passes.ExampleGradients(project=project))
        gradients = [found["example_gradients"] for _, found in _by_batch(graph, train)]
        if test is None:
            total = total + np.concatenate([np.einsum("np,np->n", g, g) for g in gradients])
        else:
            found = [_by_rows(gradients, of["example_gradients"]) for _, of in _by_batch(graph, test)]
            total = total + np.concatenate(found)
    return np.asarray(total)


def _by_rows(gradients: Sequence[np.ndarray], of: np.ndarray) -> np.ndarray:
    return np.concatenate([of @ g.T for g in gradients], axis=1)


@checked()
def fisher(model: Source, data: Mapping[str, np.ndarray], loss: Pass) -> dict[str, np.ndarray]:
    """Return the diagonal Fisher information of each parameter, for `passes.ElasticWeights`.

    It is the mean over rows of the squared gradient of the row's loss, at the labels of the data.

    Args:
        model: as in `graphopt.grad`, trained.
        data: arrays by the names of inputs and `target`.
        loss: a negative log-likelihood, as `passes.CrossEntropy()`.

    Raises:
        GraphoptError: as for `influence`.

    >>> rows = {"x": numpy.eye(4, dtype=numpy.float32), "target": numpy.arange(4) % 3}
    >>> graphopt.fisher(models.linear((4,), 3), rows, passes.CrossEntropy())["layers.0.weight"].shape
    (4, 3)
    """
    import passes

    graph = _of_examples(model, loss, passes.ExampleGradients("squares"))
    sums: dict[str, np.ndarray] = {}
    rows = 0
    for count, found in _by_batch(graph, data):
        rows += count
        for name, total in found.items():
            if name.endswith(".fisher"):
                sums[name] = sums.get(name, 0.0) + total.astype(np.float64)
    return {name.removesuffix(".fisher"): (x / rows).astype(np.float32) for name, x in sums.items()}


def _of_examples(model: Source, loss: Pass, gradients: Pass) -> ir.Model:
    return standard(loss=loss, training=None, gradient=gradients)(model)


def _by_batch(
    model: ir.Model, data: Mapping[str, np.ndarray], size: int = 128
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield the number of rows of each batch, and the outputs for it."""
    counts = {name: len(x) for name, x in data.items()}
    if len({*counts.values()}) != 1 or not min(counts.values()):
        raise GraphoptError(f"expected arrays with the same number of rows, found {counts}")
    for start in range(0, max(counts.values()), size):
        batch = {name: np.asarray(x)[start : start + size] for name, x in data.items()}
        yield len(next(iter(batch.values()))), run(model, batch)
