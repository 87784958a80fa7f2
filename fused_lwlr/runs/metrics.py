"""What a run measures, as lines of JSON: each step once, however often the run was interrupted."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fused_lwlr import files
from fused_lwlr.training.collectives import from_first, is_first, process_group
from fused_lwlr.training.records import Interval, Record, Validation, perplexity

TIMING = ("seconds", "loader_seconds", "step_seconds", "images_per_second", "tokens_per_second")
"""What differs between two runs that are the same otherwise."""


FILES = {"train": "metrics.jsonl", "validation": "metrics.jsonl", "layers": "layers.jsonl"}


class Metrics:
    """Appends to `metrics.jsonl` and, of layers, `layers.jsonl` in the folder of a run.

    A record is on the disk when `add` returns: the records of a step come before its checkpoint, and none is missing
    after a crash. A record that could not be written is written before the next one. Rank 0 writes; all ranks make it,
    and may add.

    Args:
        folder: of the run, made if need be.
        after: the step of the checkpoint that the run goes on from, whose earlier records are kept and later ones
            dropped; None for a run that begins, which drops all.

    Raises:
        OSError: the files cannot be written.
        ValueError: a line in the middle of a file is not one of a run; on all ranks.
    """

    def __init__(self, folder: str | Path, *, after: int | None = None):
        self.folder = Path(folder)
        self._kept: set[tuple[Any, ...]] = set()
        # by file: the size of its whole lines, and the lines to write
        self._sizes: dict[str, int] = {}
        self._waiting: dict[str, bytes] = {}
        from_first(lambda: self._take_over(after), process_group())

    def add(self, record: Record) -> None:
        """Append a record, unless there is one of this step already (of the same weights, for a validation).

        Raises:
            OSError: it cannot be written now; the next call tries again.
        """
        content = plain(record)
        if not is_first() or _key(content) in self._kept:
            return
        self._kept.add(_key(content))
        line = json.dumps(content, allow_nan=False).encode() + b"\n"
        self._waiting[FILES[record.kind]] = self._waiting.get(FILES[record.kind], b"") + line
        for name in list(self._waiting):
            with (self.folder / name).open("ab") as file:
                if file.tell() > self._sizes[name]:
                    file.truncate(self._sizes[name])  # a part of a line, from an attempt that failed
                file.write(self._waiting[name])
                file.flush()
                os.fsync(file.fileno())
                self._sizes[name] = file.tell()
            del self._waiting[name]

    def _take_over(self, after: int | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(FILES.values()):
            path = self.folder / name
            content = [] if after is None else [r for r in read_records(path) if r["step"] <= after]
            self._kept |= set(map(_key, content))
            # also where there is none yet: what cannot be written is told before hours are spent
            files.replace_text(path, "".join(f"{json.dumps(record, allow_nan=False)}\n" for record in content))
            self._sizes[name] = path.stat().st_size


def plain(record: Record) -> dict[str, Any]:
    """A record as a dict of values of JSON, with its kind; None stands for what is not finite.

    The count is named for what is counted: `images`, `images_per_second`, or of text `tokens`, `tokens_per_second`.
    Text has `perplexity` in place of `top1` and `top5`.
    """
    found: dict[str, Any] = {"kind": record.kind}
    for field in fields(record):
        found[field.name] = _finite(getattr(record, field.name))
        if field.name == "count" and isinstance(record, (Interval, Validation)):
            found[record.unit] = found.pop("count")
            if isinstance(record, Interval):
                found[f"{record.unit}_per_second"] = _finite(record.per_second)
    if found.pop("unit", None) == "tokens" and isinstance(record, Validation):
        del found["top1"], found["top5"]
        found["perplexity"] = _finite(perplexity(record.loss))
    return found


def unit_of(records: Sequence[Mapping[str, Any]]) -> str:
    """What records of a training count: "images" or "tokens"."""
    return "tokens" if any("tokens" in record for record in records) else "images"


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records in a file of `Metrics`; none if there is no such file. A last line that was cut off is left out.

    Raises:
        ValueError: another line is not one of a run.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = []
    # what follows the last newline is empty, or was being written when the run died
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            if not (isinstance(record["kind"], str) and isinstance(record["step"], int)):
                raise TypeError("no kind, or no step")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of {path} is not a record of a run ({error!r}): delete it") from error
        found.append(record)
    return found


def _key(content: dict[str, Any]) -> tuple[Any, ...]:
    return content["kind"], content["step"], content.get("weights")


def _finite(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
