"""Everything that this machine can measure, by one command; on a GPU alone with --gpu."""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from tqdm import tqdm

from bench import figures
from bench.clock import CudaClock
from bench.parameter_sets import SETS
from bench.report import markdown
from bench.throughput import ROUNDS, cases_of, run
from fused_lwlr import __version__
from fused_lwlr.kernels import constants

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
# in processes of their own
HOST = {"CUDA_VISIBLE_DEVICES": ""}
COMPILE = {"TRITON_DEFAULT_FP_FUSION": "0"}
SECTIONS: dict[str, dict[str, str]] = {
    "traffic": HOST, "host": HOST, "scaling": HOST, "cpu": HOST, "model": COMPILE, "codegen": COMPILE
}  # fmt: skip
QUICK = {
    "host": ["--quick"],
    "cpu": ["--quick"],
    "model": ["--set", "ResNet-50", "--dtype", "fp32"],
    "codegen": ["sm_90:fp32"],
}
QUICK_SETS = ("ResNet-50", "2,000 tiny", "ViT-L/16")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    gpu: Annotated[bool, typer.Option("--gpu", help="GPU throughput and nothing else.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sets, rounds and targets: about a minute.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"Sections: {', '.join((*SECTIONS, 'gpu'))}; all.")] = None,
    seconds: Annotated[float | None, typer.Option(help="For GPU throughput; 440, or 50 with --quick.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for JSON, Markdown and figures.")] = RESULTS,
    commit: Annotated[str | None, typer.Option(help="Of the working tree, where git cannot tell.")] = None,
) -> None:
    """Measure, print and save: JSON, Markdown, PNG."""
    if gpu and only:
        raise typer.BadParameter("--gpu is short for --only gpu: give one of them")
    sections = ["gpu"] if gpu else only or [*SECTIONS, "gpu"]
    if unknown := set(sections) - {*SECTIONS, "gpu"}:
        raise typer.BadParameter(f"--only {sorted(unknown)[0]}: choose from {', '.join((*SECTIONS, 'gpu'))}")
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"about": about(commit, quick), "skipped": {}, "gpu": None}
    results["skipped"] = {name: "not asked for" for name in (*SECTIONS, "gpu") if name not in sections}
    if "gpu" in sections and not torch.cuda.is_available():
        results["skipped"]["gpu"] = (
            "no GPU: GPU time, graph replay, bandwidth, kernels by the profiler and peak memory are not measured"
        )
    for what, why in results["skipped"].items():
        print(f"skipped: {what}: {why}", flush=True)
    stem = re.sub(r"\W+", "-", results["about"]["device"].lower()).strip("-")
    for name in (section for section in SECTIONS if section in sections):
        results[name] = list(tqdm(_lines(name, quick), desc=name, unit=" rows"))
        save_json(results, out, stem)
    if "gpu" in sections and torch.cuda.is_available():
        cases = cases_of(QUICK_SETS if quick else SETS, ("fp32",) if quick else ("fp32", "bf16"))
        with tqdm(total=len(cases), unit=" cases") as bar:

            def keep(result: dict[str, Any]) -> None:
                # figures wait until the end: they would take of the time for measuring
                results["gpu"] = result
                save_json(results, out, stem)
                bar.update()

            results["gpu"] = run(
                CudaClock(), cases, seconds=seconds or (50 if quick else 440), rounds=8 if quick else ROUNDS,
                quick=quick, save=keep, tell=bar.set_description,
            )  # fmt: skip
    for path in save(results, out, stem):
        print(f"wrote {path}")
    print(markdown(results))


def about(commit: str | None, quick: bool) -> dict[str, Any]:
    """Device, versions, commit, date and settings."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or processor(),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fused_lwlr": __version__,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "settings": "quick" if quick else "full",
        "launch constants": constants.MEASURED.get(gpu or "", "from generated code, not measured on this device"),
    }


def processor() -> str:
    """The name of the CPU."""
    import cpuinfo

    return str(cpuinfo.get_cpu_info().get("brand_raw", platform.machine()))


def _commit() -> str:
    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    head = git("rev-parse", "HEAD")
    if not head:
        return "unknown: no git checkout"
    # results that were written by an earlier run change nothing
    return f"{head} with changes" if git("status", "--porcelain", "--", ".", ":!bench/results") else head


def _lines(section: str, quick: bool) -> Iterator[dict[str, Any]]:
    """What a section prints, as it comes.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", f"bench.{section}", "--json", *(QUICK.get(section, []) if quick else [])]
    environment = {**os.environ, **SECTIONS[section]}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        raise RuntimeError(f"bench.{section} ended with {process.returncode}")


def save_json(results: dict[str, Any], out: Path, stem: str) -> Path:
    """Write what there is so far."""
    path = out / f"bench-{stem}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def save(results: dict[str, Any], out: Path, stem: str) -> list[Path]:
    """Write everything."""
    paths = [save_json(results, out, stem), out / f"bench-{stem}.md"]
    paths[1].write_text(markdown(results))
    if results["gpu"]:
        paths.append(out / f"bench-{stem}-throughput.png")
        figures.throughput(results["gpu"], paths[-1])
    if results.get("scaling"):
        paths.append(out / f"bench-{stem}-scaling.png")
        figures.scaling(results["scaling"], paths[-1])
    return paths
