"""End a training run between two steps when the process is asked to end."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
Handler = Callable[[int, FrameType | None], None]
_SECONDS_TO_SECOND = 1.0  # after which a second Ctrl-C interrupts at once


class Signals:
    """Hold the first signal that has asked the process to end, or None."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._at = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; a Ctrl-C a second after the first one raises KeyboardInterrupt."""
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = signal.Signals(number), now
        elif number == signal.SIGINT and now - self._at > _SECONDS_TO_SECOND:
            raise KeyboardInterrupt


@contextlib.contextmanager
def handling(handler: Handler, chosen: Callable[[signal.Signals, object], bool] = lambda *_: True) -> Iterator[None]:
    """Handle signals in a `with` block: those whose number and handler so far are chosen. Only the main thread can."""
    with contextlib.ExitStack() as stack:
        for sig in ENDING if _is_main_thread() else ():
            before = signal.getsignal(sig)
            if chosen(sig, before):
                stack.callback(signal.signal, sig, before)
                signal.signal(sig, handler)
        yield


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Raise SystemExit with the usual exit code at SIGTERM, SIGHUP and SIGUSR1 in a `with` block."""

    def end(sig: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + sig)

    with handling(end, lambda sig, before: sig != signal.SIGINT and before is signal.SIG_DFL):
        yield


@contextlib.contextmanager
def deferred() -> Iterator[Signals]:
    """Note Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 in a `with` block, and deliver the first of them after it.

    In a thread other than the main one, signals do what they did before, and one that `received` has been set to raises
    SystemExit with the usual exit code. A signal that the process ignores stays ignored.
    """
    signals = Signals()
    try:
        with handling(signals.handle, lambda _, before: before not in (signal.SIG_IGN, None)):
            yield signals
    finally:
        if signals.received is not None:
            if not _is_main_thread():
                raise SystemExit(128 + signals.received)
            signal.raise_signal(signals.received)
