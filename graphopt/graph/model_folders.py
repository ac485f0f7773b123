"""Find the model in a folder that onnxruntime-genai, optimum or transformers.js opens."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from graphopt.errors import GraphoptError
from graphopt.files import json_of, read_file

CONFIG, GENAI_CONFIG = "config.json", "genai_config.json"
INNER = "onnx"  # the folder in which transformers.js has models; configs and the tokenizer lie above
_MODEL = "model.onnx"
_MOST_BYTES = 2**22  # of a config


def config_in(path: Path) -> dict[str, object]:
    """Return the fields of a config.

    Raises:
        GraphoptError: the file is too large or has no fields.
    """
    found = json_of(read_file(path.resolve(), _MOST_BYTES), str(path))
    if not isinstance(found, dict):
        raise GraphoptError(f"{path}: expected an object in JSON, found another value")
    return found


def is_model_folder(path: Path) -> bool:
    """Return whether a path is the folder of a model with its config."""
    return (path / GENAI_CONFIG).is_file() or (path / CONFIG).is_file()


def model_in(folder: Path) -> Path:
    """Return the file of the model in a folder.

    That is the decoder that genai_config.json names, else model.onnx in the folder or in its folder `onnx`.

    Raises:
        GraphoptError: the folder has no such file.
    """
    if (config := folder / GENAI_CONFIG).is_file():
        model = config_in(config).get("model")
        decoder = model.get("decoder") if isinstance(model, dict) else None
        name = decoder.get("filename") if isinstance(decoder, dict) else None
        if not isinstance(name, str) or PurePosixPath(name).name != name or not name.endswith(".onnx"):
            raise GraphoptError(
                f"{config}: model.decoder.filename: expected the name of a file beside it, found {name!r}: name the "
                "model's file"
            )
        return folder / name
    for path in (folder / _MODEL, folder / INNER / _MODEL):
        if path.is_file():
            return path
    raise GraphoptError(
        f"{folder}: expected an ONNX file, found a folder without {_MODEL} or {GENAI_CONFIG}: name the file"
    )


def place_of(model: Path) -> Path:
    """Return the folder where the configs and the tokenizer of a model's file lie."""
    above = model.parent.parent
    return above if model.parent.name == INNER and (above / CONFIG).is_file() else model.parent
