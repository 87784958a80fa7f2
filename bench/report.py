"""Results as Markdown."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from bench import codegen, cpu, host
from bench.rows import table
from bench.targets import judge

SECTIONS: dict[str, tuple[Any, ...]] = {
    "host": (host, "## Host time of a step, launch left out"),
    "cpu": (cpu, "## Steps on the CPU", "Medians of rounds in which all take turns, in single precision."),
    "codegen": (codegen, "## Code generation"),
}
"""Name -> the module with `rows`, `HEAD` and `cells`, and the text before the table."""
STEP_HEAD = (
    "step", "whose", "GPU µs, L2 flushed", "not flushed", "± %", "replay µs", "host µs", "whole step µs",
    "with moved gradients µs",
    "kernels (copies)", "bytes a parameter", "GB/s", "% of copy", "peak bytes a parameter",
)  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """The whole report; skipped sections are listed first."""
    lines = ["# Bench", "", *(f"- {name}: {value}" for name, value in results["about"].items())]
    lines += [f"- skipped: {what}: {why}" for what, why in results["skipped"].items()]
    lines += ["", "## Targets", "", *table(("target", "bound", "worst found", ""), judge(results))]
    if results.get("gpu"):
        lines += _gpu(results["gpu"])
    for name, (section, *about) in SECTIONS.items():
        if results.get(name):
            lines += ["", "\n\n".join(about), "", *table(section.HEAD, map(section.cells, results[name]))]
    return "\n".join(lines) + "\n"


def _gpu(gpu: dict[str, Any]) -> Iterator[str]:
    first, last = (value / 1e9 for value in (gpu["copy_bytes_per_second"] * 2)[:2])
    yield from ("", "## Steps", "")
    yield f"Medians of rounds in which all take turns; {gpu['timed']}, ± the range of the middle half. A copy in the "
    yield f"same run moved {first:.0f} GB/s before and {last:.0f} GB/s after. Bytes of our steps are counted. Bytes of "
    yield "other steps follow from their operations."
    for name, why in {**gpu["refused"], **gpu["absent"]}.items():
        yield f"- not timed: {name}: {why}"
    for name in gpu["no_time"]:
        yield f"- no time left: {name}"
    bandwidth = max(gpu["copy_bytes_per_second"])
    for case, of_case in groupby(gpu["rows"], itemgetter("set", "dtype", "rule")):
        first, *_ = rows = list(of_case)
        yield from ("", f"### {', '.join(case)}: {first['tensors']:,} tensors, {first['numel']:,}", "")
        head = (*STEP_HEAD, f"whole step / {first['method']} {first['who']}")
        yield from table(head, (_cells(row, bandwidth) for row in rows))


def _cells(row: dict[str, Any], bandwidth: float) -> tuple[str, ...]:
    if "skipped" in row:
        return row["method"], row["who"], row["skipped"], *[""] * (len(STEP_HEAD) - 2)
    speed, launches = row["bytes_per_second"], row["launches"]
    return (
        row["method"], row["who"], f"{row['cold'] * 1e6:.1f}", f"{row['warm'] * 1e6:.1f}",
        f"{100 * row['cold_spread'] / 2:.1f}", f"{row['replay'] * 1e6:.1f}" if "replay" in row else "",
        f"{row['host'] * 1e6:.0f}", f"{row['wall'] * 1e6:.0f}", f"{row['wall_moved'] * 1e6:.0f}",
        f"{launches['kernels']} ({launches['copies']})" if launches else "",
        "" if row["bytes_per_parameter"] is None else f"{row['bytes_per_parameter']:.2f}",
        "" if speed is None else f"{speed / 1e9:.0f}", "" if speed is None else f"{100 * speed / bandwidth:.1f}",
        f"{row['peak_bytes_per_parameter']:.2f}", "–" if row["of_first"] is None else f"{row['of_first']:.2f}",
    )  # fmt: skip
