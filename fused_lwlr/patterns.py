"""Names and patterns of names, which select layers or leave them out."""

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase


def split_patterns(patterns: Iterable[str]) -> tuple[list[str], list[str]]:
    """Patterns that select, and patterns that exclude, without their leading `!`."""
    patterns = list(patterns)
    return [p for p in patterns if not p.startswith("!")], [p[1:] for p in patterns if p.startswith("!")]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of `patterns`, or matches one with `*` and `?`; a slice also by its parameter's name."""
    names = {name, name.rpartition("[")[0] if name.endswith("]") else name}
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns for name in names)


def find(pattern: str, known: Collection[str], argument: str, owner: str) -> list[str]:
    """Returns the known names that match a pattern.

    Raises:
        ValueError: no name matches. The message names the argument with the pattern, and the kind of known names.
    """
    # a name before a pattern: names with brackets are patterns of other names, and there may be thousands
    found = [pattern] if pattern in known else [name for name in known if matches(name, [pattern])]
    if not found:
        wider = [each for each in (f"{pattern}.*", f"*.{pattern}") if any(matches(name, [each]) for name in known)]
        close = [*wider, *difflib.get_close_matches(pattern, known, n=1)]
        hint = (
            f"; did you mean {close[0]!r}?" if close else f"; names are such as {', '.join(map(repr, list(known)[:3]))}"
        )
        raise ValueError(f"{argument} has {pattern!r}, which is not a {owner}{hint}")
    return found
