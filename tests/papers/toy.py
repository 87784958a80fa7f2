"""A study of additions for the runner: each job records its run, and may fail, or kill its parent process."""

import os
import signal
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure

from fused_lwlr.papers.framework import Job, Study
from fused_lwlr.papers.runner import run
from fused_lwlr.papers.store import Store
from fused_lwlr.papers.tables import Table, cell

LOG = Path("ran.txt")


def add(x, seed, deed=""):
    """x + seed, after the action `deed`, which runs only once, so that a second attempt succeeds."""
    with LOG.open("a") as file:
        file.write(f"{x} {seed} {os.getpid()}\n")
    first = not Path(f"{deed}.done").exists()
    Path(f"{deed}.done").touch()
    if deed == "fail" and first:
        raise ArithmeticError("cannot add today")
    if deed == "kill" and first:
        while len(ran()) < 4:
            time.sleep(0.01)
        # the other job is sleeping by now, and the results of the first two are stored
        os.kill(os.getppid(), signal.SIGKILL)
    if deed and deed != "fail" and first:
        time.sleep(60)
    return {"sum": x + seed, "infinite": float("inf")}


def ran():
    """(x, seed) of every call, in order."""
    return [tuple(map(int, line.split()[:2])) for line in LOG.read_text().splitlines()] if LOG.exists() else []


def study(deeds=None):
    """x = 10, 20, 30 and 40; `deeds` maps some of them to an action."""
    deeds = deeds or {}

    def jobs(settings):
        return [
            Job("x={x}-seed{seed}", add, {"x": x, "seed": seed} | ({"deed": deeds[x]} if x in deeds else {}))
            for x in (10, 20, 30, 40)
            for seed in range(settings.seeds)
            if seed == 0 or x not in deeds
        ]

    def tables(settings, results):
        rows = [[str(x), cell(of["sum"], "{:.1f}"), "7"] for x, of in results.groupby("x")]
        return [Table("sums", ["x", "sum", "paper"], rows, ["a note"])]

    return Study("toy", "Sums.", jobs, tables, lambda results: Figure(), epochs=3, options="data epochs seeds")


if __name__ == "__main__":
    # in a pool of two, the third job kills this process while the fourth sleeps
    toy = study({30: "kill", 40: "sleep"})
    settings = toy.settings(seeds=2)
    jobs = sorted(toy.jobs(settings), key=lambda job: job.parameters["x"] + 15 * job.parameters["seed"])
    chosen = [job for job in jobs if job.parameters["seed"] == 0]
    run(Store(Path(sys.argv[1]), settings), chosen, workers=2)
