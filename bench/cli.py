"""Runs all measurements that this machine supports by one command; on a GPU, only with --gpu."""

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import torch

from bench import rows
from bench.about import about
from bench.clock import Clock, CudaClock
from bench.parameter_sets import SETS
from bench.report import SECTIONS, markdown
from bench.throughput import ROUNDS, Case, cases_of, run
from fused_lwlr.kernels import constants

QUICK_SETS = ("ResNet-50", "2,000 tiny", "ViT-L/16")
REHEARSAL = [Case("toy", [(8, 8), (5,), (40, 30)], "fp32", "sgd")]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and save: JSON, Markdown, PNG. Returns 1 if ours failed or was wrong."""
    names = (*SECTIONS, "gpu")
    parser = rows.command(__doc__, "--quick", "--rehearsal", "--out")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gpu", action="store_const", const=["gpu"], dest="only", help="the same as --only gpu")
    which.add_argument("--only", action="append", choices=names, help="a section; may be repeated; all by default")
    parser.add_argument("--seconds", type=float, help="for GPU throughput; 440, or 50 with --quick")
    given = parser.parse_args(arguments)
    if given.seconds is not None and not 0 < given.seconds < float("inf"):
        parser.error(f"argument --seconds: {given.seconds:g} must be above 0, and finite")
    skipped = {name: "not asked for" for name in names if given.only and name not in given.only}
    if "gpu" not in skipped and not (given.rehearsal or torch.cuda.is_available()):
        skipped["gpu"] = (
            "no GPU: GPU time, graph replay, bandwidth, kernels by the profiler and peak memory are not measured"
        )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    launch = constants.MEASURED.get(gpu or "", "from generated code, not measured on this device")
    settings = about(gpu, given.quick) | {"launch constants": launch}
    results: dict[str, Any] = {"about": settings, "skipped": skipped, "gpu": None}
    for what, why in skipped.items():
        print(f"skipped: {what}: {why}", flush=True)
    stem = re.sub(r"\W+", "-", settings["device"].lower()).strip("-")
    path = given.out / f"bench-{stem}.json"
    # saved after every row or case: a later failure loses no measurement
    rows.save(path, results)
    for name, (section, *_) in SECTIONS.items():
        for row in section.rows(given.quick) if name not in skipped else ():
            rows.write(row)
            results.setdefault(name, []).append(row)
            rows.save(path, results)
    for found in throughput(given) if "gpu" not in skipped else ():
        results["gpu"] = found
        rows.save(path, results)
    path.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    print(f"wrote {path} and its report")
    if results["gpu"] and importlib.util.find_spec("matplotlib") and importlib.util.find_spec("pandas"):
        from bench import figures

        figures.throughput(results["gpu"], path.with_name(f"{path.stem}-throughput.png"))
    print(markdown(results))
    return int(bool(results["gpu"]) and bool(failures(results["gpu"])))


def throughput(given: Any) -> Iterator[dict[str, Any]]:
    """Measures GPU throughput; yields the result after each case."""
    seconds = given.seconds or (50 if given.quick else 440)
    if given.rehearsal:
        return run(Clock(), REHEARSAL, seconds=seconds, rounds=2, copied=1 << 16)
    cases = cases_of(QUICK_SETS if given.quick else SETS, ("fp32",) if given.quick else ("fp32", "bf16"))
    return run(CudaClock(), cases, seconds=seconds, rounds=8 if given.quick else ROUNDS)


def failures(gpu: dict[str, Any]) -> list[str]:
    """Ours that were wrong or failed."""
    wrong = [f"{name}: {why}" for name, why in gpu["refused"].items() if ", ours" in name]
    skipped = (row for row in gpu["rows"] if row["who"].startswith("ours") and "fails" in row.get("skipped", ""))
    return wrong + [f"{row['set']} {row['rule']} {row['method']}: {row['skipped']}" for row in skipped]
