"""A report on a run from the files in its folder: one self-contained page of HTML."""

import base64
import io
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from fused_lwlr import files
from fused_lwlr.runs.metrics import FILES, read_records, unit_of
from fused_lwlr.runs.provenance import read_starts
from fused_lwlr.training.checkpoints import Checkpoints
from fused_lwlr.training.config_diff import json_values
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
        """Read the folder; files may be missing.

        Raises:
            FileNotFoundError: the folder does not exist, or no run was started in it.
            ValueError: one of the files does not belong to a run.
        """
        starts = read_starts(folder)
        if not starts:
            raise FileNotFoundError(
                f"{folder} holds no run, since it has no run.json: give the folder (--out) of a training"
            )
        metrics = read_records(folder / FILES["train"])
        kinds = {kind: [r for r in metrics if r["kind"] == kind] for kind in ("train", "validation")}
        checkpoints = Checkpoints(folder / "checkpoints").paths()
        layers = read_records(folder / FILES["layers"])
        return cls(
            folder, starts, kinds["train"], kinds["validation"], layers, checkpoints[-1] if checkpoints else None
        )

    @property
    def last(self) -> dict[str, Any]:
        """The last start."""
        return self.starts[-1]

    def results(self, weights: str) -> list[dict[str, Any]]:
        """Validations of the trained ("model") or averaged ("ema") weights with a finite loss."""
        name = "top1" if self.unit == "images" else "perplexity"
        return [r for r in self.validation if r["weights"] == weights and r[name] is not None]

    @property
    def unit(self) -> str:
        """The unit of the training: "images" or "tokens"."""
        return unit_of([*self.train, *self.validation])

    @property
    def top5(self) -> bool:
        """Whether the top-5 accuracy can differ from 100 %; a run of an older version did not record its classes."""
        return self.unit == "images" and self.last.get("classes", 6) > 5


class PeriodicReport:
    """Has the report written after a validation, so that a run that is killed has one as well; made on rank 0 alone.

    Args:
        write: writes the report.
        minutes: least time from the start to the first report, and from each report to the next.
    """

    def __init__(self, write: Callable[[], object], minutes: float):
        self._write, self._seconds, self._last = write, 60 * minutes, time.monotonic()

    def add(self, record: Record) -> None:
        """Receive a record, which the files of the run have already."""
        if record.kind == "validation" and time.monotonic() - self._last >= self._seconds:
            self._write()
            self._last = time.monotonic()


def write_report(folder: str | Path) -> Path:
    """Write `report.html` into the folder of a run, also of a run that died or is still running.

    From `run.json`, `metrics.jsonl` and `layers.jsonl` alone, and the names of its checkpoints. Needs matplotlib.

    Returns:
        the file.

    Raises:
        FileNotFoundError: there is no run in the folder.
        ValueError: one of its files is damaged; the message names it.
        OSError: the report cannot be written.
    """
    run = Run.read(Path(folder))
    path = run.folder / "report.html"
    files.replace_text(path, page(run))
    return path


