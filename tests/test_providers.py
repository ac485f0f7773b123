"""A new kind of device is a class and a row of a table: one that computes on the CPU trains as the CPU does."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

import graphopt
import passes
from graphopt import models
from graphopt.runtime.providers import PROVIDERS, for_workers
from graphopt.runtime.providers.cpu import Cpu
from graphopt.runtime.providers.provider import Provider

X = np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)
TARGET = np.arange(8) % 3


class Near(Cpu):
    """Pose as a device whose values NumPy reads, with an option of its own."""

    kind, package = "near", "onnxruntime"
    is_numbered = True
    takes_workers = False
    entries: ClassVar[list[tuple[str, str]]] = []

    @property
    def place(self) -> tuple[str, int]:
        return "cpu", 0

    def add_own(self, options: Any, **chosen: bool) -> None:
        super().add_own(options, **chosen)
        spins = str((self.options.provider_options or {}).get("spins", 0))
        self.entries.append(("session.intra_op.allow_spinning", spins))
        options.add_session_config_entry(*self.entries[-1])

    def providers(self, captures: bool) -> list[Any]:
        return [self.own]


class Far(Near):
    """Pose as a device whose values NumPy reads by copies only, and whose numbers are not to be trusted."""

    kind = "far"
    in_host_memory = False
    is_oracle = False


@pytest.fixture(params=[Near, Far])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Provider]:
    monkeypatch.setitem(PROVIDERS, request.param.kind, request.param)
    monkeypatch.setattr(Near, "entries", [])
    return request.param


@pytest.mark.parametrize("options", [{}, {"as_numpy": False}, {"steps_per_call": 2}, {"frozen": "low"}])
def test_a_kind_of_ones_own_trains_as_the_cpu_does(kind: type[Provider], options: dict[str, Any]) -> None:
    step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.AdamW(0.01))
    feeds = {"x": X, "target": TARGET}
    own = graphopt.Executor(step, device=f"{kind.kind}:1", provider_options={"spins": 1}, native=None, **options)
    cpu = graphopt.Executor(step, native=False)
    reported = [[each["loss"] for each in executor.run([feeds] * 4)] for executor in (own, cpu)]
    np.testing.assert_allclose(*reported, rtol=1e-5)
    found, expected = own.evaluate(feeds), cpu.evaluate(feeds)
    y = found["y"] if isinstance(found["y"], np.ndarray) else found["y"].numpy()
    np.testing.assert_allclose(y, expected["y"], rtol=1e-4, atol=1e-5)
    for name, array in cpu.state.items():
        np.testing.assert_allclose(own.state[name], array, rtol=1e-4, atol=1e-6)
    assert own.device == f"{kind.kind}:1" and own.device_options.index == 1
    assert Near.entries[-1] == ("session.intra_op.allow_spinning", "1")


def test_a_message_names_the_machines() -> None:
    with pytest.raises(graphopt.GraphoptError) as error:
        graphopt.Device("gpu")
    assert str(error.value) == "device: expected 'cpu', 'cuda', 'cuda:N' or 'webgpu', found 'gpu'"


def test_messages_name_the_kinds_of_the_table(kind: type[Provider]) -> None:
    with pytest.raises(graphopt.GraphoptError, match=f"'{kind.kind}' or '{kind.kind}:N', found 'gpu'"):
        graphopt.Device("gpu")
    assert for_workers() == "cpu or cuda"
    with pytest.raises(graphopt.GraphoptError, match="graph_capture: expected device 'cuda' or 'webgpu'"):
        graphopt.Device(kind.kind, graph_capture=True)
