"""Bytes of device memory and reasons of stalls of steps, by Nsight Compute.

    python -m bench.counters [--rehearsal]

Caches are flushed by us, and in a second run by Nsight Compute: equal bytes say that our flush leaves nothing behind.
"""

import argparse
import csv
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from bench import rows
from bench.clock import clock_here
from bench.contestants import ours
from bench.parameter_sets import DTYPES, parameters, shapes_of

STEPS = [("sgd", "plain"), ("sgd", "ELR"), ("adamw", "LAMB")]
MEMORY = ["--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"]
RUNS = {
    "our flush": ["--cache-control", "none", *MEMORY],
    "flush of ncu": ["--cache-control", "all", *MEMORY],
    "stalls": ["--section", "WarpStateStats", "--section", "SpeedOfLight", "--section", "Occupancy"],
}
NCU = ["ncu", "--profile-from-start", "off", "--clock-control", "none", "--csv", "--print-units", "base"]


def metrics(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Kernels and their metrics, from the CSV among the lines that Nsight Compute prints."""
    for found in csv.DictReader(line for line in lines if line.startswith('"')):
        if found.get("Metric Name"):
            yield {"kernel": found["Kernel Name"], "metric": found["Metric Name"], "unit": found["Metric Unit"],
                   "value": found["Metric Value"]}  # fmt: skip


def step(rule: str, method: str, dtype: str, name: str) -> None:
    """One step after a flush, the only one that is profiled."""
    clock = clock_here()
    optimizer = ours(rule, method).build(parameters(shapes_of(name), DTYPES[dtype], clock.device), 1e-4, False)
    for _ in range(3):
        optimizer.step()
    clock.profiled(optimizer.step)


def main() -> int:
    """Writes the rows; returns 1 if a run failed."""
    parser = rows.command(__doc__, "--rehearsal")
    parser.add_argument("--step", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        step(*given.step)
        return 0
    if not given.rehearsal and shutil.which(NCU[0]) is None:
        parser.error("there is no ncu on the PATH: install Nsight Compute")
    failed = False
    # a rehearsal takes one step, without Nsight Compute
    tasks = list(itertools.product(DTYPES, STEPS, RUNS))[: 1 if given.rehearsal else None]
    for dtype, (rule, method), run in tasks:
        name = "2,000 tiny" if given.rehearsal else "ViT-L/16"
        command = [sys.executable, "-m", "bench.counters", "--step", rule, method, dtype, name]
        command = command if given.rehearsal else [*NCU, *RUNS[run], *command]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(done.stdout, flush=True)
        failed |= done.returncode != 0
        head = {"step": f"{rule} {method} {dtype}", "run": run, "exit": done.returncode}
        for found in list(metrics(done.stdout.splitlines())) or [{}]:
            rows.write({**head, **found})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
