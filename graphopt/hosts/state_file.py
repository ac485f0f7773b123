"""Locate the tensors in a safetensors file."""

from __future__ import annotations

import json
import struct
from typing import NamedTuple


class Place(NamedTuple):
    """Locate a tensor's numbers, in bytes from the beginning of a file."""

    offset: int
    size: int


def places(content: bytes) -> dict[str, Place]:
    """Return the place of each tensor in a safetensors file, by name.

    Source: https://github.com/huggingface/safetensors, section Format.
    """
    (length,) = struct.unpack_from("<Q", content)
    begin = 8 + length
    header = json.loads(content[8:begin])
    ends = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: Place(begin + start, end - start) for name, (start, end) in ends.items()}
