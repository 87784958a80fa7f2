"""Measurements of a run, as lines of JSON: each step once, for any number of interruptions."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fused_lwlr.data import files
from fused_lwlr.training.collectives import is_rank0, on_rank0
from fused_lwlr.training.records import Interval, LayerValues, Record, Validation, perplexity

LAYERS = {"elr": "ELR = ‖g‖ / ‖w‖", "trust_ratio": "trust ratio", "multiplier": "multiplier η"}
"""Fields of layers, and their names in figures."""
FILES = {"train": "metrics.jsonl", "validation": "metrics.jsonl", "layers": "layers.jsonl"}


class Metrics:
    """Appends to `metrics.jsonl` and, for layers, to `layers.jsonl` in the folder of a run.

    A record is on the disk when `add` returns: the records of a step come before its checkpoint, and none is missing
    after a crash. A record that could not be written is written before the next one. Rank 0 writes; all ranks construct
    this object, and may call `add`.

    Args:
        folder: folder of the run, made if it does not exist.
        after: the step of the checkpoint from which the run resumes; later records are dropped. None for a new run,
            which drops all records.
    """

    def __init__(self, folder: str | Path, *, after: int | None):
        self.folder = Path(folder)
        self._kept: set[tuple[Any, ...]] = set()
        # by file: the size of its whole lines, and the lines to write
        self._sizes: dict[str, int] = {}
        self._waiting: dict[str, bytes] = {}
        on_rank0(lambda: self._take_over(after))

    def add(self, record: Record) -> None:
        """Append a record, unless this step has one already (with the same weights, for a validation).

        Raises:
            OSError: it cannot be written now; the next call tries again.
        """
        content = plain(record)
        if not is_rank0() or _key(content) in self._kept:
            return
        self._kept.add(_key(content))
        line = json.dumps(content, allow_nan=False).encode() + b"\n"
        self._waiting[FILES[record.kind]] = self._waiting.get(FILES[record.kind], b"") + line
        for name in list(self._waiting):
            with (self.folder / name).open("ab") as file:
                if file.tell() > self._sizes[name]:
                    file.truncate(self._sizes[name])  # a part of a line, from a failed attempt
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
            # also if no file exists yet: a write error should appear before hours are spent
            files.replace_text(path, "".join(f"{json.dumps(record, allow_nan=False)}\n" for record in content))
            self._sizes[name] = path.stat().st_size


def plain(record: Record) -> dict[str, Any]:
    """A record as a dict of JSON values, with its kind; None replaces values that are not finite.

    The count has the name of its unit: `images`, `images_per_second`, or for text `tokens`, `tokens_per_second`.
    Text has `perplexity` instead of `top1` and `top5`.
    """
    content: dict[str, Any] = {"kind": record.kind}
    for field in fields(record):
        content[field.name] = files.finite(getattr(record, field.name))
        if field.name == "count" and isinstance(record, (Interval, Validation)):
            content[record.unit] = content.pop("count")
            if isinstance(record, Interval):
                content[f"{record.unit}_per_second"] = files.finite(record.per_second)
    if content.pop("unit", None) == "tokens" and isinstance(record, Validation):
        del content["top1"], content["top5"]
        content["perplexity"] = files.finite(perplexity(record.loss))
    return content


def scalars(record: Record) -> dict[str, float]:
    """Name -> number, for all finite values: `train/loss`, `validation/top1_ema`, `elr/<layer>`, ..."""
    content = plain(record)
    if isinstance(record, LayerValues):
        values = {f"{n}/{layer}": v for n in LAYERS for layer, v in zip(record.names, content[n], strict=True)}
    else:
        weights = f"_{content.pop('weights')}" if isinstance(record, Validation) else ""
        values = {f"{record.kind}/{n}{weights}": v for n, v in content.items() if n not in ("kind", "step")}
    return {name: value for name, value in values.items() if value is not None}


def unit_of(records: Sequence[Mapping[str, Any]]) -> str:
    """The unit that records of a training count: "images" or "tokens"."""
    return "tokens" if any("tokens" in record for record in records) else "images"


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records in a file of `Metrics`; none if there is no such file. An incomplete last line is left out."""
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    records = []
    # the text after the last newline is empty, or an incomplete line of a killed run
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            if not (isinstance(record["kind"], str) and isinstance(record["step"], int)):
                raise TypeError("no kind, or no step")
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of {path} is not a record of a run ({error!r}): delete it") from error
        records.append(record)
    return records


def _key(content: dict[str, Any]) -> tuple[Any, ...]:
    return content["kind"], content["step"], content.get("weights")
