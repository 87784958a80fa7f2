"""A report on a run from the files in its folder: one self-contained page of HTML."""

import base64
import io
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from fused_lwlr.data import files
from fused_lwlr.runs.metrics import FILES, read_records, unit_of
from fused_lwlr.runs.provenance import read_starts
from fused_lwlr.training.checkpoints import Checkpoints
from fused_lwlr.training.defaults import implied_defaults, small_model_defaults
from fused_lwlr.training.recipe import DEFAULTS, FIELDS
from fused_lwlr.training.records import Record

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Run:
    """The contents of a run's folder."""

    folder: Path
    starts: list[dict[str, Any]]
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    checkpoint: Path | None

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """Read the folder; files other than `run.json` may be missing."""
        starts = read_starts(folder)
        if not starts:
            raise FileNotFoundError(
                f"{folder} holds no run (run.json is missing or empty): give the folder (--out) of a training"
            )
        metrics, layers = (read_records(folder / FILES[kind]) for kind in ("train", "layers"))
        train, validation = ([r for r in metrics if r["kind"] == kind] for kind in ("train", "validation"))
        checkpoint = next(reversed(Checkpoints(folder / "checkpoints").paths()), None)
        return cls(folder, starts, train, validation, layers, checkpoint)

    @property
    def last(self) -> dict[str, Any]:
        """The last start."""
        return self.starts[-1]

    def results(self, weights: str) -> list[dict[str, Any]]:
        """Validations of the trained ("model") or averaged ("ema") weights with a finite loss."""
        return [r for r in self.validation if r["weights"] == weights and r["loss"] is not None]

    def total(self, name: str) -> float:
        """The sum of a field over all records of training, in which it may be missing or None."""
        return sum(record.get(name) or 0 for record in self.train)

    @property
    def unit(self) -> str:
        """The unit of the training: "images" or "tokens"."""
        return unit_of([*self.train, *self.validation])

    @property
    def top5(self) -> bool:
        """Whether the top-5 accuracy can differ from 100 %; a run of an older version did not record its classes."""
        return self.unit == "images" and self.last.get("classes", 6) > 5


class PeriodicReport:
    """Writes the report after a validation, so that a killed run has one too. Made on rank 0 alone.

    It takes at least `minutes` from the start to the first report, and from each report to the next.
    """

    def __init__(self, write: Callable[[], object], minutes: float):
        self._write, self._seconds, self._last = write, 60 * minutes, time.monotonic()

    def add(self, record: Record) -> None:
        """Receive a record, which the files of the run have already."""
        if record.kind == "validation" and time.monotonic() - self._last >= self._seconds:
            self._write()
            self._last = time.monotonic()


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into the folder of a run, also of a run that died or is still running; returns the file.

    From `run.json`, `metrics.jsonl` and `layers.jsonl` alone, and the names of its checkpoints. Needs matplotlib.
    """
    run = Run.read(Path(folder))
    path = run.folder / "report.html"
    try:
        text = page(run)
    except (AttributeError, LookupError, TypeError, ValueError, jinja2.UndefinedError) as error:
        raise ValueError(
            f"run.json, metrics.jsonl or layers.jsonl in {folder} is damaged, or not of a run ({error!r}): give the "
            "folder (--out) of a training"
        ) from error
    files.replace_text(path, text)
    return path


def page(run: Run) -> str:
    """The HTML."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fused_lwlr.runs", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"counted": _counted, "duration": _duration, "value": _value}
    changed, rest = _options(run.last["config"])
    return environment.get_template("report.html").render(
        run=run, fields={*FIELDS, "world_size"}, sections=list(_pictures(run)), changed=changed, rest=rest
    )


def _pictures(run: Run) -> Iterator[tuple[str, list[str], str]]:
    """Title, pictures as `data:` addresses, and caption of each section."""
    # imported only here: the page of a run without records needs no figures
    from fused_lwlr.runs import figures

    if run.train or run.validation:
        caption = f"Loss, {'accuracy' if run.unit == 'images' else 'perplexity'} and learning rate"
        yield "Learning", _data_urls(figures.learning(run.train, run.validation, top5=run.top5)), caption
    if run.train:
        caption = f"{run.unit.capitalize()} a second, and where the time goes"
        yield "Throughput", _data_urls(figures.throughput(run.train)), caption
    if run.layers:
        last, caption = run.layers[-1], "Lines from dark (the first layer) to bright (the last)"
        yield "Effective learning rates over training", _data_urls(figures.layers_over_time(run.layers)), caption
        # without a scaling, or multipliers, these are constant
        varied = [name for name in ("trust_ratio", "multiplier") if any(value not in (1, None) for value in last[name])]
        shown = [name for name in ("elr", *varied) if any(value is not None for value in last[name])]
        absent = [f"{name.replace('_', ' ')}s" for name in ("trust_ratio", "multiplier") if name not in varied]
        caption = "Every layer, as last recorded" + (f"; all {' and '.join(absent)} are 1" if absent else "")
        yield f"Layers in step {last['step']:,}", _data_urls([figures.by_depth(last, name) for name in shown]), caption


def _data_urls(drawings: Sequence[Any]) -> list[str]:
    """PNG files as `data:` addresses."""
    urls = []
    for figure in drawings:
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=200)
        urls.append(f"data:image/png;base64,{base64.b64encode(memory.getvalue()).decode()}")
    return urls


def _options(config: Mapping[str, Any]) -> tuple[Rows, Rows]:
    """Options that differ from their defaults, with the defaults; and the others, if they have a value."""
    # some defaults follow from other options
    defaults = files.json_values({**DEFAULTS, **small_model_defaults(config), **implied_defaults(config)})
    given = {name: value for name, value in config.items() if name in defaults and value not in (None, [])}
    changed = [
        (name, _value(value), FIELDS[name].json_schema_extra["shown"] or _value(defaults[name]) or "none")
        for name, value in given.items()
        if value != defaults[name]
    ]
    return changed, [(name, _value(value)) for name, value in given.items() if value == defaults[name]]


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in Counter(names).items())


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02} min" if hours else f"{rest // 60} min {rest % 60:02} s"
