"""Faults of other software are there, and code that works round them says which."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from faults import FAULTS

ROOT = Path(__file__).parents[1]
_REFERENCE = re.compile(r"tests/faults\.py: ([\w-]+)")


def references():
    """Return the names of faults, or what they begin with, by the file that refers to them."""
    found = {}
    for path in [*ROOT.glob("graphopt/**/*.py"), *ROOT.glob("passes/**/*.py"), *ROOT.glob("graphopt/**/*.h")]:
        names = _REFERENCE.findall(path.read_text())
        found |= {path.relative_to(ROOT).as_posix(): names} if names else {}
    return found


def test_code_that_works_round_a_fault_refers_to_its_row_and_no_other_does():
    found = references()
    for name, fault in FAULTS.items():
        for file in fault.around:
            assert any(name.startswith(each) for each in found.get(file, [])), f"{file}: refer to {name}"
    for file, names in found.items():
        for each in names:
            rows = [fault for name, fault in FAULTS.items() if name.startswith(each)]
            assert any(file in fault.around for fault in rows), f"{file}: no fault of this file is called {each}"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, other kernels run")
@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.program])
def test_a_fault_is_there(name):
    fault = FAULTS[name]
    if reason := fault.excuse():
        pytest.skip(reason)
    version = metadata.version(fault.package)
    assert fault.is_there(), (
        f"{fault.package} {version} does not have this fault any more: {fault.part} {fault.does}. Say so by `until` "
        f"in tests/faults.py, and once no supported version has it, remove what works round it in {fault.around}"
    )


def test_the_table_has_a_program_for_most_faults():
    assert sum(bool(fault.program) for fault in FAULTS.values()) >= 25
    assert all(fault.does and not fault.does.endswith(".") for fault in FAULTS.values())
