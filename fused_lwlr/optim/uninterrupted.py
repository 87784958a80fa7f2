"""A block of code that no signal handler interrupts."""

import signal
import threading

# the functions behind `signal`, which converts numbers to enumerations at each call
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_handler
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

NAMES = ("HUP", "INT", "USR1", "USR2", "ALRM", "TERM")
SIGNALS = tuple(int(getattr(signal, f"SIG{name}")) for name in NAMES if hasattr(signal, f"SIG{name}"))
"""Signals that programs handle, on this system."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpones the Python handlers of signals until the block has ended.

    A handler may raise, as Ctrl-C's does, between any two operations of the main thread. Within a step that would leave
    some parameters or counts of a step behind the others.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python runs handlers in the main thread only
        yield
        return
    installed = zip(SIGNALS, map(getsignal, SIGNALS), strict=True)
    handlers: dict[int, Any] = {number: handler for number, handler in installed if callable(handler)}
    pending: list[int] = []
    postponing = True

    def postpone(number: int, frame: Any) -> None:
        if postponing:
            pending.append(number)
        else:
            # still installed, because a handler raised while handlers were restored
            handlers[number](number, frame)

    try:
        for number in handlers:
            set_handler(number, postpone)
        yield
    finally:
        postponing = False
        with ExitStack() as stack:
            # raised when all handlers are restored, all of them even if one handler raises
            for number in reversed(pending):
                stack.callback(signal.raise_signal, number)
            for number, handler in handlers.items():
                set_handler(number, handler)
