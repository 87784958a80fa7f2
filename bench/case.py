"""One case of the throughput bench: contestants are timed in turns, with a result for each.

They are in memory together; each has separate weights, and contestants that do not change gradients share them. If
memory is short they run in batches, with torch's fused step and our plain one in every batch.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.bytes_moved import recorded
from bench.clock import Clock
from bench.contestants import Contestant, Named
from bench.gate import failure, parameters
from bench.parameter_sets import Shapes, numel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LR = 1e-4
COLUMNS = {"sgd": 3, "adamw": 4, "statistics": 2}
"""Weights, gradients and state of a rule."""
TEMPORARY = 3
"""Temporary columns of a step with torch's multi-tensor calls."""
FEWEST = 5
"""Rounds after which a case may run out of time."""


class Case(NamedTuple):
    """Contestants are compared within a case."""

    name: str
    shapes: Shapes
    dtype: str
    rule: str


class Entry:
    """One contestant of a case, ready to step."""

    def __init__(
        self, contestant: Contestant, case: Case, grads: Sequence[Tensor], moved: Sequence[Tensor], clock: Clock
    ):
        self.contestant = contestant
        self._clock = clock
        self._kept = grads
        sets = (grads, moved)
        self._sets = [[g.clone() for g in some] for some in sets] if contestant.mutates else list(sets)
        self.named: Named = parameters(case.shapes, DTYPES[case.dtype], clock.device)
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
        """Restore the gradients after a step; not timed."""
        if self.contestant.mutates:
            grads: list[Any] = [param.grad for _, param in self.named]
            torch._foreach_copy_(grads, list(self._kept))

    def sample(self) -> None:
        """Take one sample of everything but graphs."""
        self.restore()
        host, wall = self._clock.wall_seconds(self.optimizer.step)
        self._add(host=host, wall=wall)
        self._move()
        host_moved, wall_moved = self._clock.wall_seconds(self.optimizer.step)
        self._add(host_moved=host_moved, wall_moved=wall_moved)
        for name, flush in (("cold", True), ("warm", False)):
            self.restore()
            self._add(**{name: self._clock.device_seconds(self.optimizer.step, flush=flush, host=host)})

    def _move(self) -> None:
        """Give every gradient its other address, as a backward pass after `zero_grad()` does; not timed."""
        self._sets.reverse()
        for (_, param), grad in zip(self.named, self._sets[0], strict=True):
            param.grad = grad
        self.restore()

    def capture(self) -> None:
        """Capture a graph of a step, and replace the optimizer."""
        self.optimizer = None
        # a graph uses the optimizer's memory: keep the optimizer alive as long as the graph
        self.optimizer = self._made(capturable=self._clock.graphs)
        self.replay = self._clock.graph(self.optimizer.step)

    def sample_replay(self) -> None:
        """Take one sample of a replay."""
        self.restore()
        _, wall = self._clock.wall_seconds(self.replay)
        self._add(replay_wall=wall, replay=self._clock.device_seconds(self.replay, flush=True, host=20e-6))

    def _add(self, **seconds: float) -> None:
        for name, value in seconds.items():
            self.samples.setdefault(name, []).append(value)


def counted(entry: Entry) -> float | None:
    """Bytes of a parameter that one step of ours moves; None for other contestants."""
    if entry.contestant.who != "ours" or not entry.named[0][1].is_cuda:
        return None
    with recorded() as counted:
        entry.optimizer.step()
    count = sum(param.numel() for _, param in entry.named)
    return (counted["bytes"] + counted["again"]) / count


