"""Define targets: named pipelines of passes that lower a plain training graph to what runs it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.storage import skeleton
from graphopt.pipeline import Pipeline
from graphopt.targets.native.cache import read_model, write_cached

ROOM = "targets"  # of the cache
_PACKAGES = ("graphopt", "onnx", "onnx_ir", "onnxscript", "numpy")
SOURCES = ("graph", "targets", "errors.py", "files.py", "intervals.py", "pipeline.py")


@dataclass(frozen=True)
class Target:
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

    def lower(self, step: ir.Model) -> ir.Model:
        """Return a lowered copy of a plain training graph.

        Raises:
            GraphoptError: a pass rejects the graph.
        """
        if not self.pipeline:
            return step
        if not self.version:
            return self.pipeline.rewrite(step.clone())
        content, weights = skeleton(step)
        texts = [self.name, repr(self.pipeline), self.version]
        digest = hashlib.sha256(b"\0".join([content, *(text.encode() for text in texts)])).hexdigest()[:32]
        with contextlib.suppress(GraphoptError, OSError):
            if (model := read_model(f"{digest}.onnx", weights, ROOM)) is not None:
                return model
        model = self.pipeline.rewrite(step.clone())
        content, left = skeleton(model)
        if all(weights.get(name) is tensor for name, tensor in left.items()):  # it has no weights of its own
            with contextlib.suppress(GraphoptError, OSError):  # a cache that cannot be written to forgets
                write_cached(f"{digest}.onnx", content, ROOM)
        return model


def sources() -> list[Path]:
    """Return the files of the code that lowers graphs, and of all that it imports from graphopt."""
    package = Path(__file__).parents[1]
    paths = [path for name in SOURCES for path in (package / name, *sorted((package / name).rglob("*.py")))]
    return [path for path in paths if path.is_file()]


@functools.cache
def own_version() -> str:
    """Return a hash of what decides how targets of this package lower a graph: its code, and the packages it uses."""
    versions = [f"{name} {metadata.version(name)}".encode() for name in _PACKAGES]
    contents = [path.read_bytes() for path in sources()]
    return hashlib.sha256(b"\0".join([*versions, *contents])).hexdigest()
