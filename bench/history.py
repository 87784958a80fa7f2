"""Benchmarks over time: one CSV of results, by device, versions and commit.

    python -m bench.history                          # draw the history
    python -m bench.history BEFORE AFTER             # compare two commits
    python -m bench.history --add bench/results      # append results: JSON files, or a folder of them (bench-*.json)

A row is one contestant in one case: host time of a step in µs, and its GPU time (L2 flushed) if there is a GPU.
Results that are in the file already are not added again.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

HISTORY = Path(__file__).parent / "results" / "history.csv"
MACHINE = ["device", "python", "torch", "triton"]
KEY = [*MACHINE, "fused_lwlr", "commit", "date"]
TIMES = {"host_us": "host", "gpu_us": "GPU"}
SHOWN = {
    **{f"{rule}, 161 tensors, new gradients": ("ours", "ELR", "fused", "groups") for rule in ("SGD", "AdamW")},
    **{f"{rule}, ResNet-50, fp32": ("multipliers, ours", "plain, torch fused") for rule in ("sgd", "adamw")},
}
"""Cases that are drawn, and their contestants."""


def rows_of(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a JSON file of `python -m bench`.

    Raises:
        ValueError: the run was quick, or has no commit.
    """
    about = results["about"]
    if about["settings"] != "full":
        raise ValueError(f"settings are {about['settings']!r}: measure without --quick")
    if not re.fullmatch(r"[0-9a-f]{7,40}", about["commit"]):
        raise ValueError(f"commit is {about['commit']!r}: commit the changes, and measure again")
    key = {name: about[name] for name in KEY} | {"commit": about["commit"][:12]}
    for row in results.get("host") or ():
        case = f"{row['optimizer']}, {row['tensors']} tensors, {row['gradients']} gradients"
        for who in row.keys() - {"optimizer", "tensors", "gradients"}:
            yield {**key, "case": case, "who": who, "host_us": round(row[who] * 1e6, 1), "gpu_us": None}
    for row in (results.get("gpu") or {}).get("rows", ()):
        if "skipped" not in row:
            times = {"host_us": round(row["host"] * 1e6, 1), "gpu_us": round(row["cold"] * 1e6, 1)}
            case = f"{row['rule']}, {row['set']}, {row['dtype']}"
            yield {**key, "case": case, "who": f"{row['method']}, {row['who']}", **times}


def read(path: Path) -> pd.DataFrame:
    """All rows, oldest first; versions and commits are text."""
    return pd.read_csv(path, dtype=dict.fromkeys(KEY, str))


def add(path: Path, results: dict[str, Any]) -> int:
    """Append the rows of results, and return how many are new."""
    new = pd.DataFrame(rows_of(results), columns=[*KEY, "case", "who", *TIMES])
    old = read(path) if path.exists() else new[:0]
    both = pd.concat([old, new]) if len(old) else new
    both = both.drop_duplicates([*KEY, "case", "who"]).sort_values(["date", "case", "who"])
    both.to_csv(path, index=False)
    return len(both) - len(old)


def compare(rows: pd.DataFrame, before: str, after: str) -> pd.DataFrame:
    """Times at two commits, on the same device with the same versions.

    If a commit was measured more than once, the last measurement counts.

    Raises:
        ValueError: a commit was not measured, or the two have no common measurement.
    """
    key = [*MACHINE, "case", "who"]
    halves = []
    for commit in (before, after):
        half = rows[rows["commit"].str.startswith(commit[:12])]
        if not len(half):
            raise ValueError(f"{commit} was not measured: choose from {', '.join(rows['commit'].unique())}")
        halves.append(half.drop_duplicates(key, keep="last").melt(key, list(TIMES), "time", "µs").dropna())
    both = halves[0].merge(halves[1], on=[*key, "time"], suffixes=(f" {before[:10]}", f" {after[:10]}"))
    if not len(both):
        raise ValueError(f"{before} and {after} were not measured on the same device with the same versions")
    return both.assign(ratio=(both.iloc[:, -1] / both.iloc[:, -2]).round(2)).drop(columns=MACHINE)


def draw(rows: pd.DataFrame, path: Path) -> None:
    """Time by run, oldest first: a panel for each case that was measured, a line for each contestant and device."""
    runs = list(rows.groupby(["date", "commit"], sort=False).groups)
    shown = [(case, time) for case in SHOWN for time in TIMES if rows.loc[rows["case"] == case, time].notna().any()]
    figure = Figure(figsize=(7.2, 4 * len(shown)), layout="constrained")
    for axes, (case, time) in zip(figure.subplots(len(shown), squeeze=False)[:, 0], shown, strict=True):
        for color, who in enumerate(SHOWN[case]):
            found = rows[(rows["case"] == case) & (rows["who"] == who)].dropna(subset=[time])
            for device, marker in zip(rows["device"].unique(), "os^Dv", strict=False):
                part = found[found["device"] == device]
                at = [runs.index(run) for run in zip(part["date"], part["commit"], strict=True)]
                axes.plot(at, part[time], color=f"C{color}", marker=marker, markersize=4, label=f"{who}, {device}")
        axes.set(title=case, ylabel=f"{TIMES[time]} time of a step, µs", yscale="log")
        axes.set_xticks(range(len(runs)), [commit[:7] for _, commit in runs], rotation=45, ha="right", fontsize="small")
        axes.set_xlabel("commit, oldest first")
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def main(given: Sequence[str] | None = None) -> None:
    """Add, compare or draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT", help="two, to compare")
    parser.add_argument(
        "--add", nargs="+", type=Path, metavar="PATH", default=[], help="JSON files, or folders of them"
    )
    parser.add_argument("--history", type=Path, default=HISTORY, help="the CSV file")
    options = parser.parse_args(given)
    if len(options.commits) not in (0, 2):
        parser.error(f"{options.commits[0]}: give two commits to compare, or none")
    for path in [file for each in options.add for file in (sorted(each.glob("bench-*.json")) or [each])]:
        try:
            print(f"{path}: {add(options.history, json.loads(path.read_text()))} rows added")
        except ValueError as error:
            print(f"{path}: not added: {error}", file=sys.stderr)
    if not options.history.exists():
        parser.error(f"--history {options.history}: there is no such file; make it with --add")
    rows = read(options.history)
    if options.commits:
        try:
            print(compare(rows, *options.commits).to_string(index=False))
        except ValueError as error:
            parser.error(str(error))
    else:
        draw(rows, options.history.with_suffix(".png"))


if __name__ == "__main__":
    main()
