"""Steps of ours and of others on a GPU, in turns: time, bytes, bandwidth, launches and memory.

    python -m bench --gpu [--quick]

A contestant is timed only if its results are correct. All contestants of a case are in memory together, each with
separate weights and gradients.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.bytes_moved import counted_bytes
from bench.clock import Clock, copy_bandwidth
from bench.contestants import Contestant, contestants, peers
from bench.gate import failure, refusal
from bench.parameter_sets import DTYPES, Shapes, numel, parameters, shapes_of
from bench.rows import write

ROUNDS = 25
"""Most samples of each contestant."""
FEWEST = 5
"""A case has at least this many rounds, also if the time is over."""
LR = 1e-4
COLUMNS = {"sgd": 3, "adamw": 4, "statistics": 2}
"""Weights, gradients and state of a rule."""
TEMPORARY = 4
"""Temporary columns: gradients at other addresses, and three of a step with torch's multi-tensor calls."""


class Case(NamedTuple):
    """Contestants are compared within a case."""

    name: str
    shapes: Shapes
    dtype: str
    rule: str

    @property
    def bytes(self) -> int:
        """Size of one column."""
        return numel(self.shapes) * DTYPES[self.dtype].itemsize


class Entry:
    """One contestant of a case, ready to step."""

    def __init__(self, contestant: Contestant, case: Case, grads: list[Tensor], clock: Clock):
        self.contestant, self._clock, self._grads = contestant, clock, grads
        self.named = parameters(case.shapes, DTYPES[case.dtype], clock.device)
        self._move()
        self.peak = 0
        self.replay: Any = None
        self.failure: str | None = None
        self.optimizer = self._made(capturable=False)
        self.samples: dict[str, list[float]] = {}

    def _made(self, *, capturable: bool) -> Any:
        def warm() -> Any:
            made = self.contestant.build(self.named, LR, capturable)
            for _ in range(3):
                made.step()
            return made

        optimizer, peak = self._clock.peak_bytes(warm)
        self.peak = max(self.peak, peak)
        return optimizer

    def attempt(self, call: Callable[["Entry"], Any]) -> Any:
        """Returns the result of a call; None if it fails, and after a failure."""
        if self.failure is None:
            try:
                return call(self)
            except Exception as raised:
                self.failure = failure(raised)
        return None

    def restore(self) -> None:
        """Restore the gradients after a step that changes them; not timed."""
        if self.contestant.mutates:
            torch._foreach_copy_([param.grad for _, param in self.named], self._grads)  # type: ignore[arg-type]

    def _move(self) -> None:
        """Give every gradient another address, as a backward pass after `zero_grad()` does; not timed."""
        for (_, param), grad in zip(self.named, [grad.clone() for grad in self._grads], strict=True):
            param.grad = grad

    def sample(self) -> None:
        """Take one sample of everything but graphs."""
        self.restore()
        host, wall = self._clock.wall_seconds(self.optimizer.step)
        self._move()
        host_moved, wall_moved = self._clock.wall_seconds(self.optimizer.step)
        self._add(host=host, wall=wall, host_moved=host_moved, wall_moved=wall_moved)
        for name, flush in (("cold", True), ("warm", False)):
            self.restore()
            self._add(**{name: self._clock.device_seconds(self.optimizer.step, flush=flush, host=host)})

    def capture(self) -> None:
        """Capture a graph of a step, and replace the optimizer."""
        self.optimizer = None
        # a graph uses the optimizer's memory: keep the optimizer alive as long as the graph
        self.optimizer = self._made(capturable=self._clock.graphs)
        self.replay = self._clock.graph(self.optimizer.step)

    def sample_replay(self) -> None:
        """Take one sample of a replay."""
        self.restore()
        self._add(replay=self._clock.device_seconds(self.replay, flush=True, host=20e-6))

    def _add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self.samples.setdefault(name, []).append(value)

    def counted(self) -> int | None:
        """Bytes that one step of ours moves; None for other contestants."""
        if self.contestant.library != "ours" or not self.named[0][1].is_cuda:
            return None
        with counted_bytes() as counted:
            self.optimizer.step()
        return counted["bytes"] + counted["again"]


