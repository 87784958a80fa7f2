"""Runs test functions on several processes that form a process group: many of them in one group.

Starting a process costs seconds. A function that fails, hangs or dies ends its processes, and the next functions run
in new ones.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GRACE = 1.0  # seconds for the other ranks to fail as well, after the first
START = 180.0  # seconds for all processes to join


@dataclass(frozen=True)
class Case:
    """A function of a test module, and the arguments to call it with on every rank.

    Warnings are errors except those in `ignored`: the start of a message, and its category.
    """

    module: Path
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[tuple[str, type[Warning]], ...] = ()


def run(cases: Sequence[Case], world: int, folder: Path, patience: float = 120.0) -> list[str]:
    """Returns the problems of each case, by rank; "" for a case that passed.

    Args:
        cases: run one after the other.
        world: the number of processes.
        folder: an empty folder, through which the processes exchange files.
        patience: seconds that a case may take.
    """
    problems = [""] * len(cases)
    start = 0
    while start < len(cases):
        attempt = folder / f"from-{start}"
        attempt.mkdir(parents=True)
        with (attempt / "cases").open("wb") as file:
            pickle.dump(cases[start:], file)
        finished, why, codes = _attempt(world, attempt, patience)
        for number in range(finished):
            problems[start + number] = _told("failed", _errors(attempt, number, world))
        start += finished
        if why:
            # a failure after the last case counts for the last case
            start = min(start, len(cases) - 1)
            errors = _errors(attempt, finished, world)
            ends = [
                f"exit status {code}:\n{errors[rank] or (attempt / f'output-{rank}').read_text(errors='replace')}"
                for rank, code in enumerate(codes)
            ]
            problems[start] = _told(why, ends)
            start += 1
    return problems


def _errors(folder: Path, number: int, world: int) -> list[str]:
    """The traceback of each rank in a case."""
    paths = [folder / f"error-{number}-{rank}" for rank in range(world)]
    return [path.read_text() if path.exists() else "" for path in paths]


def _told(why: str, texts: list[str]) -> str:
    """Joins the messages of all ranks, equal texts once; returns "" without a message."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text[-6000:], []).append(rank)
    told = [f"rank {' and '.join(map(str, who))} of {len(texts)}, {text}" for text, who in ranks.items() if text]
    return "\n\n".join([why, *told]) if told else ""


def _attempt(world: int, folder: Path, patience: float) -> tuple[int, str, list[int]]:
    """Returns how many cases all ranks finished, why the next one ended, and the exit status of each rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if "lo" in dict(socket.if_nameindex()).values():
        # without one, gloo resolves the host's name, which may have no address
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes = []
    for rank in range(world):
        command = [sys.executable, str(HERE / "rank.py"), str(folder), str(rank), str(world)]
        with (folder / f"output-{rank}").open("wb") as output:
            processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
    try:
        why = _watch(processes, lambda: _reached(folder, world), patience)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return max(_reached(folder, world) - 1, 0), why, [process.returncode for process in processes]


def _watch(processes: list[Any], reached: Callable[[], int], patience: float) -> str:
    """Waits until all processes have ended, or one has failed."""
    stage, since = 0, time.monotonic()
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return ""
        if any(codes):
            time.sleep(GRACE)
            return f"rank {next(rank for rank, code in enumerate(codes) if code)} failed"
        limit = patience if stage else START
        if reached() > stage:
            stage, since = reached(), time.monotonic()
        elif time.monotonic() - since > limit:
            for process in processes:
                # its fault handler writes a traceback
                process.send_signal(signal.SIGABRT)
            time.sleep(GRACE)
            return f"nothing was finished for {limit:.0f} s"
        time.sleep(0.02)


def _reached(folder: Path, world: int) -> int:
    """Returns how many stages all ranks have passed: each rank appends a byte after joining and after each case."""
    logs = [folder / f"reached-{rank}" for rank in range(world)]
    return min(log.stat().st_size if log.exists() else 0 for log in logs)
