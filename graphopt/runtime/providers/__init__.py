"""Open ONNX Runtime on each kind of device. A kind is a file with a `Provider`, in the table `PROVIDERS`."""

import re

from graphopt.errors import GraphoptError
from graphopt.runtime.providers.cpu import Cpu
from graphopt.runtime.providers.cuda import Cuda
from graphopt.runtime.providers.provider import Provider
from graphopt.runtime.providers.webgpu import WebGpu

PROVIDERS: dict[str, type[Provider]] = {kind.kind: kind for kind in (Cpu, Cuda, WebGpu)}


def provider_of(name: object) -> type[Provider]:
    """Return the provider of a device by the name of the device.

    Raises:
        GraphoptError: no device has this name.
    """
    for kind in PROVIDERS.values() if isinstance(name, str) else ():
        if re.fullmatch(kind.kind + (r"(:\d+)?" if kind.is_numbered else ""), str(name)):
            return kind
    *known, last = [each for x in PROVIDERS.values() for each in (x.kind, f"{x.kind}:N")[: 1 + x.is_numbered]]
    raise GraphoptError(f"device: expected {', '.join(map(repr, known))} or {last!r}, found {name!r}")


def for_workers() -> str:
    """Return the kinds of devices on which several workers may train, in words."""
    return " or ".join(name for name, kind in PROVIDERS.items() if kind.takes_workers)
