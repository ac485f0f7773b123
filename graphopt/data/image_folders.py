"""Read a folder of images, with a folder for each class."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from graphopt.arguments import checked
from graphopt.data.class_folders import files_and_labels, without_others
from graphopt.data.dataset import TARGET, Array, Dataset, LazyArray
from graphopt.data.files import EXPANSION, check_ratio, imported, reading
from graphopt.errors import GraphoptError
from graphopt.files import ReadName

# Formats that Pillow reads itself, without other programs.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
DECODED_PIXEL = 4  # bytes, while Pillow decodes
_UNSUSPICIOUS = 2**25  # bytes that an image may have, however small its file is
MOST_PIXELS = 2**26  # that data.size may ask for
_MODES = {1: "L", 3: "RGB"}  # by the number of channels
_PILLOW = "data=images", "PIL.Image", "Pillow"


class _NoImage(GraphoptError):
    """Report a file that is not an image in a format that graphopt reads."""


@checked()
def images(
    path: ReadName,
    *,
    size: Sequence[int] | None = None,
    channels: int = 3,
    scale: bool = True,
    layout: Literal["NCHW", "NHWC"] = "NCHW",
    resample: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = "bilinear",
    target: Literal["folder"] | None = "folder",
    labels: Sequence[str] | None = None,
    expansion: int = EXPANSION,
) -> Dataset:
    """Read a folder of images as arrays [N, C, H, W], each image when its batch needs it.

    Each folder in it is a class; the classes are numbered in the order of their names, and images may lie deeper. Names
    that start with a dot are skipped, and so are files that are not images, such as Thumbs.db, with a warning. Without
    classes, a file that is not an image but has the name of one is an error: predictions name no files, and their rows
    would shift. Pillow reads and resizes the images, in the formats BMP, GIF (the first image), JPEG, PNG, PPM, TIFF
    and WebP. As in torchvision's ImageFolder, an alpha channel is dropped, and the orientation in EXIF data does not
    turn an image. Of 16 bits, the upper 8 count.

    Args:
        path: a folder with a folder of images for each class; without classes, a folder of images, or one image.
        size: the height and the width to resize to, such as [224, 224]; None if all images have the same.
        channels: 3 for colours, 1 for gray.
        scale: return float32 from 0 to 1; otherwise uint8 from 0 to 255.
        layout: NCHW for rows [C, H, W], as PyTorch's models take; NHWC for rows [H, W, C], as Keras's do.
        resample: how Pillow resizes: nearest, box, bilinear, hamming, bicubic or lanczos.
        target: `folder` for the class of each image; None for no classes, for predictions.
        labels: the names of the classes in order, if there are others than those of the folders.
        expansion: the maximum ratio of an image's size in memory to its file's size; 32 MiB are always accepted.

    Raises:
        GraphoptError: Pillow is not installed, the folder has no classes or no images, an image is damaged or expands
            too far, or, without classes, a file is an image by its name alone.

    >>> import pathlib, PIL.Image
    >>> for name in ("cat", "dog"):
    ...     pathlib.Path("animals", name).mkdir(parents=True, exist_ok=True)
    ...     PIL.Image.new("RGB", (40, 30), "red").save(f"animals/{name}/1.png")
    >>> animals = graphopt.data.images("animals", size=[24, 32])
    >>> animals.arrays["x"].shape, animals.labels
    ((2, 3, 24, 32), ('cat', 'dog'))
    """
    pillow = imported(*_PILLOW)
    if channels not in _MODES:
        raise GraphoptError(f"data.channels: expected 1 or 3, found {channels}")
    if size is not None and (np.shape(size) != (2,) or min(size) < 1 or math.prod(size) > MOST_PIXELS):
        raise GraphoptError(
            f"data.size: expected a height and a width, such as [224,224], of at most {MOST_PIXELS:,} pixels, found "
            f"{np.array(size).tolist()}"
        )
    root = Path(path)
    files, classes, names = files_and_labels(root, "images", target is not None, labels)
    size_of = _image_size if target is not None else _size_by_name
    files, classes, sizes = without_others(root, "images", files, classes, size_of)
    pixel = DECODED_PIXEL if size is not None else max(DECODED_PIXEL, channels * (4 if scale else 1))
    for file, dims in zip(files, sizes, strict=True):
        check_ratio(file, math.prod(dims) * pixel, expansion, unsuspicious=_UNSUSPICIOUS)
        if size is None and dims != sizes[0]:
            raise GraphoptError(
                f"{file}: expected {_pixels_text(sizes[0])} pixels as {files[0].name}, found {_pixels_text(dims)}: "
                "set data.size=[HEIGHT,WIDTH] to resize all"
            )
    height, width = size or sizes[0]
    row = (channels, height, width) if layout == "NCHW" else (height, width, channels)
    dtype = np.float32 if scale else np.uint8
    arrays: dict[str, Array] = {
        "x": _Images((len(files), *row), dtype, files, pillow.Resampling[resample.upper()], layout)
    }
    if target is not None:
        arrays[TARGET] = classes
    pixel_range = "Normalized_0_1" if scale else "NominalRange_0_255"
    return Dataset(arrays, "x", len(names) or None, names or None, pixel_range=pixel_range)


class _Images(LazyArray):
    """Read images as rows of an array, [C, H, W] or [H, W, C]."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: npt.DTypeLike,
        files: Sequence[Path],
        resample: object,
        layout: str,
    ) -> None:
        super().__init__(shape, dtype)
        self._files, self._resample, self._is_last = files, resample, layout == "NHWC"
        channels, height, width = (shape[3], shape[1], shape[2]) if self._is_last else shape[1:]
        self._mode, self._size = _MODES[channels], (width, height)

    def read(self, rows: np.ndarray) -> np.ndarray:
        decoded = np.empty((len(rows), *self.shape[1:]), np.uint8)
        with ThreadPoolExecutor() as threads:  # Pillow decodes without Python's lock
            for i, pixels in enumerate(threads.map(self._pixels, rows)):
                decoded[i] = pixels
        return decoded / np.float32(255) if self.dtype.kind == "f" else decoded

    def _pixels(self, row: int) -> np.ndarray:
        file = self._files[row]
        with _opened(file) as image:
            if image.mode.startswith("I;16"):  # Pillow's own conversion would cut off the bright part
                image = imported(*_PILLOW).fromarray((np.asarray(image) >> 8).astype(np.uint8))
            elif image.mode in ("I", "F"):
                raise GraphoptError(f"{file}: expected 8 or 16 bits per channel, found 32")
            image.info.pop("transparency", None)  # the colours stay, however transparent
            image = image.convert(self._mode)
            if image.size != self._size:
                image = image.resize(self._size, self._resample)
            pixels = np.atleast_3d(image)
        return pixels if self._is_last else pixels.transpose(2, 0, 1)


def _image_size(file: Path) -> tuple[int, int] | None:
    """Return the height and the width of an image, or None if the file is not one."""
    try:
        with _opened(file) as image:
            return image.height, image.width
    except _NoImage:
        return None


def _size_by_name(file: Path) -> tuple[int, int] | None:
    """Return the height and the width of an image, or None if the file is not one by its name and its contents."""
    found, kind = _image_size(file), imported(*_PILLOW).registered_extensions().get(file.suffix.lower())
    if found is None and kind in FORMATS:
        raise GraphoptError(f"{file}: expected an image, as its name says, found another file: remove it, or rename it")
    return found


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open an image, and raise Pillow's errors as those of its file."""
    pillow = imported(*_PILLOW)
    with reading(file, "a whole image", pillow.DecompressionBombError):
        try:
            opened = pillow.open(file, formats=FORMATS)
        except pillow.UnidentifiedImageError as error:
            raise _NoImage(f"{file}: expected an image ({', '.join(FORMATS)}), found another file") from error
        with opened as image:
            yield image


def _pixels_text(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
