"""What we take of other packages that is private: in one file each, and as it was when we took it."""

from __future__ import annotations

import inspect
import re
from importlib import metadata
from pathlib import Path

import onnxruntime
import pytest
from builders import linear
from hydra._internal.hydra import Hydra
from hydra.core.utils import JobReturn
from hydra.plugins.config_source import ConfigSource
from onnxscript import TapeBuilder
from onnxscript.optimizer._constant_folding import FoldConstantsPass
from onnxscript.rewriter import RewriteRule
from onnxscript.rewriter._pattern_ir import StringConstantPattern

from graphopt.distributed.ray import ray_trainer
from graphopt.graph.emitter import Emitter
from graphopt.graph.folding import _Folding

ROOT = Path(__file__).parents[1]

# Methods of TapeBuilder that Emitter overrides or calls.
OF_ONNXSCRIPT = [
    *("_add_initializer", "_add_node", "_cast_inputs", "_constant_propagation", "_get_schema"),
    *("_infer_shapes", "_partition_inputs_attributes", "_promote_constant"),
]


@pytest.mark.parametrize("name", OF_ONNXSCRIPT)
def test_onnxscript_has_the_methods_that_the_emitter_takes(name: str) -> None:
    version = f"onnxscript {metadata.version('onnxscript')}: TapeBuilder.{name}, of graphopt/graph/emitter.py"
    theirs = getattr(TapeBuilder, name, None)
    assert theirs is not None, f"{version}, is gone"
    ours = getattr(Emitter, name)
    if ours is not theirs:
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), version


def test_onnxscript_has_the_folding_that_infers_a_node_by_a_method() -> None:
    version = f"onnxscript {metadata.version('onnxscript')}: FoldConstantsPass, of graphopt/graph/folding.py"
    for name in ("_do_inference", "_prepare_folded_tensor", "visit_node"):
        theirs = getattr(FoldConstantsPass, name, None)
        assert theirs is not None, version
        assert list(inspect.signature(getattr(_Folding, name)).parameters) == list(
            inspect.signature(theirs).parameters
        ), version


def test_onnxscript_s_rules_have_the_pattern_by_whose_operators_they_are_tried() -> None:
    version = f"onnxscript {metadata.version('onnxscript')}: the pattern of a rule, of graphopt/graph/rules.py"
    rule = RewriteRule(lambda op, x: op.Neg(op.Abs(x)), lambda op, x: op.Identity(x))
    (root,) = rule._target_pattern.output_nodes
    for pattern, op_type in ((root, "Neg"), (root.inputs[0].producer(), "Abs")):
        assert (str(pattern.domain), str(pattern.op)) == ("", op_type), version
        assert isinstance(pattern.domain, StringConstantPattern), version
        assert isinstance(pattern.op, StringConstantPattern), version


def test_onnxruntime_has_the_session_within_a_session_that_steps_call() -> None:
    session = onnxruntime.InferenceSession(linear().SerializeToString(), providers=["CPUExecutionProvider"])
    version = f"onnxruntime {onnxruntime.__version__}: what runs a step, of graphopt/runtime/session.py"
    assert hasattr(session._sess, "run") and hasattr(session._sess, "run_with_iobinding"), version
    assert hasattr(session.io_binding(), "_iobinding"), version


def test_ray_has_the_trainer_that_workers_are_started_by() -> None:
    pytest.importorskip("ray.train", reason="needs the extra `ray`")
    taken = {"train_loop_config", "scaling_config", "run_config"}
    version = f"ray {metadata.version('ray')}: the trainer of graphopt/distributed/ray.py"
    assert taken <= set(inspect.signature(ray_trainer()).parameters), version


def test_pytorch_has_the_switch_of_gradients_that_an_export_sees() -> None:
    torch = pytest.importorskip("torch")
    overrides = pytest.importorskip("torch.overrides")
    seen = []

    class Seen(overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))

    with Seen(), torch.no_grad():
        pass
    version = f"torch {torch.__version__}: what torch.no_grad() calls, of graphopt/exporting/tracing.py"
    assert seen == [torch._C._set_grad_enabled] * len(seen) and seen, version


def test_private_names_stay_in_their_files() -> None:
    sources = [path for folder in ("graphopt", "passes") for path in (ROOT / folder).rglob("*.py")]
    of_hydra = {name for owner in (ConfigSource, JobReturn, Hydra) for name in vars(owner) if not name.startswith("__")}
    private = re.compile("|".join([r"hydra\._internal", *(rf"\.{name}\b" for name in of_hydra if name[0] == "_")]))
    composing = [path for path in sources if "cli" in path.parts]
    internal = {path.name for path in composing if private.search(path.read_text())}
    overriding = {path.name for path in sources if "TapeBuilder" in path.read_text()}
    folding = {path.name for path in sources if "optimizer._constant_folding" in path.read_text()}
    of_ray = {path.name for path in sources if "ray.train.v2" in path.read_text()}
    of_torch = {path.name for path in sources if "torch._C" in path.read_text()}
    found = internal, overriding, folding, of_ray, of_torch
    assert found == (set(), {"emitter.py"}, {"folding.py"}, {"ray.py"}, {"tracing.py"})


def test_their_next_minor_versions_are_not_taken_unseen() -> None:
    required = (ROOT / "pyproject.toml").read_text()
    assert '"onnxscript>=0.7.2,<0.8"' in required and '"hydra-core>=1.3.8,<1.4"' in required
