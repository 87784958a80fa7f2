"""Finds launch constants for a device: times each of a list of candidates, in a process of its own.

    python -m bench.sweep [--set NAME] [--out FILE] [--seconds N]

A trial sets constants before the kernels are imported, so that everything that depends on them does, and works on
copies that are restored before every sample: nothing is tuned on live parameters. Prints GPU times with L2 flushed, and
for each rule the fastest; what is better by more than its spread on several sets belongs into kernels/constants.py,
with device, date and figures in `MEASURED`.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.parameter_sets import SETS, shapes_of
from fused_lwlr.kernels.constants import LEAST_RESIDENT

ROOT = Path(__file__).parents[1]
SAMPLES = 15
# names of constants -> what is tried; blocks and threads together, for 16 bytes a thread and more in single precision
GEOMETRY = [
    {"GPU": {"step_block": block, "block": block}, "THREADS": threads}
    for block, threads in ((1024, 128), (2048, 128), (2048, 256), (512, 128), (1024, 256))
]
STEPS = ("sgd plain", "adamw plain")
QUEUED = ("sgd ELR", "adamw LAMB")


def candidates() -> Iterator[tuple[str, dict[str, Any]]]:
    """Step and constants; first those that stand, by which the rest are judged."""
    for step in (*STEPS, *QUEUED):
        yield step, {}
    for step, geometry in itertools.product((*STEPS, *QUEUED, "statistics"), GEOMETRY[1:]):
        yield step, geometry
    for step in QUEUED:
        for programs in (2, 3, 4, 6, 12):
            yield step, {"PER_PROCESSOR": programs}
        for passes in (1, 2, 8, 16):
            yield step, {"GPU": {"queue_passes": passes}}
        for window in (12, 24, 32, 48):
            yield step, {"GPU": {"window": window << 20}}
    for step, more in itertools.product((*QUEUED, "statistics"), (-1, 2)):
        # of which fewer or more registers follow
        yield step, {"LEAST_RESIDENT": {kernel: [n + more for n in least] for kernel, least in LEAST_RESIDENT.items()}}
    yield "statistics", {}
    for passes in (4, 8, 32):
        yield "statistics", {"GPU": {"statistics_passes": passes}}


def apply(changes: dict[str, Any]) -> None:
    """Set constants, in a process that has not imported the kernels.

    Raises:
        RuntimeError: it has.
        AttributeError: no such constant.
    """
    from fused_lwlr.kernels import constants

    if "fused_lwlr.kernels.triton" in sys.modules:
        raise RuntimeError("constants must be set before the kernels are imported: use a new process")
    for name, value in changes.items():
        now = getattr(constants, name)
        setattr(constants, name, now._replace(**value) if isinstance(now, constants.Sizes) else value)
    constants.WARPS = constants.THREADS // constants.LANES


def trial(step: str, changes: dict[str, Any], name: str, cpu: bool) -> dict[str, float]:
    """Median GPU time of one step, L2 flushed, and the range of the middle half, in seconds."""
    apply(changes)
    import torch

    from bench.clock import Clock, CpuClock, CudaClock
    from bench.contestants import contestants
    from bench.gate import parameters, refusal

    clock: Clock = CpuClock() if cpu else CudaClock()
    rule, _, method = step.partition(" ")
    contestant = next(c for c in contestants() if (c.rule, c.method, c.who) == (rule, method or "statistics", "ours"))
    wrong = refusal(contestant, torch.float32, clock.device)
    if wrong is not None:
        raise RuntimeError(f"{contestant.name} with {changes}: {wrong}")
    named = parameters(shapes_of(name), torch.float32, clock.device)
    optimizer = contestant.build(named, 1e-4, False)
    for _ in range(3):
        optimizer.step()
    # by copy_, which leaves addresses as they are
    live = [param.data for _, param in named]
    live += [s for entry in getattr(optimizer, "state", {}).values() for s in entry.values() if torch.is_tensor(s)]
    copies = [tensor.clone() for tensor in live]
    host, _ = clock.wall_seconds(optimizer.step)
    seconds = []
    for _ in range(SAMPLES):
        for tensor, copy in zip(live, copies, strict=True):
            tensor.copy_(copy)
        # one that notices that weights were restored, so that the timed one carries its norms as usual
        optimizer.step()
        seconds.append(clock.device_seconds(optimizer.step, flush=True, host=host))
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {"seconds": middle, "spread": high - low}


def main() -> None:
    """Run all trials, or the one of --trial."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--set", default="ViT-L/16", choices=SETS)
    parser.add_argument("--out", type=Path, help="JSON, one trial a line; those that are there are not tried again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no trial after this time")
    parser.add_argument("--cpu", action="store_true", help="on the CPU: a rehearsal, no measurement")
    parser.add_argument("--trial", nargs=2, metavar=("STEP", "CONSTANTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trial:
        step, changes = options.trial
        print(json.dumps(trial(step, json.loads(changes), options.set, options.cpu)))
        return
    resumed = options.out and options.out.exists()
    found: list[dict[str, Any]] = list(map(json.loads, options.out.read_text().splitlines())) if resumed else []
    tried = [(row["set"], row["step"], row["constants"]) for row in found]
    end = time.monotonic() + options.seconds
    for step, changes in tqdm([c for c in candidates() if (options.set, *c) not in tried]):
        if time.monotonic() >= end:
            print("no time left: the same command goes on from here")
            break
        command = [sys.executable, "-m", "bench.sweep", "--set", options.set, "--trial", step, json.dumps(changes)]
        command += ["--cpu"] if options.cpu else []
        result = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
        row: dict[str, Any] = {"set": options.set, "step": step, "constants": changes}
        if result.returncode:
            # constants that a device cannot run are an answer too
            row["failed"] = result.stderr.strip().splitlines()[-1]
        else:
            row |= json.loads(result.stdout)
        found.append(row)
        tqdm.write(json.dumps(row))
        if options.out:
            options.out.write_text("".join(json.dumps(r) + "\n" for r in found))
    for step in dict.fromkeys(row["step"] for row in found):
        timed = [row for row in found if row["step"] == step and "seconds" in row]
        base = next((row["seconds"] for row in timed if not row["constants"]), float("nan"))
        best = min(timed, key=lambda row: row["seconds"], default=None)
        if best is not None:
            print(f"{step}: {best['constants'] or 'as it is'}, {best['seconds'] / base:.3f} of the time as it is")


if __name__ == "__main__":
    main()
