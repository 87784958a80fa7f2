"""Run the missing jobs of a study in a pool of processes; each result is stored immediately."""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from fused_lwlr.data import files
from fused_lwlr.papers.framework import Job, Study
from fused_lwlr.papers.store import Store
from fused_lwlr.training.processes import pick_device

Failure = tuple[str, str] | None
"""The error of a job that failed, and its traceback."""


class JobError(RuntimeError):
    """Jobs of a study failed; the results of the other jobs are stored."""


def run_study(study: Study, store: Store, workers: int | None, progress: Callable[..., Any]) -> list[dict[str, Any]]:
    """The results of all jobs of a study, also of jobs that follow from results. Errors as of `run`.

    Args:
        workers: None for the number of cores, or 1 on a GPU.
        progress: called with `total`, the number of jobs, whenever it changes; and as by `run`.
    """
    settings = store.settings
    if workers is None:
        workers = 1 if pick_device(settings.device).type == "cuda" else os.cpu_count() or 1
    results: list[dict[str, Any]] = []
    wanted: Sequence[Job] = study.jobs(settings)
    while wanted:
        progress(total=len(results) + len(wanted))
        results += run(store, wanted, workers, progress)
        done = {result["name"] for result in results}
        wanted = [job for job in study.next_jobs(settings, study.frame(results)) if job.name not in done]
    return results


def run(
    store: Store, jobs: Sequence[Job], workers: int, progress: Callable[..., Any] = lambda **_: None
) -> list[dict[str, Any]]:
    """The results of all jobs: results in the folder are read, the other jobs are run.

    With one worker jobs run in this process; with more, each worker is a process with one thread. The worker itself
    writes the result, so that a kill only loses the jobs underway. A failed job does not stop the others.

    Args:
        progress: called for each finished job with its name, the `description`, and `advance`, 1.

    Raises:
        ValueError: two jobs have the same name, there is no job, or the folder has results with other parameters.
        JobError: a job failed, or a worker died. The tracebacks are in the file `failures.txt`.
    """
    names = [job.name for job in jobs]
    if not jobs or len(set(names)) != len(names):
        twice = next((name for name in names if names.count(name) > 1), None)
        raise ValueError("the study has no jobs" if twice is None else f"the study has two jobs called {twice!r}")
    tracebacks = store.out / "failures.txt"
    tracebacks.unlink(missing_ok=True)
    done = {result["name"] for result in store.finished(jobs)}
    for name in done:
        progress(advance=1, description=name)
    failures: list[tuple[str, str]] = []
    for name, failure in _outcomes(store, [job for job in jobs if job.name not in done], workers):
        if failure is None:
            progress(advance=1, description=name)
        else:
            with tracebacks.open("a", encoding="utf-8") as file:
                file.write(f"{name}: {failure[1]}\n")
            failures.append((name, failure[0]))
    if failures:
        name, error = failures[0]
        more = f", and so did {len(failures) - 1} more" if len(failures) > 1 else ""
        raise JobError(
            f"job {name} of {store.settings.study} failed: {error}{more}. Tracebacks are in {tracebacks}; repeat the "
            "command to run them again"
        )
    return store.finished(jobs)


def _outcomes(store: Store, jobs: Sequence[Job], workers: int) -> Iterator[tuple[str, Failure]]:
    """The name of each job when it has ended, and its failure."""
    todo = [(job, store.path(job), store.environment) for job in jobs]
    if workers == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for work in todo:
                yield work[0].name, _work(*work)
        finally:
            torch.set_num_threads(threads)
        return
    # a fork would share state of torch's threads, or of a GPU
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, max(1, len(jobs))), context, initializer=_prepare)
    try:
        with _interrupts_blocked():
            futures = {pool.submit(_work, *work): work[0].name for work in todo}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool as error:
        raise JobError(
            f"a process of {store.settings.study} died (out of memory?): repeat the command to continue; fewer "
            "--jobs need less memory"
        ) from error
    except BaseException:
        # Ctrl-C: the workers would still run the jobs of their queue
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that start within the context never get Ctrl-C, not even in their imports."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(job: Job, path: Path, environment: dict[str, Any]) -> Failure:
    start = time.perf_counter()
    try:
        values = job.function(**job.parameters)
        seconds = time.perf_counter() - start
        result = {"name": job.name, "parameters": job.parameters, "values": files.finite(values), "seconds": seconds}
        files.replace_json(path, result | {"environment": environment})
    except Exception as error:
        return f"{type(error).__name__}: {error}", traceback.format_exc()
    return None


def _prepare() -> None:
    """Start a worker: one thread, and an end if its parent is killed."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait([sentinel]), os._exit(1)), daemon=True).start()
