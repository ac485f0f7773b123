"""Prepare batches ahead of time in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from graphopt.errors import GraphoptError

T = TypeVar("T")


def prefetched(batches: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Yield the items of an iterable in order, while a thread prepares up to `depth` further items.

    An exception in the iterable is raised in place of its item. The thread ends after the last item, or when the
    iterator is closed.

    Args:
        depth: the number of items to prepare ahead; 0 for no thread.

    Raises:
        GraphoptError: `depth` is less than 0.
    """
    if depth < 0:
        raise GraphoptError(f"prefetch: expected 0 or more batches, found {depth}")
    return _ahead(iter(batches), depth)


def _ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    if not depth:
        yield from items
        return
    end: Any = object()
    with ThreadPoolExecutor(1, "graphopt-prefetch") as thread:
        coming = deque(thread.submit(next, items, end) for _ in range(depth))
        try:
            while (item := coming.popleft().result()) is not end:
                coming.append(thread.submit(next, items, end))
                yield item
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
