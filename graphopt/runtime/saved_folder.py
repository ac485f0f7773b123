"""Write what an executor has trained as a folder that programs which serve language models open."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Literal

from graphopt.adapters.combined import adaptations
from graphopt.adapters.gguf import config_beside, write_gguf
from graphopt.adapters.naming import Names
from graphopt.arguments import checked
from graphopt.data.language.tokenizer import BESIDE
from graphopt.errors import GraphoptError, kind_of, unknown
from graphopt.files import making, read_file
from graphopt.graph.channels import remove_channels
from graphopt.graph.loading import read_original
from graphopt.graph.merging import adapted
from graphopt.graph.model_folders import CONFIG, GENAI_CONFIG, config_in, model_in, place_of
from graphopt.graph.roles import Role, with_role
from graphopt.graph.storage import save
from graphopt.graph.values import dims_of
from graphopt.runtime.executor import Executor
from graphopt.runtime.saved_adapter import peft_adapter, save_adapter

FORMS = ("merged", "slots", "peft", "gguf", "small")
ADAPTER_FILE, GGUF_FILE = "adapter.onnx_adapter", "adapter.gguf"
# Files beside a model that tokenizers and programs read, in addition to those that graphopt reads itself.
OF_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("added_tokens.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "chat_template.json"),
)
_CONFIGS = (CONFIG, "generation_config.json", "preprocessor_config.json", "processor_config.json")


@checked()
def save_folder(
    executor: Executor,
    folder: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
    form: Literal["merged", "slots", "peft", "gguf", "small"] = "merged",
    names: Names = None,
    base_name: str | None = None,
) -> None:
    """Save a trained model of text as a folder that onnxruntime-genai, transformers.js, peft or llama.cpp opens.

    The tokenizer, the template of chats and the configs are copied from the folder of the base, and other graphs that
    genai_config.json names. The model has the name that it has there. If the executor knows the names of its classes,
    config.json of transformers has them as `id2label` and `label2id`.

    Args:
        executor: the executor, of a graph that was compiled from `base`.
        folder: the folder to make. It must not exist, or be empty.
        base: the file of the model that was compiled, or its folder.
        form: `merged`: the base with the trained weights. `slots`: the base with slots, and `adapter.onnx_adapter`.
            `peft`: a folder of peft. `gguf`: `adapter.gguf`, for llama.cpp; needs the package gguf. `small`: the base
            with the trained weights, without the channels that are 0: see `graphopt.remove_channels`.
        names, base_name: names of modules, for `peft` and `gguf`, and of the base, for `peft`: see
            `graphopt.save_adapter`.

    Raises:
        GraphoptError: the base has other weights, the form has no such adapter, or the folder has files. Nothing is
            written.

    >>> graphopt.save(models.transformer((8,), 100, width=8, layers=1), "base.onnx")
    >>> step = graphopt.compile(
    ...     "base.onnx", adapter=passes.LoRA(rank=2), loss=passes.CausalLanguageModel(), optimizer=passes.AdamW(1e-3))
    >>> graphopt.save_folder(graphopt.Executor(step), "served", base="base.onnx", form="slots")
    >>> import os; sorted(os.listdir("served"))
    ['adapter.onnx_adapter', 'base.onnx']
    """
    if not isinstance(executor, Executor):
        raise GraphoptError(f"save_folder: expected an executor first, found {kind_of(executor)}")
    if form not in FORMS:
        raise GraphoptError(f"save_folder: {unknown('form', str(form), FORMS)}")
    target, file = Path(folder), Path(base)
    file = model_in(file) if file.is_dir() else file
    if not file.is_file():
        raise GraphoptError(f"save_folder: base: expected the file of a model or its folder, found no {base}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise GraphoptError(f"{target}: expected no folder, or an empty one, found files: name another")
    if base_name is not None and form != "peft":
        raise GraphoptError(f"save_folder: base_name: expected form='peft', found form={form!r}: leave it out")
    if form not in ("merged", "small") and not adapted(executor.model):
        raise GraphoptError(
            f"save_folder: form={form}: expected a training graph with adapters, found none: save form=merged"
        )
    with making(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        made = Path(temporary, target.name)
        made.mkdir()
        if form == "gguf":
            model, state = executor.model, executor.state
            adapter = peft_adapter(model, state, adaptations(model, state, "save_folder"), names)
            write_gguf(adapter, made / GGUF_FILE, config_beside(file))
        elif form == "peft":
            save_adapter(executor, made, form="peft", names=names, base_name=base_name)
            _copy(OF_TOKENIZER, place_of(file), made)
        else:
            _save_model(executor, file, made, "slots" if form == "slots" else "merged")
            if form == "small":
                whole = made / file.relative_to(place_of(file))
                save(remove_channels(whole), whole)
        with making(target):
            os.replace(made, target)


def _save_model(executor: Executor, base: Path, folder: Path, adapters: Literal["merged", "slots"]) -> None:
    """Write the base with the trained weights or with slots, and what lies beside it."""
    place = place_of(base)
    model = folder / base.relative_to(place)
    model.parent.mkdir(exist_ok=True)
    executor.save_trained(model, into=base, adapters=adapters)
    if adapters == "slots":
        save_adapter(executor, folder / ADAPTER_FILE)
    _copy((*OF_TOKENIZER, *BESIDE, *_CONFIGS), place, folder)
    _write_labels(executor, folder / CONFIG)
    for name in _graphs_of(place / GENAI_CONFIG):
        if name != base.name:
            read_original(place / name).save(folder / name)


def _write_labels(executor: Executor, config: Path) -> None:
    """Write the names of the classes into config.json, or remove those of another number of outputs."""
    if not config.is_file():
        return
    labels, before = executor.labels, config_in(config)
    fields = dict(before)
    widths = {dims_of(y)[-1] for y in with_role(executor.model, Role.PREDICTION) if y.shape}
    known = fields.get("id2label")
    if labels is not None:
        fields |= {
            "id2label": {str(i): x for i, x in enumerate(labels)},
            "label2id": {x: i for i, x in enumerate(labels)},
        }
    elif isinstance(known, dict) and len(known) not in widths:
        fields = {name: x for name, x in fields.items() if name not in ("id2label", "label2id")}
    if fields != before:
        config.write_text(json.dumps(fields, indent=2) + "\n")


def _copy(names: Iterable[str], place: Path, folder: Path) -> None:
    for name in names:
        if (file := place / name).is_file():
            (folder / name).write_bytes(read_file(file.resolve()))


def _graphs_of(config: Path) -> list[str]:
    """Return the names of the graphs that a folder of onnxruntime-genai has."""

    def named(node: object) -> Iterator[object]:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            yield from (value,) if key == "filename" else named(value)

    found = [*dict.fromkeys(map(str, named(config_in(config))))] if config.is_file() else []
    for name in found:
        if PurePosixPath(name).name != name or not name.endswith(".onnx"):
            raise GraphoptError(f"{config}: filename: expected the name of a graph beside it, found {name!r}")
    return found
