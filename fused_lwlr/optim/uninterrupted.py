"""A block of code that no signal handler interrupts."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NAMES = ("HUP", "INT", "USR1", "USR2", "ALRM", "TERM")
SIGNALS = tuple(getattr(signal, f"SIG{name}") for name in NAMES if hasattr(signal, f"SIG{name}"))
"""Signals that programs handle, on this system."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Runs the Python handlers of signals that arrive within the block after it.

    A handler may raise, as Ctrl-C's does, between any two operations of the main thread. Within a step that would leave
    some parameters or counts of a step behind the others.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python runs handlers in the main thread only
        yield
        return
    handlers: dict[Any, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    pending: list[int] = []
    postponing = True

    def postpone(number: int, frame: Any) -> None:
        # a handler that raises while handlers are put back may leave this one in its place
        pending.append(number) if postponing else handlers[number](number, frame)

    try:
        for number in handlers:
            signal.signal(number, postpone)
        yield
    finally:
        postponing = False
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        finally:
            _deliver(pending)


def _deliver(pending: list[int]) -> None:
    """Sends signals to this process, all of them even if a handler raises."""
    if pending:
        try:
            signal.raise_signal(pending.pop(0))
        finally:
            _deliver(pending)
