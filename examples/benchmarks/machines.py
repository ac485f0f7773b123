"""Make network namespaces of Linux, in which processes of this computer train as if they were on several machines.

Each machine has its own name, network address and core. A link connects it to a switch at the rate of a network. This
needs root, and the programs `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from graphopt.distributed.launchers import ANY_CORE, AS_ROOT

NETWORK = "10.99.0"
ROOT = {**AS_ROOT, "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
BINDING = {name: value for name, value in ANY_CORE.items() if "mapping" not in name}


class Machines:
    """Hold machines; the first one starts programs on all.

    Args:
        count: the number of machines.
        folder: a folder for the program by which MPI starts others on another machine.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self._switch = count, f"gs{os.getpid()}"
        self._names = [f"graphopt{os.getpid()}-{i}" for i in range(count)]
        self._agent = folder / "agent"
        cases = [f'{self.address(i)}) exec {shlex.join(self._inside(i))} sh -c "$*" ;;' for i in range(count)]
        self._agent.write_text("\n".join(["#!/bin/sh", "host=$1", "shift", "case $host in", *cases, "esac", ""]))
        self._agent.chmod(0o700)

    def address(self, machine: int) -> str:
        """Return the network address of a machine."""
        return f"{NETWORK}.{machine + 1}"

    def start(self, mpiexec: str, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a program as one worker on each machine."""
        hosts = ",".join(f"{self.address(i)}:1" for i in range(self.count))
        options = f"--prtemca plm_ssh_agent {self._agent} --map-by node:oversubscribe --host {hosts} -n {self.count}"
        return subprocess.Popen(
            [*self._inside(0), mpiexec, *options.split(), *command],
            env={**ROOT, **BINDING, **os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def set_rate(self, rate: str) -> None:
        """Let each machine send at a rate, such as `1gbit`."""
        for name in self._names:
            limit = f"tbf rate {rate} burst 256kb latency 50ms"
            _run(f"ip netns exec {name} tc qdisc replace dev eth0 root {limit}")

    def cut(self, machine: int) -> None:
        """Cut a machine off the network."""
        _run(f"ip -n {self._names[machine]} link set eth0 down")

    def build(self) -> None:
        """Build the network."""
        _run(f"ip link add {self._switch} type bridge")
        _run(f"ip link set {self._switch} up")
        for i, name in enumerate(self._names):
            port = f"{self._switch}p{i}"
            _run(f"ip netns add {name}")
            _run(f"ip link add {port} type veth peer name eth0 netns {name}")
            _run(f"ip link set {port} master {self._switch} up")
            _run(f"ip -n {name} addr add {self.address(i)}/24 dev eth0")
            _run(f"ip -n {name} link set lo up")
            _run(f"ip -n {name} link set eth0 up")

    def processes(self) -> list[int]:
        """Return the processes on all machines."""
        found = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True) for name in self._names]
        return [int(number) for one in found for number in one.stdout.split()]

    def remove(self) -> None:
        """Kill all processes, and remove the network."""
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        devices = [f"{self._switch}p{i}" for i in range(self.count)]
        for what in (
            *(f"netns del {name}" for name in self._names),
            *(f"link del {one}" for one in (*devices, self._switch)),
        ):
            subprocess.run(["ip", *what.split()], capture_output=True)

    def _inside(self, machine: int) -> list[str]:
        """Return the words before a command that run it on a machine."""
        cores = sorted(os.sched_getaffinity(0))
        core = cores[machine % len(cores)]
        enter = f"ip netns exec {self._names[machine]} taskset -c {core} unshare --uts sh -c"
        return [*enter.split(), f'hostname machine{machine}; exec "$@"', "sh"]


@contextmanager
def machines(count: int, rate: str = "10gbit") -> Iterator[Machines]:
    """Build machines for a `with` block."""
    with tempfile.TemporaryDirectory() as folder:
        found = Machines(count, Path(folder))
        try:
            found.build()
            found.set_rate(rate)
            yield found
        finally:
            found.remove()


def can_build() -> bool:
    """Return whether this process may build machines."""
    if not hasattr(os, "geteuid") or os.geteuid() or not all(map(shutil.which, ("ip", "tc", "unshare", "taskset"))):
        return False
    return subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True).returncode == 0


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
