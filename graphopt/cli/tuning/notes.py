"""Read what a model file, and files beside it, say about the images and the classes that it was made for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphopt.files import json_of, read_file
from graphopt.graph.classified import class_names
from graphopt.graph.metadata import PIXEL_RANGE
from graphopt.graph.values import constant_of

# (x - mean) / scale for pixels x from 0 to 1, by the name of what results.
Moments = tuple[list[float], list[float]]
PIXELS: dict[str, Moments] = {
    "unit": ([0.0], [1.0]),  # 0 to 1
    "symmetric": ([0.5], [0.5]),  # -1 to 1
    "imagenet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),  # torchvision's
    "bytes": ([0.0], [1 / 255]),  # 0 to 255
}
MOST_BYTES = 2**24  # of a file of notes
LARGEST = 4096  # pixels along an axis
MEAN_OF_BYTES = 50  # at least, which networks subtract
_RANGES = {  # of ONNX's documentation, MetadataProps.md
    "NominalRange_0_255": PIXELS["bytes"],
    "Normalized_0_1": PIXELS["unit"],
    "Normalized_1_1": PIXELS["symmetric"],
}


@dataclass(frozen=True)
class Notes:
    """Hold what was noted about a model.

    Args:
        moments: what standardizes pixels from 0 to 1, and the file that says so.
        size: the height and the width of its images.
        labels: the names of its classes, in order.
    """

    moments: tuple[Moments, str] | None = None
    size: tuple[int, int] | None = None
    labels: list[str] | None = None

    @classmethod
    def of(cls, file: Path, model: ir.Model) -> Notes:
        """Return the notes of a model: its own first, then those in its folder, and above a folder `onnx`.

        Read are the metadata `Image.NominalPixelRange` and `labels`, the classes of scikit-learn's operators,
        `preprocessor_config.json` of transformers, `config.json` of timm and transformers, and last the first nodes.

        Raises:
            GraphoptError: a file beside the model is too large, or no JSON.
        """
        moments = _RANGES.get(PIXEL_RANGE.read(model) or "")
        found = [cls(None if moments is None else (moments, str(file)), labels=class_names(model))]
        folder = file.absolute().parent
        for above_or_beside in (folder, folder.parent) if folder.name == "onnx" else (folder,):
            for name, read in _READERS.items():
                with suppress(FileNotFoundError):
                    place = above_or_beside / name
                    said = json_of(read_file(place, MOST_BYTES), str(place))
                    found.append(read(str(place), said) if isinstance(said, dict) else cls())
        if _rescales_bytes(model):
            found.append(cls((PIXELS["bytes"], str(file))))
        return cls(
            next((note.moments for note in found if note.moments), None),
            next((note.size for note in found if note.size), None),
            next((note.labels for note in found if note.labels), None),
        )


def _rescales_bytes(model: ir.Model) -> bool:
    """Return whether the first nodes bring bytes to 0 to 1 or to -1 to 1, or subtract means of bytes.

    Keras's Rescaling(1 / 255) and Rescaling(1 / 127.5, offset=-1) do so.
    """
    inputs, factor = [x for x in model.graph.inputs if not x.is_initializer()], 1.0
    x, is_moved = (inputs[0] if len(inputs) == 1 else None), False
    while x is not None and len({*x.consumers()}) == 1:
        node = x.consumers()[0]
        numbers = next((array for y in node.inputs if (array := constant_of(y)) is not None), None)
        is_scaled = node.op_type == "Mul" or (node.op_type == "Div" and node.inputs[0] is x)
        if is_scaled and numbers is not None and np.all(numbers > 0):
            factor *= float(numbers.max()) if node.op_type == "Mul" else 1 / float(numbers.min())
        elif node.op_type in ("Add", "Sub") and numbers is not None:
            is_moved = is_moved or float(np.abs(numbers).min()) > MEAN_OF_BYTES * factor
        elif node.op_type not in ("Cast", "Identity", "Transpose"):
            break
        x = node.outputs[0]
    return is_moved or any(math.isclose(255 * factor, width, rel_tol=0.01) for width in (1, 2))


def _of_image_processor(source: str, said: Mapping[str, object]) -> Notes:
    size = said.get("crop_size", said.get("size"))
    if isinstance(size, Mapping):
        size = [size.get(axis, size.get("shortest_edge")) for axis in ("height", "width")]
    elif isinstance(size, int):
        size = [size, size]
    factor = _numbers(said.get("rescale_factor", 1 / 255)) if said.get("do_rescale", True) else [1.0]
    mean, scale = _numbers(said.get("image_mean")), _numbers(said.get("image_std"))
    if said.get("do_normalize", True) is False:
        mean, scale = [0.0], [1.0]
    if not factor or factor[0] <= 0 or not mean or not scale or min(scale) <= 0:
        return Notes(None, _size(size))
    by = 255 * factor[0]  # what a pixel of 1 becomes before it is standardized
    return Notes((([x / by for x in mean], [x / by for x in scale]), source), _size(size))


def _of_config(source: str, said: Mapping[str, object]) -> Notes:
    timm = said.get("pretrained_cfg", said)
    timm = timm if isinstance(timm, Mapping) else {}
    mean, scale, shape = _numbers(timm.get("mean")), _numbers(timm.get("std")), timm.get("input_size")
    names = said.get("id2label", said.get("label_names"))
    by_number = dict(enumerate(names)) if isinstance(names, list) else names if isinstance(names, Mapping) else {}
    texts = {str(number): str(name) for number, name in by_number.items()}
    labels = [texts[str(i)] for i in range(len(texts)) if str(i) in texts]
    return Notes(
        ((mean, scale), source) if mean and scale and min(scale) > 0 else None,
        _size(shape[1:]) if isinstance(shape, list) else None,
        labels if len(labels) == len({*labels}) == len(texts) else None,
    )


_READERS = {"preprocessor_config.json": _of_image_processor, "config.json": _of_config}


def _numbers(said: object) -> list[float] | None:
    """Return finite numbers, one or one for each of three channels, or None."""
    numbers = [float(x) for x in (said if isinstance(said, list) else [said]) if isinstance(x, int | float)]
    length = len(said) if isinstance(said, list) else 1
    return numbers if len(numbers) == length in (1, 3) and all(map(math.isfinite, numbers)) else None


def _size(said: object) -> tuple[int, int] | None:
    """Return a height and a width, or None."""
    if not isinstance(said, list) or len(said) != 2 or not all(isinstance(x, int) for x in said):
        return None
    return (said[0], said[1]) if 0 < min(said) <= max(said) <= LARGEST else None
