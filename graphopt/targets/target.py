"""Define targets, named pipelines of passes that lower a plain training graph to what runs it, and list them."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from dataclasses import dataclass, field

import onnx_ir as ir

from graphopt.arguments import Checked, checked
from graphopt.errors import GraphoptError, cause, kind_of, unknown
from graphopt.fields import check_options
from graphopt.graph.loading import Source, load
from graphopt.graph.storage import skeleton
from graphopt.graph.strictness import check_remembered, compares_now
from graphopt.pipeline import Pipeline, check_pipeline
from graphopt.targets.native.cache import own_version, read_model, trim, write_cached
from graphopt.targets.native.lowering import Kernels
from graphopt.targets.onnxruntime.fuse import Fuse
from graphopt.targets.portable import FORMS, Portable

AUTO, NATIVE = "auto", "native"
_ROOM = "targets"  # of the cache
_FUSIONS = "fuse"  # the step that a target can do without


@dataclass(frozen=True)
class Target(Checked):
    """Name what runs a training graph, and the passes that lower a plain one for it.

    Lowering changes how a step is computed, not what: inputs, outputs and their names stay.

    Args:
        name: what messages call the target.
        pipeline: the passes.
        version: what the passes' results depend on, in addition to the graph. The lowered graph of each version is
            stored in the user's cache folder. Without a version, nothing is cached.

    >>> target = graphopt.Target("fewer nodes", graphopt.Pipeline(fuse=passes.Fuse(leave_out=["join_small_vectors"])))
    >>> from graphopt import models
    >>> step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    >>> len(graphopt.lower(step, target).graph) < len(step.graph)
    True
    """

    name: str
    pipeline: Pipeline = field(default_factory=Pipeline)
    version: str = ""

    def __post_init__(self) -> None:
        check_options(self)
        check_pipeline(self.pipeline, "Target", "Target('mine', graphopt.Pipeline(fuse=passes.Fuse()))")

    def lower(self, step: ir.Model) -> ir.Model:
        """Return a lowered copy of a plain training graph.

        Raises:
            GraphoptError: a pass rejects the graph.
        """
        if not self.pipeline:
            return step
        if not self.version or self.pipeline.rules:  # functions, which no key describes
            return self.pipeline.rewrite(step.clone())
        content, weights = skeleton(step)
        texts = [self.name, repr(self.pipeline), self.version, own_version()]
        digest = hashlib.sha256(b"\0".join([content, *(text.encode() for text in texts)])).hexdigest()[:32]
        kept = None
        with contextlib.suppress(GraphoptError, OSError):
            kept = read_model(f"{digest}.onnx", weights, _ROOM)
        if kept is not None and not compares_now(digest):
            return kept
        try:
            model = self.pipeline.rewrite(step.clone())
        except GraphoptError:  # a pass says what the user can do
            raise
        except Exception as error:
            if _FUSIONS not in self.pipeline or TARGETS.get(self.name) is not self:  # steps of somebody else
                raise
            warnings.warn(
                f"the fusions for {self.name} failed: {cause(error)}: the graph is lowered without them",
                stacklevel=2,
            )
            return self.pipeline.without(_FUSIONS).rewrite(step.clone())
        if kept is not None:
            check_remembered(f"the graph in the cache for {self.name}", kept, model)
        content, left = skeleton(model)
        if all(weights.get(name) is tensor for name, tensor in left.items()):  # it has no weights of its own
            with contextlib.suppress(GraphoptError, OSError):  # a cache that cannot be written to forgets
                write_cached(f"{digest}.onnx", content, _ROOM)
                trim(_ROOM)
        return model


ONNXRUNTIME = Target("onnxruntime", Pipeline(fuse=Fuse()), own_version())
# Fusions for ONNX Runtime's CPU provider: ScatterND, which is wrong there, bfloat16, for which it has few kernels, and
# a faster gradient of MaxPool.
_CPU_ALONE = ("scatter_by_element", "compute_bfloat16_in_float32", "unpool_first_maxima")
# Fusions that another runtime does not need, or computes slower: WebGPU takes 14 times as long for MaxPool by planes.
_LEFT_OUT = {
    "cuda": (
        "transposed_convolution_as_convolution",
        "widen_convolution_products",
        "pool_channels_as_batch",
        "join_small_vectors",  # its own form joins more
    ),
    "webgpu": ("pool_channels_as_batch",),
}


def _portable(name: str | None) -> Target:
    alone = _CPU_ALONE if name else ("unpool_first_maxima",)  # no name: the CPU provider computes it, or another
    pipeline = Pipeline(fuse=Fuse((*alone, *_LEFT_OUT.get(name or "", ()))), forms=Portable(name))
    return Target(name or "portable", pipeline, own_version())


TARGETS = {
    target.name: target
    for target in (
        Target("plain"),
        ONNXRUNTIME,
        Target(NATIVE, Pipeline(kernels=Kernels())),
        *map(_portable, (None, *FORMS)),
    )
}


def target_of(target: str | Target) -> Target:
    """Return a target by its name, or a given one.

    Raises:
        GraphoptError: the name is unknown.
    """
    if isinstance(target, Target):
        return target
    if not isinstance(target, str):
        raise GraphoptError(f"target: expected a word or a graphopt.Target, found {kind_of(target)}")
    if target not in TARGETS:
        raise GraphoptError(unknown("target", str(target), [AUTO, *TARGETS]))
    return TARGETS[target]


@checked()
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
