"""Read data sets from files and cut them into batches. This package imports `graph` and `moments`."""

from typing import NoReturn

from graphopt.arguments import no_attribute
from graphopt.data import columnar, files
from graphopt.data.audio_folders import audio
from graphopt.data.columnar import *
from graphopt.data.columns import Category, Date, Number
from graphopt.data.dataset import Dataset, LazyArray
from graphopt.data.earlier_rows import replay
from graphopt.data.files import *
from graphopt.data.foreign import table
from graphopt.data.image_folders import images
from graphopt.data.language.labelled import labelled_text
from graphopt.data.language.reader import prompts, text
from graphopt.data.language.tokenizer import Characters, Tokenizer
from graphopt.data.loader import Batches, Loader, hold_out, prefetched
from graphopt.data.samples import diabetes, digits
from graphopt.data.tables import Columns
from graphopt.moments import balanced_class_weights, mean_and_scale

__all__ = [
    "Batches",
    "Category",
    "Characters",
    "Columns",
    "Dataset",
    "Date",
    "LazyArray",
    "Loader",
    "Number",
    "Tokenizer",
    "audio",
    "balanced_class_weights",
    "diabetes",
    "digits",
    "hold_out",
    "images",
    "labelled_text",
    "mean_and_scale",
    "prefetched",
    "prompts",
    "replay",
    "table",
    "text",
]
__all__ += columnar.__all__ + files.__all__

READERS = {**files.ENDINGS, **columnar.ENDINGS, ".jsonl": "text", ".ndjson": "text"}


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
