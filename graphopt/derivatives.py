"""Differentiate a model: return models whose outputs are derivatives."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.errors import GraphoptError
from graphopt.files import replacing
from graphopt.graph.encoders import Encoders
from graphopt.graph.inference import as_it_came, has_tensors
from graphopt.graph.loading import Source, load
from graphopt.graph.postprocessing import Detached
from graphopt.graph.rewriting import Pass
from graphopt.graph.storage import is_large, path_of_file, save
from graphopt.graph.values import name_of


@checked()
def grad(
    model: Source,
    wrt: tuple[str, ...] | list[str] | str,
    *,
    of: str | None = None,
    seeded: bool = False,
    keep: bool = True,
) -> ir.Model:
    """Return a model with outputs `OF.grad.X`: the gradients of output `OF` by inputs, weights or inner values `X`.

    The result is an ordinary model. Apply `grad` again for second derivatives.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        wrt: the names of the inputs, weights or other values to differentiate by; `graphopt.listing` shows them.
        of: the output to differentiate, summed over its elements; by default, the only floating-point output.
        seeded: add an input `OF.seed` that weights the output's elements, for a vector-Jacobian product.
        keep: keep the model's own outputs.

    Raises:
        GraphoptError: the model cannot be read, a name is unknown, or an operator in between has no gradient rule.

    >>> from graphopt import models
    >>> model = graphopt.grad(models.linear((2,), 1), ["x"])
    >>> [output.name for output in model.graph.outputs]
    ['y', 'y.grad.x']
    """
    import passes

    return derive(model, passes.Differentiate(wrt, of, seeded), keep=keep)


@checked()
def jacobian(
    model: Source,
    wrt: tuple[str, ...] | list[str] | str,
    *,
    of: str | None = None,
    rows: int = 1,
    keep: bool = True,
) -> ir.Model:
    """Return a model with outputs `OF.jacobian.X` [N, m, *X]: output `OF` [N, m] by X [N, *X], for each row.

    Args:
        model: as in `graphopt.grad`.
        wrt: the names of inputs, or of other values with a row for each row of the inputs.
        of: the output to differentiate; by default, the only floating-point output.
        rows: how many of the m rows of a Jacobian are computed at once: more take more memory and fewer turns.
        keep: keep the model's own outputs.

    Raises:
        GraphoptError: as for `grad`; the output is not [N, m]; or it is not proved that rows do not depend on others.

    >>> from graphopt import models
    >>> model = graphopt.jacobian(models.mlp((3,), 2), "x", keep=False)
    >>> graphopt.run(model, {"x": numpy.ones((5, 3), numpy.float32)})["y.jacobian.x"].shape
    (5, 2, 3)
    """
    import passes

    return derive(model, passes.Jacobian(wrt, of, rows), keep=keep)


@checked()
def hessian(
    model: Source,
    wrt: tuple[str, ...] | list[str] | str,
    *,
    of: str | None = None,
    rows: int = 1,
    keep: bool = True,
) -> ir.Model:
    """Return a model with outputs `OF.hessian.X` [N, *X, *X]: second derivatives of `OF` [N] or [N, 1], for each row.

    Args:
        model: as in `graphopt.grad`.
        wrt: as in `graphopt.jacobian`.
        of: the output to differentiate; by default, the only floating-point output.
        rows: as in `graphopt.jacobian`, of the rows of a Hessian.
        keep: keep the model's own outputs.

    Raises:
        GraphoptError: as for `jacobian`; or the output has more than one number for each row.

    >>> from graphopt import models
    >>> model = graphopt.hessian(models.mlp((3,), 1), "x", keep=False)
    >>> graphopt.run(model, {"x": numpy.ones((5, 3), numpy.float32)})["y.hessian.x"].shape
    (5, 3, 3)
    """
    import passes

    return derive(model, passes.Hessian(wrt, of, rows), keep=keep)


@checked()
def family(model: Source, path: str | os.PathLike[str]) -> list[Path]:
    """Write a model and, beside it, the derivatives that CasADi finds by their names; return the paths.

    `adj_f.onnx` computes seeds times the Jacobian, `fwd_f.onnx` the Jacobian times seeds, and `fwd_adj_f.onnx` what
    exact Hessians need. `casadi.GraphBuilder("f.onnx").create("f")` reads all four. CasADi reads files below 2 GB
    that hold their weights.

    Args:
        model: as in `graphopt.grad`, with floating-point inputs and outputs.
        path: the file to write.

    Raises:
        GraphoptError: as for `grad`; a file is the model's own, would have 2 GB or more, or has the ending of another
            format. Nothing is written.

    >>> [path.name for path in graphopt.family(models.mlp((3,), 2), "f.onnx")]
    ['f.onnx', 'adj_f.onnx', 'fwd_f.onnx', 'fwd_adj_f.onnx']
    """
    from passes.differentiate import Adjoint, Tangent

    path = path_of_file(path, "family")
    paths = [path.with_name(prefix + path.name) for prefix in ("", "adj_", "fwd_", "fwd_adj_")]
    if isinstance(model, str | os.PathLike) and Path(model).resolve() in [each.resolve() for each in paths]:
        raise GraphoptError(f"family: expected another file than the model, found {os.fspath(model)!r}: name another")
    adjoint = derive(model, Adjoint(), keep=False)
    parts = normal_form(model), adjoint, derive(model, Tangent(), keep=False), derive(adjoint, Tangent(), keep=False)
    with contextlib.ExitStack() as files:  # all of them, or none
        for each, part in zip(paths, parts, strict=True):
            if is_large(part):
                raise GraphoptError(
                    f"family: expected models below 2 GB, which CasADi reads, found a larger {each.name}"
                )
            save(part, files.enter_context(replacing(each)))
    return paths


@checked()
def explain(model: Source, explanation: Pass, *, keep: bool = True) -> ir.Model:
    """Return a model that explains its predictions.

    Args:
        model: as in `graphopt.grad`.
        explanation: a pass such as `passes.GradCAM()`, which adds the output `OUTPUT.explanation`, or `passes.FGSM`,
            which adds `INPUT.adversarial`; or `passes.MonteCarloDropout()` or `passes.Ensemble`, which say how sure it
            is.
        keep: keep the model's own outputs.

    Raises:
        GraphoptError: the model cannot be read, or the pass does not fit it.

    >>> from graphopt import models
    >>> explained = graphopt.explain(models.cnn((1, 8, 8), 3), passes.GradCAM())
    >>> feeds = {"x": numpy.ones((5, 1, 8, 8), numpy.float32), "class": numpy.full(5, -1)}  # -1: the predicted one
    >>> graphopt.run(explained, feeds)["y.explanation"].shape
    (5, 1, 8, 8)
    """
    loaded = normal_form(model, restored=keep)
    own = [name_of(y) for y in loaded.graph.outputs]
    _derive(loaded, explanation, keep)
    return as_it_came(loaded, own) if keep else loaded


def derive(model: Source, derivative: Pass, *, keep: bool = True) -> ir.Model:
    """Return a model with the outputs that a pass such as `passes.HessianVector` adds.

    Args:
        model: as in `graphopt.grad`.
        derivative: the pass.
        keep: keep the model's own outputs.
    """
    loaded = normal_form(model)
    _derive(loaded, derivative, keep)
    return loaded


def _derive(loaded: ir.Model, derivative: Pass, keep: bool) -> None:
    import passes

    own = {output.name for output in loaded.graph.outputs}
    derivative.apply(loaded)
    if not keep:
        loaded.graph.outputs[:] = [output for output in loaded.graph.outputs if output.name not in own]
    passes.Simplify().apply(loaded)


def normal_form(model: Source, *, restored: bool = False) -> ir.Model:
    """Return a model in the form that passes rewrite; warn of what it lacks then, unless `as_it_came` restores it."""
    import passes

    loaded = load(model)
    passes.Normalize().apply(loaded)
    own = {output.name for output in loaded.graph.outputs}
    detached = Detached.read(loaded)
    if restored and detached is not None:
        own |= {y.name for part in detached.models() if has_tensors(part) for y in part.graph.output}
    beside = [] if detached is None else [y for y in detached.outputs if y not in own]
    if Encoders.read(loaded) is not None or beside:
        warnings.warn(
            "the file takes or returns strings, or other values that are no tensors, which are left out of the new one"
            + (f": {', '.join(beside)}" if beside else ""),
            stacklevel=4,
        )
    return loaded
