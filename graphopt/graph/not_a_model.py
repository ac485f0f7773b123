"""Raise errors for objects that are not ONNX models, with the way to make a model of them."""

from __future__ import annotations

import os

from graphopt.errors import GraphoptError, kind_of, library_of

_REMEDIES = {
    "torch": "export it first, by torch.onnx.export",
    "keras": "export it first, by model.export(PATH, format='onnx')",
    "tensorflow": "export it first, by tf2onnx",
    "jax": "export it first, by jax2onnx",
    "flax": "export it first, by jax2onnx",
    "sklearn": "graphopt.from_sklearn continues a fitted network, and skl2onnx converts other estimators",
    "onnxruntime": "give the file that the session was made from",
    "onnx": "give its onnx.ModelProto",
    "onnx_ir": "give its onnx_ir.Model",
}


def not_a_model(thing: object, name: str = "model") -> GraphoptError:
    """Return the error for something else in place of a model, which `name` calls."""
    remedy = _REMEDIES.get(library_of(thing) or "", "give one of these")
    if isinstance(thing, type):
        remedy = "give a model, not a class"
    elif hasattr(thing, "trained"):
        remedy = "executor.trained() returns its trained model, and executor.model its training graph"
    elif hasattr(thing, "apply") and hasattr(thing, "step"):
        remedy = "give its step"
    return GraphoptError(
        f"{name}: expected the path of an ONNX file, its bytes, an onnx.ModelProto or an onnx_ir.Model, found "
        f"{kind_of(thing)}: {remedy}"
    )


def check_path(path: object, name: str, example: str) -> None:
    """Raise an error unless something is the path of a file."""
    if not isinstance(path, str | os.PathLike):
        raise GraphoptError(f"{name}: expected the path of a file, found {kind_of(path)}: write {example}")
