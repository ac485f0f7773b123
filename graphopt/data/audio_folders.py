"""Read a folder of recordings, with a folder for each class."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from graphopt.arguments import checked
from graphopt.data.class_folders import files_and_labels, without_others
from graphopt.data.dataset import TARGET, Array, Dataset, LazyArray
from graphopt.data.files import imported, reading
from graphopt.errors import GraphoptError
from graphopt.files import ReadName

ENDINGS = (".wav", ".flac", ".ogg", ".mp3", ".aiff", ".aif")
MOST_SAMPLES = 2**24  # of a row
_SOUNDFILE = "data=audio", "soundfile"


@dataclass(frozen=True)
class _Size:
    """Hold the samples and the rate of a recording."""

    samples: int
    rate: int


@checked()
def audio(
    path: ReadName,
    *,
    samples: int | None = None,
    rate: int | None = None,
    channel_axis: bool = False,
    target: Literal["folder"] | None = "folder",
    labels: Sequence[str] | None = None,
) -> Dataset:
    """Read a folder of recordings as arrays [N, samples] from -1 to 1, each recording when its batch needs it.

    Each folder in it is a class, as for `graphopt.data.images`. The package soundfile reads WAV, FLAC, Ogg, MP3 and
    AIFF. Channels are averaged. Longer recordings are cut at their end, and shorter ones are followed by zeros.

    Args:
        path: a folder with a folder of recordings for each class.
        samples: the length of a row; None for that of the longest recording.
        rate: the samples per second that all recordings must have; None for those of the first one.
        channel_axis: return rows [1, samples].
        target: `folder` for the class of each recording; None for no target, for predictions.
        labels: the names of the classes in order, if there are others than those of the folders.

    Raises:
        GraphoptError: soundfile is not installed, the folder has no classes or no recordings, a file is damaged, or a
            recording has another rate.

    >>> import pathlib, soundfile
    >>> for name in ("high", "low"):
    ...     pathlib.Path("tones", name).mkdir(parents=True, exist_ok=True)
    ...     soundfile.write(f"tones/{name}/1.wav", numpy.zeros(800), 8000)
    >>> tones = graphopt.data.audio("tones", samples=1000)
    >>> tones.arrays["x"].shape, tones.labels
    ((2, 1000), ('high', 'low'))
    """
    imported(*_SOUNDFILE)
    for name, number in (("rate", rate), ("samples", samples)):
        if number is not None and not (isinstance(number, int) and 0 < number <= MOST_SAMPLES):
            raise GraphoptError(f"data.{name}: expected a whole number, 1 to {MOST_SAMPLES:,}, found {number!r}")
    root = Path(path)
    files, classes, names = files_and_labels(root, "recordings", target is not None, labels)
    files, classes, sizes = without_others(root, "recordings", files, classes, _size_of)
    wanted = sizes[0].rate if rate is None else rate
    for file, size in zip(files, sizes, strict=True):
        if size.rate != wanted:
            raise GraphoptError(
                f"{file}: expected {wanted:,} samples per second, found {size.rate:,}: convert it to this rate"
            )
    length = max(size.samples for size in sizes) if samples is None else samples
    if length > MOST_SAMPLES:
        raise GraphoptError(f"{path}: expected recordings of at most {MOST_SAMPLES:,} samples, found {length:,}")
    shape = (len(files), 1, length) if channel_axis else (len(files), length)
    arrays: dict[str, Array] = {"x": _Recordings(shape, files)}
    if target is not None:
        arrays[TARGET] = classes
    return Dataset(arrays, "x", len(names) or None, names or None)


def rate_of(path: str) -> int:
    """Return the samples per second of the first recording in a folder of classes."""
    imported(*_SOUNDFILE)
    files, classes, _ = files_and_labels(Path(path), "recordings", True, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading repeats them
        return without_others(Path(path), "recordings", files, classes, _size_of)[2][0].rate


class _Recordings(LazyArray):
    """Read recordings as rows of an array."""

    def __init__(self, shape: tuple[int, ...], files: Sequence[Path]) -> None:
        super().__init__(shape, np.float32)
        self._files = files

    def read(self, rows: np.ndarray) -> np.ndarray:
        found = np.zeros((len(rows), self.shape[-1]), np.float32)
        with ThreadPoolExecutor() as threads:  # libsndfile decodes without Python's lock
            for row, heard in zip(found, threads.map(self._heard, rows), strict=True):
                row[: len(heard)] = heard
        return found.reshape(len(rows), *self.shape[1:])

    def _heard(self, row: int) -> Any:
        file, library = self._files[row], imported(*_SOUNDFILE)
        with reading(file, "a whole recording", library.LibsndfileError):
            frames, _ = library.read(file, self.shape[-1], dtype="float32", always_2d=True)
            return frames.mean(axis=1)


def _size_of(file: Path) -> _Size | None:
    """Return the length and the rate of a recording, or None if a file is none by its name."""
    if file.suffix.lower() not in ENDINGS:
        return None
    library = imported(*_SOUNDFILE)
    with reading(file, "a recording", library.LibsndfileError):
        about = library.info(file)
        return _Size(about.frames, about.samplerate)
