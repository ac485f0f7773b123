"""Find the model in a folder that onnxruntime-genai, optimum or transformers.js opens."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from graphopt.errors import GraphoptError, kind_of
from graphopt.files import json_of, read_file
from graphopt.graph.metadata import ARCHITECTURE, Note, expect

DECODER = "CAUSAL_LM"  # the task of language models in peft
MOST_LETTERS = 512  # of a text that a config says about a model
CONFIG, GENAI_CONFIG = "config.json", "genai_config.json"
INNER = "onnx"  # the folder in which transformers.js has models; configs and the tokenizer lie above
_MODEL = "model.onnx"
_MOST_BYTES = 2**22  # of a config
# Tasks of peft by the ends of the names of classes in transformers.
_TASKS = {
    "ForCausalLM": DECODER,
    "LMHeadModel": DECODER,
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}
# What models of onnxruntime-genai other than decoders have
_BESIDE_DECODERS = ("embedding", "encoder", "speech", "vision")


def config_in(path: Path, most: int = _MOST_BYTES) -> dict[str, object]:
    """Return the fields of a config of at most so many bytes.

    Raises:
        GraphoptError: the file is too large or has no fields.
    """
    found = json_of(read_file(path.resolve(), most), str(path))
    if not isinstance(found, dict):
        raise GraphoptError(f"{path}: expected an object in JSON, found {kind_of(found)}")
    return found


def is_model_folder(path: Path) -> bool:
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


def configs_in_words(place: Path, *, by_config: bool) -> dict[str, Any]:
    """Return what the configs in a folder say about its model, as arguments of `Architecture`.

    A config.json of another program says nothing.

    Args:
        by_config: whether config.json tells the type if genai_config.json does not.

    Raises:
        GraphoptError: genai_config.json is too large or has no fields.
    """
    genai = config_in(place / GENAI_CONFIG) if (place / GENAI_CONFIG).is_file() else {}
    config: dict[str, object] = {}
    if (place / CONFIG).is_file():
        with contextlib.suppress(GraphoptError):
            config = config_in(place / CONFIG)
    model = genai.get("model")
    model = model if isinstance(model, dict) else {}
    decoder = model.get("decoder")
    heads = (decoder if isinstance(decoder, dict) else config).get("num_key_value_heads")
    classes = config.get("architectures")
    end = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    task = next((task for name, task in _TASKS.items() if end.endswith(name)), "")
    is_alone = isinstance(decoder, dict) and not {*model} & {*_BESIDE_DECODERS}
    found = {
        "type": model.get("type") or (config.get("model_type") if by_config else None),
        "base": config.get("_name_or_path"),
        "task": task or (DECODER if is_alone else ""),
    }
    texts = {name: x for name, x in found.items() if isinstance(x, str) and len(x) <= MOST_LETTERS}
    return {**texts, "heads": heads if isinstance(heads, int) and 0 < heads < 2**31 else 0}


def place_of(model: Path) -> Path:
    """Return the folder where the configs and the tokenizer of a model's file lie."""
    above = model.parent.parent
    return above if model.parent.name == INNER and (above / CONFIG).is_file() else model.parent


@dataclass(frozen=True)
class Architecture(Note, key=ARCHITECTURE, expected="a type of model, its number of heads, and texts"):
    """Record what the configs beside a file, or in a folder of peft that was loaded, say about the model.

    Args:
        type: the type in genai_config.json, such as `phi3`, or in config.json beside a file of the same builder.
        heads: the number of heads of keys.
        base: the name of the model in config.json or in the folder, such as `Qwen/Qwen3-0.6B`.
        task: the task of such models in peft, such as `CAUSAL_LM`.
        added: the prefix that names of modules have in the file, and not in the folder.
        removed: the prefix that they have in the folder, and not in the file.
    """

    type: str = ""
    heads: int = 0
    base: str = ""
    task: str = ""
    added: str = ""
    removed: str = ""

    def check(self) -> None:
        texts = (self.type, self.base, self.task, self.added, self.removed)
        expect(max(map(len, texts)) <= MOST_LETTERS, 0 <= self.heads < 2**31)

    @property
    def adds_one(self) -> bool:
        """Return whether norms multiply by 1 + w, and the file has 1 + w; Gemma 4's multiply by w."""
        return self.type.startswith(("gemma", "nemotron", "qwen3_5")) and not self.type.startswith("gemma4")