def page(run: Run) -> str:
    """The HTML."""
    config = run.last["config"]
    data = f" on {config['data']}" if "data" in config else ""
    template = jinja2.Environment(
        loader=jinja2.PackageLoader("fused_lwlr.runs", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html")
    changed, rest = _options(config)
    return template.render(
        title=f"{config.get('model', run.folder.resolve().name)}{data}",
        finished=run.last.get("end") == "finished",
        status=_status(run),
        cards=list(_cards(run)),
        sections=list(_pictures(run)),
        speed=list(_speed(run)),
        changed=changed,
        rest=rest,
        facts=_facts(run.last),
        starts=[
            (
                _minute(s["started"]),
                (s["git"]["commit"] or "")[:12],
                ", ".join(_counted(s["devices"])),
                str(s.get("end") or ""),
            )
            for s in run.starts
        ],
    )


def _status(run: Run) -> str:
    steps, train = run.last.get("steps"), run.train
    at = max([r["step"] for r in [*train, *run.validation]], default=0)
    of = f" of {steps:,}" if steps else ""
    epoch = f", epoch {train[-1]['epoch']:.4g}" if train else ""
    ended = run.last.get("end")
    where = f"step {at:,}{of}{epoch}"
    begun = f"Started {_minute(run.starts[0]['started'])} UTC" + (
        f", {len(run.starts)} starts" if len(run.starts) > 1 else ""
    )
    if ended == "finished":
        return f"{begun}. Finished at {where}."
    left = f"the last checkpoint is {run.checkpoint.name}" if run.checkpoint else "there is no checkpoint"
    how = ended or "it was killed, or it still runs"
    return f"{begun}. Not finished: {how}. The records end at {where}; {left}."


def _cards(run: Run) -> Iterator[tuple[str, str]]:
    for weights, label in (("model", "trained weights"), ("ema", "averaged weights (EMA)")):
        results = run.results(weights)
        if results and run.unit == "tokens":
            best, last = min(results, key=lambda r: r["loss"]), results[-1]
            told = f"{label}, in nats a token"
            yield f"{best['loss']:.4f}", f"lowest validation loss, {told}, epoch {best['epoch']:.4g}"
            yield f"{last['loss']:.4f}", f"final loss (perplexity {last['perplexity']:.2f}), {told}"
        elif results:
            best, last = max(results, key=lambda r: r["top1"]), results[-1]
            yield _percent(best["top1"]), f"best top-1, {label}, epoch {best['epoch']:.4g}"
            top5 = f" (top-5 {_percent(last['top5'])})" if run.top5 else ""
            yield _percent(last["top1"]), f"final top-1{top5}, {label}"
    if run.train:
        count, seconds = (sum(r[name] or 0 for r in run.train) for name in (run.unit, "seconds"))
        if seconds > 0:
            yield f"{count / seconds:,.0f}", f"{run.unit} a second in training, on average"
        spent = seconds + sum(r["seconds"] or 0 for r in run.validation)
        yield _duration(spent), "in training and validation"
        if skipped := sum(r["skipped"] for r in run.train):
            yield f"{skipped:,}", "images skipped, since they could not be read"


def _pictures(run: Run) -> Iterator[tuple[str, list[str], str]]:
    """Title, pictures as `data:` addresses, and caption of each section."""
    # imported only here: the page of a run without records needs no figures
    from fused_lwlr.runs import figures

    if run.train or run.validation:
        caption = f"Loss, {'accuracy' if run.unit == 'images' else 'perplexity'} and learning rate"
        yield "Learning", _drawn(figures.learning(run.train, run.validation, top5=run.top5)), caption
    if run.train:
        caption = f"{run.unit.capitalize()} a second, and where the time goes"
        yield "Throughput", _drawn(figures.throughput(run.train)), caption
    if run.layers:
        last = run.layers[-1]
        yield (
            "Effective learning rates over training",
            _drawn(figures.layers_over_time(run.layers)),
            "Lines from dark (the first layer) to bright (the last)",
        )
        # without a scaling, or multipliers, these are constant
        told = [name for name in ("trust_ratio", "multiplier") if any(value not in (1, None) for value in last[name])]
        shown = [name for name in ("elr", *told) if any(value is not None for value in last[name])]
        absent = [f"{name.replace('_', ' ')}s" for name in ("trust_ratio", "multiplier") if name not in told]
        yield (
            f"Layers in step {last['step']:,}",
            _drawn([figures.by_depth(last, name) for name in shown]),
            "Every layer, as last recorded" + (f"; all {' and '.join(absent)} are 1" if absent else ""),
        )


def _drawn(drawings: Sequence[Any]) -> list[str]:
    """PNG files as `data:` addresses."""
    found = []
    for figure in drawings:
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=200)
        found.append(f"data:image/png;base64,{base64.b64encode(memory.getvalue()).decode()}")
    return found


def _speed(run: Run) -> Iterator[tuple[str, str]]:
    total = {n: sum(r.get(n) or 0 for r in run.train) for n in (run.unit, "seconds", "loader_seconds", "step_seconds")}
    for label, seconds in (("training", total["seconds"]), ("training, without waiting", total["step_seconds"])):
        if seconds > 0:
            yield f"{run.unit} a second, {label}", f"{total[run.unit] / seconds:,.1f}"
    if total["seconds"] > 0:
        yield "waiting for the loader", _percent(total["loader_seconds"] / total["seconds"])
    peak = run.last.get("peak_memory_bytes")
    if peak is not None:
        yield "device memory at its peak", f"{peak / 2**30:.2f} GiB"
    validations = [r["seconds"] for r in run.validation if r["seconds"] is not None]
    if validations:
        yield "a validation takes", f"{sum(validations) / len(validations):.1f} s"


def _options(config: Mapping[str, Any]) -> tuple[Rows, Rows]:
    """Options that differ from their defaults, with the defaults; and the others, if they have a value."""
    defaults = json_values(DEFAULTS)
    given = {name: value for name, value in config.items() if name in defaults and value not in (None, [])}
    changed = [
        (name, _value(value), FIELDS[name].json_schema_extra["shown"] or _value(defaults[name]) or "none")
        for name, value in given.items()
        if value != defaults[name]
    ]
    return changed, [(name, _value(value)) for name, value in given.items() if value == defaults[name]]


def _facts(last: Mapping[str, Any]) -> Rows:
    """The command, sources and machine of a start."""
    git, host = last["git"], last["host"]
    commit = "not under version control" if git["commit"] is None else git["commit"][:12]
    return [
        ("command", last["command"]),
        ("commit", commit + (", with changes" if git["dirty"] else "")),
        ("seed", str(last["seed"])),
        ("devices", ", ".join(_counted(last["devices"]))),
        ("processes", str(last["world_size"])),
        ("host", f"{host['cpu']}, {host['cores']} cores, {host['system']}"),
        *((name, version or "not installed") for name, version in last["versions"].items()),
        # entries that describe the data
        *((name, _value(value)) for name, value in last["config"].items() if name not in {*FIELDS, "world_size"}),
    ]


def _counted(names: Sequence[str]) -> list[str]:
    return [f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]


def _value(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _minute(started: str) -> str:
    """2026-05-04 13:37, of a time in ISO 8601."""
    return started[:16].replace("T", " ")


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02} min" if hours else f"{rest // 60} min {rest % 60:02} s"
