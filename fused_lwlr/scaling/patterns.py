"""Names and patterns of names, which select parameters or leave them out."""

import difflib
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase


def split_patterns(patterns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Patterns that select, and, without their leading `!`, patterns that leave out."""
    patterns = list(patterns)
    return [p for p in patterns if not p.startswith("!")], [p[1:] for p in patterns if p.startswith("!")]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of `patterns`, or fits one by its `*` and `?`; a slice also by its parameter's name."""
    names = {name, name.rpartition("[")[0] if name.endswith("]") else name}
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns for name in names)


def check_patterns(patterns: Iterable[str], known: Sequence[str], argument: str, owner: str) -> None:
    """Raise ValueError if a pattern fits none of the known names.

    Args:
        argument: what the patterns were given as, for the message.
        owner: what a name should be one of, for the message.
    """
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in known):
            close = difflib.get_close_matches(pattern, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"{argument} has {pattern!r}, which is no {owner}{hint}")
