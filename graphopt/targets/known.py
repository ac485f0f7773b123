"""List the targets that a step can be lowered to."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.loading import Source, load
from graphopt.pipeline import Pipeline
from graphopt.targets.native.lowering import Kernels
from graphopt.targets.onnxruntime.fuse import Fuse
from graphopt.targets.portable import FORMS, Portable
from graphopt.targets.target import Target, own_version

AUTO, NATIVE = "auto", "native"
_PLAIN = Target("plain")
_KERNELS = Target(NATIVE, Pipeline(kernels=Kernels()))
ONNXRUNTIME = Target("onnxruntime", Pipeline(fuse=Fuse()), own_version())
_SLOW = {
    "webgpu": ("pool_channels_as_batch",)
}  # fusions that a runtime computes slower: MaxPool by planes, 14 times

TARGETS = {
    target.name: target
    for target in (
        _PLAIN,
        ONNXRUNTIME,
        _KERNELS,
        *(
            Target(name or "portable", Pipeline(fuse=Fuse(_SLOW.get(name or "", ())), forms=Portable(name)))
            for name in (None, *FORMS)
        ),
    )
}


def target_of(target: str | Target) -> Target:
    """Return a target by its name, or a given one.

    Raises:
        GraphoptError: the name is unknown.
    """
    if isinstance(target, Target):
        return target
    if target not in TARGETS:
        raise GraphoptError(unknown("target", str(target), [AUTO, *TARGETS]))
    return TARGETS[target]


def lower(step: Source, target: str | Target) -> ir.Model:
    """Lower a plain training graph for a target, as an executor does when it opens the graph.

    Args:
        step: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        target: `onnxruntime` (operators that its CPU kernels compute fast), `native` (calls of kernels, which only an
            executor can run), `portable` or a runtime of `passes.Portable`, `plain` (nothing), or a `graphopt.Target`.

    Raises:
        GraphoptError: the graph cannot be read, the target is unknown, or one of its passes rejects the graph.

    >>> import graphopt, passes
    >>> from graphopt import models
    >>> step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    >>> [len(graphopt.lower(step, target).graph) for target in ("plain", "onnxruntime")]
    [47, 40]
    """
    return target_of(target).lower(load(step))