def run_case(
    case: Case, entrants: Sequence[Contestant], clock: Clock, end: float, rounds: int, *, profile: bool
) -> list[dict[str, Any]]:
    """One row for each contestant: medians in seconds and their spreads, or the reason why it was not timed.

    Args:
        end: when the case should be done. The two baselines of all comparisons are timed in any case.
        profile: whether kernels are counted by the profiler.
    """
    torch.manual_seed(0)
    grads: list[Any] = [param.grad for _, param in parameters(case.shapes, DTYPES[case.dtype], clock.device)]
    entries: list[Entry] = []
    left_out: list[tuple[Contestant, str | None]] = []
    for contestant in entrants:
        missing = "no time left" if time.monotonic() > end else None
        if 0.85 * clock.free_bytes() < (COLUMNS[case.rule] + TEMPORARY) * case.bytes:
            missing = "no memory left"
        if missing and len(entries) >= 2:
            left_out.append((contestant, missing))
            continue
        try:
            entries.append(Entry(contestant, case, grads, clock))
        except Exception as raised:
            left_out.append((contestant, failure(raised)))
    # two thirds of the remaining time for steps, and one for replays
    now = time.monotonic()
    _rounds(entries, Entry.sample, rounds, now + (end - now) * 2 / 3)
    extras = []
    for at, entry in enumerate(entries):
        in_time = time.monotonic() < end or at < 2
        launches = entry.attempt(lambda e: clock.launches(e.optimizer.step)) if profile and in_time else None
        extras.append((launches, entry.attempt(Entry.counted)))
        if entry.contestant.graph and in_time:
            entry.attempt(Entry.capture)
    _rounds([entry for entry in entries if entry.replay is not None], Entry.sample_replay, rounds, end)
    left_out += [(entry.contestant, entry.failure) for entry in entries if entry.failure is not None]
    rows = [_row(case, e, *extra) for e, extra in zip(entries, extras, strict=True) if e.failure is None]
    measured = [entry.contestant for entry in entries if entry.failure is None]
    for row in rows:
        row["of_first"] = row["wall"] / rows[0]["wall"] if measured[0] == entrants[0] else None
    return rows + [{**_head(case, contestant), "skipped": why} for contestant, why in left_out]


def _rounds(entries: Sequence[Entry], sample: Callable[[Entry], None], rounds: int, end: float) -> None:
    for turn in range(rounds):
        if turn >= FEWEST and time.monotonic() > end:
            return
        for entry in entries:
            entry.attempt(sample)


def _head(case: Case, contestant: Contestant) -> dict[str, Any]:
    return {
        "set": case.name, "tensors": len(case.shapes), "numel": numel(case.shapes), "dtype": case.dtype,
        "rule": contestant.rule, "method": contestant.method, "who": contestant.library,
    }  # fmt: skip


def _row(case: Case, entry: Entry, launches: dict[str, int] | None, counted: int | None) -> dict[str, Any]:
    passes, size = entry.contestant.passes, numel(case.shapes)
    moved = counted if counted is not None or passes is None else passes * case.bytes
    row = {**_head(case, entry.contestant), "rounds": len(entry.samples["wall"])}
    for name, values in entry.samples.items():
        row[name] = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4)
        row[f"{name}_spread"] = (high - low) / row[name]
    row |= {
        "bytes_per_parameter": None if moved is None else moved / size,
        "bytes_counted": counted is not None,
        "bytes_per_second": None if moved is None else moved / row["cold"],
        "launches": launches,
        "peak_bytes_per_parameter": entry.peak / size,
    }
    return row


def cases_of(sets: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    """All cases; cases of the targets come first."""
    return [
        Case(name, shapes_of(name), dtype, rule)
        for dtype in dtypes
        for name in sets
        for rule in ("sgd", "adamw", *(("statistics",) if dtype == "fp32" else ()))
    ]


def run(
    clock: Clock, cases: Sequence[Case], *, seconds: float, rounds: int = ROUNDS, copied: int = 2 << 30
) -> Iterator[dict[str, Any]]:
    """Run the checks, the copy and every case within a budget of time; prints rows, yields the result after each case.

    Args:
        seconds: for everything. A case may take twice its share of the remaining time.
        rounds: most samples of each contestant.
        copied: bytes of the buffer whose copy gives the bandwidth.
    """
    start = time.monotonic()
    others, absent = peers()
    entrants = [*contestants(), *others]
    # each dtype separately: a release may be wrong in one only
    refused = {
        f"{contestant.name} {dtype}": why
        for dtype in dict.fromkeys(case.dtype for case in cases)
        for contestant in entrants
        if (why := refusal(contestant, DTYPES[dtype], clock.device)) is not None
    }
    result: dict[str, Any] = {
        "timed": clock.timed, "copy_bytes_per_second": [copy_bandwidth(clock, copied)],
        "rows": [], "refused": refused, "absent": absent, "no_time": [],
    }  # fmt: skip
    for number, case in enumerate(cases):
        now = time.monotonic()
        remaining = start + seconds - now
        if remaining <= 0:
            result["no_time"].append(f"{case.name} {case.dtype} {case.rule}")
            continue
        right = [c for c in entrants if c.rule == case.rule and f"{c.name} {case.dtype}" not in refused]
        end = now + min(2 * remaining / (len(cases) - number), remaining)
        # the number of kernels is the same in every dtype
        found = run_case(case, right, clock, end, rounds, profile=case.dtype == cases[0].dtype)
        for row in found:
            write(row)
        result["rows"] += found
        yield result
    result["copy_bytes_per_second"].append(copy_bandwidth(clock, copied))
    result["seconds"] = time.monotonic() - start
    yield result
