"""Import onnx_ir without SymPy, which it needs only for arithmetic with symbolic dimensions.

SymPy takes a third of the time that `import graphopt` takes. It is imported when it is first used.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader

DEFERRED = ("sympy", "onnx_ir._symbolic_shapes")


class _Deferring:
    """Find modules whose code runs at the first access to one of their attributes."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in DEFERRED else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


sys.meta_path.insert(0, _Deferring)
try:
    import onnx_ir  # noqa: F401
finally:
    sys.meta_path.remove(_Deferring)
