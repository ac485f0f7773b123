"""Save the adapters of an executor without the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphopt.adapters import adapter_file, peft
from graphopt.adapters.combined import Adaptation, adaptations, combined
from graphopt.adapters.modules import modules, saved_modules
from graphopt.adapters.naming import Names, Naming
from graphopt.adapters.peft import PeftAdapter
from graphopt.arguments import checked
from graphopt.errors import GraphoptError, kind_of, unknown
from graphopt.files import write_folder
from graphopt.graph.metadata import original_name
from graphopt.graph.model_folders import DECODER, Architecture
from graphopt.graph.not_a_model import check_path
from graphopt.graph.roles import Role, TargetSpec, with_role
from graphopt.graph.storage import path_of_file
from graphopt.graph.values import name_of
from graphopt.runtime.executor import Executor

_FORMS = ("onnxruntime", "peft")


@checked()
def save_adapter(
    executor: Executor,
    path: str | os.PathLike[str],
    *,
    form: Literal["onnxruntime", "peft"] = "onnxruntime",
    names: Names = None,
    base_name: str | None = None,
) -> None:
    """Save the adapters that an executor has trained, without the model.

    An adapter file of ONNX Runtime is for a model with slots, `executor.trained(into=..., adapters="slots")`. Its B has
    the scale in it. ONNX Runtime loads it by `onnxruntime.LoraAdapter`, and onnxruntime-genai by `Adapters`. A folder
    of peft is for the PyTorch module that was exported, and has the modules that trained in full, too.

    Args:
        executor: the executor, of a graph with `passes.LoRA`.
        path: the file, or the folder of peft, to write.
        form: `onnxruntime` or `peft`.
        names: names of modules by patterns of names of weights, if the file's names do not tell the modules:
            `{"m.*": "*"}` removes a prefix. `*` stands for any text, and the text for `*` in the name. Several names
            are the parts of a packed weight, of which a mapping has the numbers of outputs. Modules of files of
            onnxruntime-genai's builder follow from the type of model in genai_config.json beside the file, for which a
            text such as `phi3` stands. By default, the modules of a folder of peft that was loaded keep their names.
        base_name: the name of the base in the folder of peft, such as `Qwen/Qwen3-0.6B`. By default, that in the folder
            that was loaded, or in config.json beside the model's file, if there is one.

    Raises:
        GraphoptError: the graph has no adapters, or the form has none for such a weight. Nothing is written.

    >>> import os
    >>> step = graphopt.compile(
    ...     models.mlp((4,), 3, hidden=[8]),
    ...     adapter=passes.LoRA("layers.0.*", rank=2), loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-3))
    >>> graphopt.save_adapter(graphopt.Executor(step), "adapter", form="peft")
    >>> sorted(os.listdir("adapter"))
    ['adapter_config.json', 'adapter_model.safetensors']
    """
    if not isinstance(executor, Executor):
        raise GraphoptError(f"save_adapter: expected an executor first, found {kind_of(executor)}")
    if form not in _FORMS:
        raise GraphoptError(f"save_adapter: {unknown('form', str(form), _FORMS)}")
    check_path(path, "save_adapter", "save_adapter(executor, 'a.onnx_adapter')")
    model, state = executor.model, executor.state
    found = adaptations(model, state, "save_adapter")
    if form == "peft":
        adapter = peft_adapter(model, state, found, names)
        write_folder(path, peft.folder_contents(_described(adapter, model, names, base_name)))
        return
    path = path_of_file(path, "save_adapter", "adapter.onnx_adapter")
    for argument, given in (("names", names), ("base_name", base_name)):
        if given is not None:
            raise GraphoptError(
                f"save_adapter: {argument}: expected none for an adapter file, whose names are those of slots"
            )
    own = {name for adapter in found for name in adapter.note.values}
    others = [name_of(x) for x in with_role(model, Role.PARAMETER) if original_name(x) not in own]
    if others:
        warnings.warn(
            f"save_adapter: the adapter file lacks {others[0]!r}{' and others' if others[1:] else ''}, which "
            "trained in full: they are in executor.trained(into=..., adapters='slots')",
            stacklevel=3,
        )
    adapter_file.write_adapter_file(slot_arrays(found), path)


def slot_arrays(adapters: Sequence[Adaptation]) -> dict[str, np.ndarray]:
    return {name: x for adapter in combined(adapters) for name, x in adapter.arrays().items()}


def _described(adapter: PeftAdapter, model: ir.Model, names: Names, base_name: str | None) -> PeftAdapter:
    """Return an adapter with the names of modules in the folder that was loaded, and with its base and its task."""
    about = Architecture.read(model) or Architecture()
    specs = [spec for x in model.graph.inputs if (spec := TargetSpec.read(x)) is not None]
    task = about.task or (DECODER if any(spec.shift for spec in specs) else "")

    def renamed(path: str) -> str:
        return path if names is not None else f"{about.removed}{path.removeprefix(about.added)}"

    modules = [replace(module, path=renamed(module.path)) for module in adapter.modules]
    saved = {renamed(name): x for name, x in adapter.saved.items()}
    return PeftAdapter(modules, saved, about.base if base_name is None else base_name, task)


def peft_adapter(
    model: ir.Model, state: Mapping[str, np.ndarray], adapters: Sequence[Adaptation], names: Names
) -> PeftAdapter:
    """Return the adapters of a training graph by modules, and the modules that trained in full."""
    naming = Naming.of(model, names)
    found = modules(model, adapters, naming)
    return PeftAdapter(found, saved_modules(model, state, {module.path for module in found}, naming))
