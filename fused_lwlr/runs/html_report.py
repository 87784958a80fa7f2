"""A report on a run from the files in its folder: one self-contained page of HTML."""

import base64
import html
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_lwlr import files
from fused_lwlr.runs.metrics import FILES, read_records, unit_of
from fused_lwlr.runs.provenance import read_starts
from fused_lwlr.training.checkpoints import Checkpoints

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.status { color: #555; margin: .3rem 0 1.4rem; } .died { color: #b3261e; }
.cards { display: flex; flex-wrap: wrap; gap: .8rem; }
.card { border: 1px solid #ddd; border-radius: 8px; padding: .6rem 1rem; min-width: 9rem; }
.card b { display: block; font-size: 1.4rem; } .card span { color: #666; font-size: .85rem; }
table { border-collapse: collapse; font-size: .88rem; } td, th { text-align: left; padding: .2rem 1rem .2rem 0;
  border-bottom: 1px solid #eee; vertical-align: top; } td:last-child { overflow-wrap: anywhere; }
th { font-weight: 600; color: #555; } img { max-width: 100%; height: auto; } figure { margin: 0 0 1rem; }
figcaption, .note { color: #666; font-size: .85rem; } .columns { display: flex; flex-wrap: wrap; gap: 0 3rem; }
"""


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
            raise FileNotFoundError(f"{folder} holds no run, since it has no run.json")
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
    title = html.escape(str(run.last["config"].get("model", run.folder.resolve().name)))
    sections = [
        f"<h1>{title}</h1>",
        _status(run),
        _cards(run),
        *_pictures(run),
        _speed(run),
        _ran(run),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{title}: report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(section for section in sections if section)
        + "\n</body>\n</html>\n"
    )


def _status(run: Run) -> str:
    steps, train = run.last.get("steps"), run.train
    at = max([r["step"] for r in [*train, *run.validation]], default=0)
    of = f" of {steps:,}" if steps else ""
    epoch = f", epoch {train[-1]['epoch']:.4g}" if train else ""
    ended = run.last.get("end")
    where = f"step {at:,}{of}{epoch}"
    begun = f"Started {html.escape(run.starts[0]['started'])}" + (
        f", {len(run.starts)} starts" if len(run.starts) > 1 else ""
    )
    if ended == "finished":
        return f'<p class="status">{begun}. Finished at {where}.</p>'
    left = f"its last checkpoint is {run.checkpoint.name}" if run.checkpoint else "it has no checkpoint"
    how = f"Ended by {html.escape(str(ended))}" if ended else "Not finished: it died, or it still runs"
    return f'<p class="status died">{begun}. {how}. What is recorded ends at {where}; {left}.</p>'


def _cards(run: Run) -> str:
    cards = []
    for weights, label in (("model", "trained weights"), ("ema", "averaged weights (EMA)")):
        results = run.results(weights)
        if results and run.unit == "tokens":
            best, last = min(results, key=lambda r: r["loss"]), results[-1]
            told = f"{label}, in nats a token"
            cards.append((f"{best['loss']:.4f}", f"lowest validation loss, {told}, epoch {best['epoch']:.4g}"))
            cards.append((f"{last['loss']:.4f}", f"final loss (perplexity {last['perplexity']:.2f}), {told}"))
        elif results:
            best = max(results, key=lambda r: r["top1"])
            cards.append((_percent(best["top1"]), f"best top-1, {label}, epoch {best['epoch']:.4g}"))
            last = results[-1]
            cards.append((_percent(last["top1"]), f"final top-1 (top-5 {_percent(last['top5'])}), {label}"))
    if run.train:
        count, seconds = (sum(r[name] or 0 for r in run.train) for name in (run.unit, "seconds"))
        if seconds > 0:
            cards.append((f"{count / seconds:,.0f}", f"{run.unit} a second in training, on average"))
        spent = seconds + sum(r["seconds"] or 0 for r in run.validation)
        cards.append((_duration(spent), "in training and validation"))
        if run.unit == "images":
            cards.append((f"{sum(r['skipped'] for r in run.train):,}", "images skipped, since they could not be read"))
    shown = (f'<div class="card"><b>{value}</b><span>{html.escape(label)}</span></div>' for value, label in cards)
    return f'<div class="cards">{"".join(shown)}</div>' if cards else '<p class="note">Nothing was recorded yet.</p>'


def _pictures(run: Run) -> Iterable[str]:
    # imported only here: the page of a run without records needs no figures
    from fused_lwlr.runs import figures

    if run.train or run.validation:
        caption = f"Loss, {'accuracy' if run.unit == 'images' else 'perplexity'}, learning rate"
        yield _picture("Learning", lambda: figures.learning(run.train, run.validation), caption)
    if run.train:
        caption = f"{run.unit.capitalize()} a second and where the time goes"
        yield _picture("Throughput", lambda: figures.throughput(run.train), caption)
    if run.layers:
        last = run.layers[-1]
        # without a scaling, or multipliers, these are constant
        told = [name for name in ("trust_ratio", "multiplier") if any(value not in (1, None) for value in last[name])]
        yield _picture(
            "Effective learning rates over training",
            lambda: figures.layers_over_time(run.layers),
            "Lines from dark (the first layer) to bright (the last)",
        )
        yield _picture(
            f"Layers in step {last['step']:,}",
            lambda: figures.by_depth(last, "elr", *told),
            "Every layer, as last recorded; where trust ratios of a scaling or multipliers are not shown, they are 1",
        )


def _picture(title: str, draw: Callable[[], Any], caption: str) -> str:
    memory = io.BytesIO()
    draw().savefig(memory, format="png", dpi=150)
    data = base64.b64encode(memory.getvalue()).decode()
    return (
        f'<h2>{html.escape(title)}</h2>\n<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(caption)}.</figcaption></figure>"
    )


def _speed(run: Run) -> str:
    if not run.train:
        return ""
    total = {n: sum(r[n] or 0 for r in run.train) for n in (run.unit, "seconds", "loader_seconds", "step_seconds")}
    rows: list[tuple[str, str]] = []
    for label, seconds in (
        ("training", total["seconds"]),
        ("training, without waiting", total["step_seconds"]),
    ):
        if seconds > 0:
            rows.append((f"{run.unit} a second, {label}", f"{total[run.unit] / seconds:,.1f}"))
    if total["seconds"] > 0:
        rows.append(("waiting for the loader", _percent(total["loader_seconds"] / total["seconds"])))
    peak = run.last.get("peak_memory_bytes")
    if peak is not None:
        rows.append(("device memory at its peak", f"{peak / 2**30:.2f} GiB"))
    validations = [r["seconds"] for r in run.validation if r["seconds"] is not None]
    if validations:
        rows.append(("a validation takes", f"{sum(validations) / len(validations):.1f} s"))
    return f"<h2>Speed</h2>\n{_table(rows)}"


def _ran(run: Run) -> str:
    last = run.last
    config = [(key, _value(value)) for key, value in last["config"].items()]
    git = last["git"]
    commit = "not under version control" if git["commit"] is None else git["commit"][:12]
    host = last["host"]
    about = [
        ("command", last["command"]),
        ("commit", commit + (", with changes" if git["dirty"] else "")),
        ("seed", _value(last["seed"])),
        ("devices", ", ".join(_counted(last["devices"]))),
        ("processes", _value(last["world_size"])),
        ("host", f"{host['cpu']}, {host['cores']} cores, {host['system']}"),
        *((name, version or "not installed") for name, version in last["versions"].items()),
    ]
    starts = [
        (s["started"], (s["git"]["commit"] or "")[:12], ", ".join(_counted(s["devices"])), str(s.get("end") or ""))
        for s in run.starts
    ]
    return (
        '<div class="columns">\n'
        f"<div><h2>Options</h2>\n{_table(config)}</div>\n"
        f"<div><h2>What ran</h2>\n{_table(about)}</div>\n</div>\n"
        f"<h2>Starts</h2>\n{_table(starts, ('started (UTC)', 'commit', 'devices', 'ended'))}"
    )


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    titles = f"<tr>{''.join(f'<th>{html.escape(title)}</th>' for title in head)}</tr>\n" if head else ""
    lines = (f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return "<table>\n" + titles + "\n".join(lines) + "\n</table>"


def _counted(names: Sequence[str]) -> list[str]:
    return [f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_value(entry)}" for key, entry in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60:02} min" if hours else f"{rest // 60} min {rest % 60:02} s"
