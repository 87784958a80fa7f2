"""Warnings that point to the code of the user."""

import sys
import warnings

OURS = ("fused_lwlr", "torch")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the nearest line that called into this library, also through torch, as a scheduler wraps `step()`.

    Args:
        message: of the warning.
        category: of the warning.
    """
    frame, level = sys._getframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    warnings.warn(message, category, stacklevel=level)
