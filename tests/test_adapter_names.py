"""Adapters of one's own: notes name the class by its module, and each class merges what was compiled with it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from builders import mlp
from steps import outputs

import graphopt
import passes
from graphopt import GraphoptError
from graphopt.graph import merging
from graphopt.graph.merging import MERGES, adapted
from graphopt.graph.storage import model_digest

ROOT = str(Path(__file__).parents[1])
STEPS = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}


class _Gain(passes.Adapter):
    """Multiply the outputs of a layer by numbers."""

    def initial(self, target: Any, generator: np.random.Generator) -> dict[str, np.ndarray]:
        return {"gain": np.full(target.outputs, 1.5)}

    def delta(self, op: Any, target: Any, x: ir.Value, *values: ir.Value) -> ir.Value:
        return target.product(op) * target.spread(op, values[0] - 1)


GAIN = """
class Gain(Gains):
    factor = {factor}

    def initial(self, target, generator):
        return {{"gain": numpy.full(target.outputs, 1.5 - self.factor)}}

    def delta(self, op, target, x, gain):
        return target.product(op) * target.spread(op, gain - 1 + {factor})

    @staticmethod
    def merge(w, scale, gain):
        return w * (gain + {factor})
"""


def in_a_module(name: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the definition of an adapter in a module, as an import, a reload, or a cell of a notebook does."""
    module = sys.modules.get(name) or types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    vars(module).update(Gains=_Gain, numpy=np, Any=Any)
    exec(compile(GAIN.format(factor=factor), f"<{name}>", "exec"), vars(module))
    return module.Gain


def made_by(factor: float) -> Any:
    """Return a class whose `merge` reads a variable around it."""

    class Gain(_Gain):
        def delta(self, op: Any, target: Any, x: ir.Value, *values: ir.Value) -> ir.Value:
            return target.product(op) * target.spread(op, values[0] - 1 + factor)

        @staticmethod
        def merge(w: np.ndarray, scale: float, *values: np.ndarray) -> np.ndarray:
            return w * (values[0] + factor)

    return Gain


def of_default(factor: float) -> Any:
    """Return a class whose `merge` has the number as a default."""

    class Gain(made_by(factor)):  # type: ignore[misc]
        @staticmethod
        def merge(w: np.ndarray, scale: float, gain: np.ndarray, factor: float = factor) -> np.ndarray:
            return w * (gain + factor)

    return Gain


def replaced(factor: float) -> Any:
    """Return a class whose `merge` is another function than that of its definition."""
    kind = made_by(7.0)
    kind.delta, kind.merge = made_by(factor).delta, staticmethod(made_by(factor).merge)
    return kind


@pytest.mark.parametrize(
    "make",
    [
        lambda factor, patch: in_a_module(f"graphopt_tests_of_{factor:.0f}", factor, patch),
        lambda factor, patch: in_a_module("graphopt_tests_reloaded", factor, patch),
        lambda factor, patch: in_a_module("__main__", factor, patch),
        lambda factor, patch: made_by(factor),
        lambda factor, patch: of_default(factor),
        lambda factor, patch: replaced(factor),
    ],
    ids=["two modules", "reloaded", "notebook", "closure", "default", "replaced"],
)
def test_each_class_of_a_name_merges_its_own_adapters(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MERGES", dict(MERGES))
    if make.__code__.co_consts and "__main__" in make.__code__.co_consts:
        monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    x = {"x": np.random.default_rng(0).standard_normal((8, 4), np.float32)}
    executors = []
    for factor in (0.0, 0.75):
        kind = make(factor, monkeypatch)
        step = graphopt.compile(mlp(), adapter=kind("fc0*"), **STEPS)
        executors.append(graphopt.Executor(step))
    for executor in executors:  # the first one, too, after the second definition
        assert np.allclose(outputs(executor.trained(), x)["y"], executor.predict(x)["y"], atol=1e-6)
    names = [note.adapter for executor in executors for note in adapted(executor.model)]
    assert len({*names}) == 2 and all("." in name for name in names)


@pytest.mark.parametrize("name", ["__main__", "graphopt_tests_again"])
def test_a_cell_that_runs_again_defines_the_same_adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph stays the same, to the last byte, and checkpoints of it can be resumed."""
    monkeypatch.setattr(merging, "MERGES", dict(MERGES))
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    digests = set()
    for _ in range(3):
        kind = in_a_module(name, 0.5, monkeypatch)
        step = graphopt.compile(mlp(), adapter=kind("fc0*"), **STEPS)
        digests.add(model_digest(step))
    assert len(digests) == 1 and [x for x in merging.MERGES if x not in MERGES] == [f"{name}.Gain"]


def test_an_adapter_of_a_program_is_known_to_programs_that_import_it(tmp_path: Path) -> None:
    program = GAIN.format(factor=0.5).replace("Gains", "passes.Adapter")
    (tmp_path / "gains.py").write_text(
        f"import graphopt, numpy, passes\nfrom graphopt import models\n{program}\n"
        "if __name__ == '__main__':\n"
        "    step = graphopt.compile(models.mlp((4,), 3, hidden=[8]), adapter=Gain('layers.0*'),\n"
        "        loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))\n"
        "    graphopt.save(step, 'step.onnx')\n"
    )
    for code in (
        ["gains.py"],
        ["-c", "import gains, graphopt; graphopt.Executor('step.onnx').trained()"],
    ):
        subprocess.run([sys.executable, *code], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": ROOT})


@pytest.mark.skipif(not hasattr(onnxruntime, "AdapterFormat"), reason="this onnxruntime has no adapter files")
def test_a_class_that_inherits_merge_is_saved_as_its_base(tmp_path: Path) -> None:
    class Started(passes.LoRA):
        def initial(self, target: Any, generator: np.random.Generator) -> dict[str, np.ndarray]:
            return {name: x + 0.1 for name, x in super().initial(target, generator).items()}

    step = graphopt.compile(mlp(), adapter=Started("fc0*", 2), **STEPS)
    executor = graphopt.Executor(step)
    graphopt.save_adapter(executor, tmp_path / "adapter.onnx_adapter")
    x = {"x": np.random.default_rng(0).standard_normal((8, 4), np.float32)}
    assert np.allclose(outputs(executor.trained(), x)["y"], executor.predict(x)["y"], atol=1e-6)


def test_a_class_of_the_library_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MERGES", dict(MERGES))
    assert {name for name in MERGES if "." not in name} >= {"LoRA"}
    assert merging.register_merge(passes.LoRA, passes.LoRA.merge) == "LoRA"
    twin = type("LoRA", (), {"merge": staticmethod(lambda w, scale: w), "__module__": "passes.twins"})
    with pytest.raises(GraphoptError, match=r"^adapter LoRA: expected one class of this name in passes, found two"):
        merging.register_merge(twin, twin.merge)
    mine = made_by(1.0)
    mine.__name__ = mine.__qualname__ = "LoRA"
    assert merging.register_merge(mine, lambda w, scale: w) == f"{__name__}.LoRA"
    assert merging.MERGES["LoRA"] is passes.LoRA.merge
