"""Read a folder of images, with a folder for each class."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from graphopt.arguments import checked
from graphopt.data.dataset import TARGET, Array, Dataset, LazyArray
from graphopt.data.files import EXPANSION, check_ratio, imported, reading, reason
from graphopt.data.tabular import refuse_twice
from graphopt.errors import GraphoptError, some
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
    that start with a dot are skipped, and so are files that are not images by name and contents, such as
    Thumbs.db, with a warning. Pillow reads and resizes the images, in the formats BMP, GIF (the first image),
    JPEG, PNG, PPM, TIFF and WebP. As in torchvision's ImageFolder, an alpha channel is dropped, and the orientation in
    EXIF data does not turn an image. Of 16 bits, the upper 8 count.

    Args:
        path: a folder with a folder of images for each class.
        size: the height and the width to resize to, such as [224, 224]; None if all images have the same.
        channels: 3 for colours, 1 for gray.
        scale: return float32 from 0 to 1; otherwise uint8 from 0 to 255.
        layout: NCHW for rows [C, H, W], as PyTorch's models take; NHWC for rows [H, W, C], as Keras's do.
        resample: how Pillow resizes: nearest, box, bilinear, hamming, bicubic or lanczos.
        target: `folder` for the class of each image; None for no target, for predictions. Images may then also lie
            in the folder itself.
        labels: the names of the classes in order, if there are others than those of the folders.
        expansion: the maximum ratio of an image's size in memory to its file's size; 32 MiB are always accepted.

    Raises:
        GraphoptError: Pillow is not installed, the folder has no classes or no images, or a file is not an image or
            expands too far.

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
    if size is not None and (len(size) != 2 or min(size) < 1 or math.prod(size) > MOST_PIXELS):
        raise GraphoptError(
            f"data.size: expected a height and a width, such as [224,224], of at most {MOST_PIXELS:,} pixels, found "
            f"{list(size)}"
        )
    root = Path(path)
    if not root.is_dir():
        raise GraphoptError(
            f"{path}: expected a folder of images, found {'a file' if root.exists() else 'none'}"
        )
    files, classes, names = _files_and_labels(root, target is not None, labels)
    files, classes, sizes = _without_others(root, files, classes)
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
    return Dataset(arrays, "x", len(names) or None, names or None)


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


def _files_and_labels(
    root: Path, is_labelled: bool, labels: Sequence[str] | None
) -> tuple[list[Path], np.ndarray, tuple[str, ...]]:
    """Return the files, the class of each, and the names of the classes."""
    if not is_labelled:
        return _files(root), np.zeros(0, np.int64), ()
    folders = [root / name for name in _shown(next(os.walk(root, onerror=_cannot_read))[1])]
    if not folders:
        raise GraphoptError(
            f"{root}: expected a folder for each class, found none: set data.target=null for images without classes"
        )
    names = tuple(folder.name for folder in folders) if labels is None else tuple(map(str, labels))
    if len(names) < 2:
        raise GraphoptError(
            f"{root}: expected the folders of two classes or more, found {', '.join(map(repr, names))}"
        )
    if labels is None and (parts := parts_of_split(names)):
        raise GraphoptError(
            f"{root}: expected a folder for each class, found the parts of a split, {', '.join(map(repr, names))}: set "
            f"data.path={root / parts[0]} and fit.validation={root / parts[-1]}"
        )
    refuse_twice(str(root), "label", names)
    files: list[Path] = []
    classes: list[int] = []
    for folder in folders:
        if folder.name not in names:
            raise GraphoptError(
                f"{folder}: expected a folder of {', '.join(names)}: add it to data.labels, or remove it"
            )
        files += _files(folder)
        classes += [names.index(folder.name)] * (len(files) - len(classes))
    return files, np.array(classes, np.int64), names


def parts_of_split(names: Sequence[str]) -> list[str]:
    """Return the folders to train on and to validate on, if all have names that people give to these; else none."""
    training = [name for name in names if name.lower() in ("train", "training")]
    others = [name for name in names if name.lower() in ("val", "valid", "validation", "dev", "eval")]
    tests = [name for name in names if name.lower() in ("test", "testing")]
    is_split = training and len(training) + len(others) + len(tests) == len(names)
    return [training[0], (others or tests)[0]] if is_split else []


def _files(root: Path) -> list[Path]:
    """Return the files in a folder and below it, in order."""
    files = []
    for at, folders, names in os.walk(root, onerror=_cannot_read):
        folders[:] = _shown(folders)
        files += [Path(at, name) for name in _shown(names)]
    if not files:
        raise GraphoptError(f"{root}: expected images, found an empty folder")
    return files


def _shown(names: list[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def _cannot_read(error: OSError) -> None:
    raise GraphoptError(f"{error.filename}: {reason(error)}") from error


def _without_others(
    root: Path, files: Sequence[Path], classes: np.ndarray
) -> tuple[list[Path], np.ndarray, list[tuple[int, int]]]:
    """Return the files that are images, the class of each, and their heights and widths; warn of the others."""
    with ThreadPoolExecutor() as threads:
        sizes = list(threads.map(_image_size, files))
    there = [i for i, size in enumerate(sizes) if size is not None]
    if others := [str(file) for file, size in zip(files, sizes, strict=True) if size is None]:
        if len({*classes[there].tolist()}) < len({*classes.tolist()}) or not there:
            raise GraphoptError(
                f"{root}: expected images in each folder, found only {some(others)}: add images, or remove the "
                "folder"
            )
        warnings.warn(f"{root}: skipped files that are not images: {some(others)}", stacklevel=4)
    return [files[i] for i in there], classes[there] if len(classes) else classes, [s for s in sizes if s]


def _image_size(file: Path) -> tuple[int, int] | None:
    """Return the height and the width of an image, or None if a file is not an image by name and contents."""
    try:
        with _opened(file) as image:
            return image.height, image.width
    except _NoImage:
        if not file.suffix or file.suffix.lower() in imported(*_PILLOW).registered_extensions():
            raise
        return None


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
