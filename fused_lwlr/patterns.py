"""Names and patterns of names, which select layers or leave them out."""

import difflib
import re
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase

from torch import Tensor

Selector = Callable[[str, Tensor], bool] | str | Iterable[str]
_SLICE = re.compile(r"(?P<name>.*)\[(?P<start>\d+):(?P<stop>\d+)\]")


def weights(name: str, param: Tensor) -> bool:
    """Weights of convolutions, linear layers and embeddings: parameters with two or more dimensions."""
    return param.dim() >= 2


def everything(name: str, param: Tensor) -> bool:
    """Every parameter."""
    return True


class Selection:
    """The parameters that a selector selects.

    Args:
        select: a predicate of name and parameter, or one or more names and patterns of names with `*` and `?`. Patterns
            that start with `!` exclude their matches from the selection of the other patterns, or, without others, from
            the selection of `default`.
        default: a selector.
        owner: the class that has the argument `select`, for messages.

    Attributes:
        patterns: the names and patterns, as a tuple; None for a predicate.

    Raises:
        ValueError: `select` is neither a predicate, nor a name, nor names and patterns.
    """

    patterns: tuple[str, ...] | None = None

    def __init__(self, select: Selector, default: Selector = weights, owner: str = ""):
        self._select, self._default, self._owner = select, default, owner
        # a class is a mistake: parameters are not modules
        if callable(select) and not isinstance(select, type):
            return
        # patterns may be an iterator, which can be read only once
        several = isinstance(select, Iterable) and not isinstance(select, str)
        patterns: tuple[str, ...] = tuple(select) if several else (select,)  # type: ignore[arg-type, assignment]
        if not all(isinstance(pattern, str) for pattern in patterns):
            # one line, also if it has tensors
            shown = " ".join(repr(select).split())
            raise ValueError(f"{self._argument(shown[:80])} must be a predicate, a name, or names and patterns")
        self.patterns = patterns
        self._chosen = [pattern for pattern in patterns if not pattern.startswith("!")]
        self._excluded = [pattern[1:] for pattern in patterns if pattern.startswith("!")]

    def selects(self, name: str | None, param: Tensor) -> bool:
        """Returns whether a parameter with this name, or None, is selected."""
        if callable(self._select):
            return bool(self._select(name or "", param))
        if name is None or matches(name, self._excluded):
            return False
        if self._excluded and not self._chosen:
            return Selection(self._default).selects(name, param)
        return matches(name, self._chosen)

    def check(self, names: Iterable[str] | None, kind: str) -> None:
        """Raises ValueError if a pattern matches no name, or there are no names. Messages call the names a `kind`."""
        if self.patterns is None:
            return
        if names is None:
            raise ValueError(
                f"{self._argument()} goes by names, but the parameters were given without: pass "
                "model.named_parameters(), or groups of named parameters"
            )
        known = dict.fromkeys(names)
        for pattern in (*self._chosen, *self._excluded):
            find(pattern, known, self._argument(), kind)

    def _argument(self, value: str = "") -> str:
        return f"{self._owner}(select={value or '...'})" if self._owner else f"select={value}"


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name is one of `patterns`, or matches one with `*` and `?`; a slice also by its parameter's name."""
    names = {name, name.rpartition("[")[0] if name.endswith("]") else name}
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns for name in names)


def find(pattern: str, known: Collection[str], argument: str, kind: str) -> list[str]:
    """Returns the known names that match a pattern.

    Raises:
        ValueError: no name matches, or the pattern is no text. The message names the argument with the pattern, and the
            kind of known names.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"{argument} has {' '.join(repr(pattern).split()):.80}, but must have names and patterns")
    # a known name is not read as a pattern, in which its brackets would mean a set of characters; it is faster, too
    found = [pattern] if pattern in known else [name for name in known if matches(name, [pattern])]
    if not found:
        wider = [each for each in (f"{pattern}.*", f"*.{pattern}") if any(matches(name, [each]) for name in known)]
        suggestions = [*wider, *difflib.get_close_matches(pattern, known, n=1)]
        hint = f"; names are such as {', '.join(map(repr, list(known)[:3]))}"
        if suggestions:
            hint = f"; did you mean {suggestions[0]!r}?"
        raise ValueError(f"{argument} has {pattern!r}: it is not a {kind}{hint}")
    return found


def split_name(name: str) -> tuple[str, int, int | None]:
    """Splits the name of a layer into parameter name, start and stop; whole parameters have no stop (None)."""
    match = _SLICE.fullmatch(name)
    return (match["name"], int(match["start"]), int(match["stop"])) if match else (name, 0, None)


def with_parameters(names: Iterable[str]) -> list[str]:
    """The names of layers, and of the parameters that they are slices of."""
    names = list(names)
    return list(dict.fromkeys([*names, *(split_name(name)[0] for name in names)]))