def batches(case: Case, entrants: Sequence[Contestant], free: int) -> Iterator[list[Contestant]]:
    """The largest number of contestants that fit into memory together, with the first two in every batch."""
    column = numel(case.shapes) * DTYPES[case.dtype].itemsize
    # two sets of gradients and temporary memory are shared; a contestant may have separate gradients
    room = 0.85 * free - (2 + TEMPORARY) * column
    most = max(3, int(room // (COLUMNS[case.rule] * column)))
    if most >= len(entrants):
        yield list(entrants)
        return
    baselines, others = list(entrants[:2]), list(entrants[2:])
    for at in range(0, len(others), most - 2):
        yield baselines + others[at : at + most - 2]


def run_case(
    case: Case,
    entrants: Sequence[Contestant],
    clock: Clock,
    deadline: float,
    rounds: int,
    *,
    profile: bool,
    captured: Sequence[str],
) -> list[dict[str, Any]]:
    """One row for each contestant: medians in seconds and their spreads, or the reason why it was not timed.

    Args:
        profile: whether kernels are counted by the profiler.
        captured: methods that are also captured in a graph.
    """
    groups = list(batches(case, entrants, clock.free_bytes()))
    rows: dict[str, dict[str, Any]] = {}
    for turn, batch in enumerate(groups):
        now = time.monotonic()
        end = now + max(deadline - now, 0.0) / (len(groups) - turn)
        # in a separate function, so that all memory of a batch is freed before the next one
        for row in _run_batch(case, batch, clock, end, rounds, profile=profile, captured=captured):
            rows.setdefault(f"{row['method']} {row['who']}", row)
    return list(rows.values())


def _run_batch(
    case: Case,
    batch: Sequence[Contestant],
    clock: Clock,
    end: float,
    rounds: int,
    *,
    profile: bool,
    captured: Sequence[str],
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    found = [param.grad for _, param in parameters(case.shapes, DTYPES[case.dtype], clock.device)]
    grads = [grad for grad in found if grad is not None]
    moved = [grad.clone() for grad in grads]
    entries: list[Entry] = []
    left_out: list[tuple[Contestant, str]] = []
    for contestant in batch:
        # the two baselines of all comparisons in any case
        if time.monotonic() > end and len(entries) >= 2:
            left_out.append((contestant, "no time left"))
            continue
        try:
            entries.append(Entry(contestant, case, grads, moved, clock))
        except Exception as raised:
            left_out.append((contestant, failure(raised)))
    # two thirds of the remaining time for steps, and one for replays
    now = time.monotonic()
    _rounds(entries, Entry.sample, rounds, now + (end - now) * 2 / 3)
    extras = []
    for at, entry in enumerate(entries):
        # the profiler takes longer than a step
        profiled = profile and (time.monotonic() < end or at < 2)
        launches = entry.attempt(lambda e: clock.launches(e.optimizer.step)) if profiled else None
        extras.append((launches, entry.attempt(counted)))
    replayed = [e for e in entries if e.contestant.graph and e.contestant.method in captured]
    for at, entry in enumerate(replayed):
        if time.monotonic() < end or at < 2:
            entry.attempt(Entry.capture)
    _rounds([e for e in replayed if e.replay is not None], Entry.sample_replay, rounds, end)
    left_out += [(entry.contestant, entry.failure) for entry in entries if entry.failure is not None]
    rows = [
        {**_head(case, entry.contestant), **_row(case, entry, *extra)}
        for entry, extra in zip(entries, extras, strict=True)
        if entry.failure is None
    ]
    measured = [entry.contestant for entry in entries if entry.failure is None]
    first = rows[0]["wall"] if measured[:1] == list(batch[:1]) else None
    for row in rows:
        # relative to the same batch, so that a drift between batches cancels
        row["of_first"] = None if first is None else row["wall"] / first
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
        "rule": contestant.rule, "method": contestant.method, "who": contestant.who,
    }  # fmt: skip


def _row(case: Case, entry: Entry, launches: dict[str, int] | None, counted: float | None) -> dict[str, Any]:
    itemsize = DTYPES[case.dtype].itemsize
    passes = entry.contestant.passes
    moved = counted if counted is not None else None if passes is None else passes * itemsize
    row: dict[str, Any] = {"rounds": len(entry.samples["wall"])}
    for name, values in entry.samples.items():
        row[name] = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4)
        row[f"{name}_spread"] = (high - low) / row[name]
    row |= {
        "bytes_per_parameter": moved,
        "bytes_counted": counted is not None,
        "bytes_per_second": None if moved is None else moved * numel(case.shapes) / row["cold"],
        "launches": launches,
        "peak_bytes_per_parameter": entry.peak / numel(case.shapes),
    }
    return row
