"""Finds launch constants for a device: times each of a list of candidates in a separate process.

    python -m bench.sweep [--set NAME] [--seconds N] [--rehearsal]

A trial sets constants before the kernels are imported, so that all derived values follow. Each trial is a fork of a
process that has imported PyTorch and Triton and has not used the GPU, and is killed after a minute. Before the first
trial the kernels of all are compiled on all cores. Writes GPU times with L2 flushed, and prints the fastest for each
step; constants that are better by more than their spread on several sets belong into kernels/constants.py, with device,
date and figures in `MEASURED`.
"""

import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import triton  # noqa: F401  imported before the forks, which need it

from bench import rows
from bench.clock import clock_here, here
from bench.contestants import Contestant, contestants
from bench.gate import refusal
from bench.parameter_sets import DTYPES, SETS, parameters, shapes_of
from fused_lwlr.kernels.constants import LEAST_RESIDENT

LIMIT = 60.0
"""Seconds of a trial at most, and of all compilations."""
SAMPLES = 15
LEAST_HOST = 2e-3
"""Seconds that the GPU gives the host for a step at least: a busy machine may pause the host for a millisecond."""
STEPS = ("sgd plain", "adamw plain")
QUEUED = ("sgd ELR", "adamw LAMB")
Task = tuple[str, str, dict[str, Any]]
"""A step, a dtype, and changes of constants."""


def candidates() -> Iterator[Task]:
    """Returns all trials, the queue first. The present constants of a step come first."""
    queue = [
        {}, *({"GPU": {"queue_passes": passes}} for passes in (2, 4, 16, 32)),
        *({"GPU": {"window": mebibytes << 20}} for mebibytes in (8, 12, 24, 32, 48)),
        *({"PER_PROCESSOR": programs} for programs in (2, 3, 4, 6, 12)),
    ]  # fmt: skip
    yield from ((step, dtype, change) for dtype in ("bf16", "fp32") for step in QUEUED for change in queue)
    yield from ((step, "fp32", {}) for step in (*STEPS, "statistics"))
    # together, for 16 bytes a thread and more in single precision
    for step in (*STEPS, *QUEUED, "statistics"):
        for block, threads in ((2048, 128), (2048, 256), (512, 128), (1024, 256)):
            yield step, "fp32", {"GPU": {"step_block": block, "block": block}, "THREADS": threads}
    for step, more in itertools.product((*QUEUED, "statistics"), (-1, 2)):
        # fewer or more registers follow from these
        resident = {name: [n + more for n in least] for name, least in LEAST_RESIDENT.items()}
        yield step, "fp32", {"LEAST_RESIDENT": resident}
    yield from (("statistics", "fp32", {"GPU": {"statistics_passes": passes}}) for passes in (4, 8, 32))


def apply(changes: dict[str, Any]) -> None:
    """Set constants, before the kernels are imported.

    Raises:
        RuntimeError: the kernels are imported already.
        AttributeError: no such constant.
    """
    from fused_lwlr.kernels import constants

    if "fused_lwlr.kernels.triton" in sys.modules:
        raise RuntimeError("constants must be set before the kernels are imported: use a new process")
    for name, value in changes.items():
        now = getattr(constants, name)
        setattr(constants, name, now._replace(**value) if isinstance(now, constants.Sizes) else value)
    constants.WARPS = constants.THREADS // constants.LANES


def checked(step: str, dtype: str, changes: dict[str, Any]) -> Contestant:
    """Returns the contestant of a trial, with the constants of the trial.

    Raises:
        RuntimeError: its results are wrong.
    """
    apply(changes)
    contestant = next(c for c in contestants() if c.name == f"{step}, ours")
    wrong = refusal(contestant, DTYPES[dtype], here())
    if wrong is not None:
        raise RuntimeError(f"{contestant.name} with {changes}: {wrong}")
    return contestant


def trial(step: str, dtype: str, changes: dict[str, Any], name: str) -> dict[str, float]:
    """Median GPU time of one step, L2 flushed, and the range of the middle half, in seconds."""
    clock = clock_here()
    contestant = checked(step, dtype, changes)
    optimizer = contestant.build(parameters(shapes_of(name), DTYPES[dtype], clock.device), 1e-4, False)
    for _ in range(3):
        optimizer.step()
    host = max(clock.wall_seconds(optimizer.step)[0], LEAST_HOST)
    seconds = [clock.device_seconds(optimizer.step, flush=True, host=host) for _ in range(SAMPLES)]
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"seconds": middle, "spread": high - low}


def forks(count: int) -> Any:
    """Returns a pool of processes, forks of this one. A process runs one task, and is killed when the pool is left."""
    return multiprocessing.get_context("fork").Pool(count, maxtasksperchild=1)


def forked(limit: float, *task: Any) -> dict[str, Any]:
    """Runs a trial in a fork, which is killed after `limit` seconds; returns its result, or why it "failed"."""
    with forks(1) as pool:
        try:
            found: dict[str, Any] = pool.apply_async(trial, task).get(limit)
        # constants that a device cannot run are a valid result too; a fork that dies returns nothing
        except multiprocessing.TimeoutError:
            return {"failed": f"no result after {limit:g} s"}
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}
    return found


def compile_all(tasks: list[Task]) -> None:
    """Compiles the kernels of many trials at the same time, into Triton's cache. Errors come again in the trials."""
    with forks(os.cpu_count() or 1) as pool:
        pool.starmap_async(checked, tasks, chunksize=1).wait(LIMIT)


def main() -> None:
    """Runs all trials."""
    parser = rows.command(__doc__, "--rehearsal")
    parser.add_argument("--set", default="ViT-L/16", choices=SETS)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no trial after this time")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    name = "2,000 tiny" if options.rehearsal else options.set
    tasks = list(itertools.islice(candidates(), 2 if options.rehearsal else None))
    compile_all(tasks)
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for step, dtype, changes in tasks:
        if time.monotonic() >= end:
            print("no time is left for more trials")
            break
        row = {"set": name, "step": step, "dtype": dtype, "constants": changes}
        row |= forked(LIMIT, step, dtype, changes, name)
        rows.write(row)
        if "seconds" in row:
            found.setdefault((step, dtype), []).append(row)
    for (step, dtype), timed in found.items():
        base = next((row["seconds"] for row in timed if not row["constants"]), float("nan"))
        best = min(timed, key=lambda row: row["seconds"])
        share = best["seconds"] / base
        print(f"{step} {dtype}: {best['constants'] or 'as it is'}, {share:.3f} of the time as it is")


if __name__ == "__main__":
    main()
