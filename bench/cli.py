"""Runs all measurements that this machine supports by one command; on a GPU, only with --gpu."""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm

from bench import rows
from bench.case import Case
from bench.clock import Clock, CudaClock
from bench.parameter_sets import SETS
from bench.report import markdown
from bench.throughput import ROUNDS, cases_of, run
from fused_lwlr import __version__
from fused_lwlr.kernels import constants
from fused_lwlr.training.environment import cpu_name

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
# in separate processes
HOST = {"CUDA_VISIBLE_DEVICES": ""}
COMPILE = {"TRITON_DEFAULT_FP_FUSION": "0"}
SECTIONS: dict[str, dict[str, str]] = {
    "host": HOST, "scaling": HOST, "cpu": HOST, "codegen": COMPILE
}  # fmt: skip
QUICK = {
    "host": ["--quick"],
    "cpu": ["--quick"],
    "codegen": ["sm_90:fp32"],
}
QUICK_SETS = ("ResNet-50", "2,000 tiny", "ViT-L/16")

REHEARSAL = [Case("toy", [(8, 8), (5,), (40, 30)], "fp32", "sgd")]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and save: JSON, Markdown, PNG. Returns 1 if ours failed or was wrong."""
    names = (*SECTIONS, "gpu")
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--gpu", action="store_true", help="GPU throughput and nothing else, as --only gpu")
    which.add_argument("--only", action="append", choices=names, help="a section; may be repeated; all by default")
    parser.add_argument("--quick", action="store_true", help="fewer sets, rounds and targets: about a minute")
    parser.add_argument("--seconds", type=float, help="for GPU throughput; 440, or 50 with --quick")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON, Markdown and figures")
    parser.add_argument("--commit", help="the commit of the working tree, where git cannot tell it")
    parser.add_argument("--rehearsal", action="store_true", help="GPU throughput on the CPU, of one small case")
    given = parser.parse_args(arguments)
    quick, out = given.quick, given.out
    sections = ["gpu"] if given.gpu else given.only or names
    no_gpu = not given.rehearsal and not torch.cuda.is_available()
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"about": about(given.commit, quick), "skipped": {}, "gpu": None}
    results["skipped"] = {name: "not asked for" for name in names if name not in sections}
    if "gpu" in sections and no_gpu:
        results["skipped"]["gpu"] = (
            "no GPU: GPU time, graph replay, bandwidth, kernels by the profiler and peak memory are not measured"
        )
    for what, why in results["skipped"].items():
        print(f"skipped: {what}: {why}", flush=True)
    stem = re.sub(r"\W+", "-", results["about"]["device"].lower()).strip("-")
    for name in (section for section in SECTIONS if section in sections):
        results[name] = list(tqdm(_lines(name, quick), desc=name, unit=" rows"))
        save_json(results, out, stem)
    if "gpu" in sections and not no_gpu:
        cases = cases_of(QUICK_SETS if quick else SETS, ("fp32",) if quick else ("fp32", "bf16"))
        cases = REHEARSAL if given.rehearsal else cases
        clock = Clock() if given.rehearsal else CudaClock()
        with tqdm(total=len(cases), unit=" cases") as bar:
            written = 0

            def keep(result: dict[str, Any]) -> None:
                # figures are made at the end: they would use time for measuring
                nonlocal written
                results["gpu"] = result
                save_json(results, out, stem)
                for row in result["rows"][written:]:
                    rows.write(row)
                written = len(result["rows"])
                bar.update()

            results["gpu"] = run(
                clock, cases, seconds=given.seconds or (50 if quick else 440),
                rounds=2 if given.rehearsal else 8 if quick else ROUNDS,
                copied=1 << 16 if given.rehearsal else 2 << 30, quick=quick, save=keep, tell=bar.set_description,
            )  # fmt: skip
    for path in save(results, out, stem):
        print(f"wrote {path}")
    print(markdown(results))
    return int(bool(results["gpu"]) and bool(failures(results["gpu"])))


def failures(gpu: dict[str, Any]) -> list[str]:
    """Ours that were wrong or failed."""
    wrong = [f"{name}: {why}" for name, why in gpu["refused"].items() if ", ours" in name]
    skipped = (row for row in gpu["rows"] if row["who"].startswith("ours") and "fails" in row.get("skipped", ""))
    return wrong + [f"{row['set']} {row['rule']} {row['method']}: {row['skipped']}" for row in skipped]


def about(commit: str | None, quick: bool) -> dict[str, Any]:
    """Device, versions, commit, date and settings."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or cpu_name(),
        "processor": cpu_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fused_lwlr": __version__,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": "quick" if quick else "full",
        "launch constants": constants.MEASURED.get(gpu or "", "from generated code, not measured on this device"),
    }


def _commit() -> str:
    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "HEAD")
    if not head:
        return "unknown: no git checkout"
    # results of an earlier run must not change anything
    return f"{head} with changes" if git("status", "--porcelain", "--", ".", ":!bench/results") else head


def _lines(section: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Yields the output of a section, line by line.

    Raises:
        RuntimeError: the section failed.
    """
    command = [sys.executable, "-m", f"bench.{section}", "--json", *(QUICK.get(section, []) if quick else [])]
    environment = {**os.environ, **SECTIONS[section]}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise RuntimeError(f"bench.{section} ended with {process.returncode}")


def save_json(results: dict[str, Any], out: Path, stem: str) -> Path:
    """Write the results so far."""
    path = out / f"bench-{stem}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def save(results: dict[str, Any], out: Path, stem: str) -> list[Path]:
    """Write everything."""
    paths = [save_json(results, out, stem), out / f"bench-{stem}.md"]
    paths[1].write_text(markdown(results))
    if importlib.util.find_spec("matplotlib") is None:
        print("no figures are drawn: matplotlib is not installed")
        return paths
    from bench import figures

    for section, draw in {"gpu": figures.throughput, "host": figures.host, "scaling": figures.scaling}.items():
        if results.get(section):
            paths.append(out / f"bench-{stem}-{draw.__name__}.png")
            draw(results[section], paths[-1])
    return paths
