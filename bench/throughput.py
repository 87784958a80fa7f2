"""Steps of ours and of others on a GPU, in turns: time, bytes, bandwidth, launches and memory.

    python -m bench --gpu [--quick]

A contestant is timed only if its results are correct.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.case import DTYPES, Case, run_case
from bench.clock import Clock, copy_bandwidth
from bench.contestants import METHODS, contestants
from bench.gate import refusal
from bench.parameter_sets import shapes_of
from bench.peers import peers

ROUNDS = 25
"""Most samples of each contestant."""


class Budget:
    """Seconds for all cases; each may take twice its share of the remaining time."""

    def __init__(self, seconds: float, cases: int):
        self._end = time.monotonic() + seconds
        self._cases = cases

    def next(self) -> float:
        """When the case that begins now must end."""
        now = time.monotonic()
        share = (self._end - now) / max(self._cases, 1)
        self._cases -= 1
        return now + min(2 * share, self._end - now)

    @property
    def spent(self) -> bool:
        """Whether no time remains."""
        return time.monotonic() >= self._end


def cases_of(sets: Sequence[str], dtypes: Sequence[str]) -> list[Case]:
    """All cases; cases of the targets come first."""
    return [
        Case(name, shapes_of(name), dtype, rule)
        for dtype in dtypes
        for name in sets
        for rule in ("sgd", "adamw", *(("statistics",) if dtype == "fp32" else ()))
    ]


def run(
    clock: Clock,
    cases: Sequence[Case],
    *,
    seconds: float,
    rounds: int = ROUNDS,
    copied: int = 2 << 30,
    quick: bool = False,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run the checks, the copy bandwidth, and every case within a budget of time.

    Args:
        rounds: most samples of each contestant.
        copied: bytes of the buffer whose copy gives the bandwidth.
        quick: leaves out torch's for-loop and graphs of all but plain steps, and counts kernels of one set only.
        save: called with the result so far after every case.
        tell: called with the next activity.
    """
    start = time.monotonic()
    others, absent = peers()
    entrants = [c for c in (*contestants(), *others) if not (quick and c.who == "torch for-loop")]
    refused = {}
    # each dtype separately: a release may be wrong in one only
    for dtype in dict.fromkeys(case.dtype for case in cases):
        for contestant in entrants:
            tell(f"is it right? {contestant.name}, {dtype}")
            why = refusal(contestant, DTYPES[dtype], clock.device)
            if why is not None:
                refused[f"{contestant.name} {dtype}"] = why
    result: dict[str, Any] = {
        "timed": clock.timed, "facts": clock.facts(), "copy_bytes_per_second": [copy_bandwidth(clock, copied)],
        "rows": [], "refused": refused, "absent": absent, "no_time": [],
    }  # fmt: skip
    budget = Budget(seconds - (time.monotonic() - start), len(cases))
    captured = ("plain", "multipliers") if quick else tuple({m for rule in ("sgd", "adamw") for m in METHODS[rule]})
    profiled: set[tuple[str, str]] = set()
    for number, case in enumerate(cases):
        label = f"{case.name} {case.dtype} {case.rule}"
        if budget.spent:
            result["no_time"].append(label)
            continue
        tell(f"{number + 1}/{len(cases)} {label}")
        right = [c for c in entrants if c.rule == case.rule and f"{c.name} {case.dtype}" not in refused]
        # the number of kernels is the same in every dtype
        key = (case.rule if quick else case.name, case.rule)
        result["rows"] += run_case(
            case, right, clock, budget.next(), rounds, profile=key not in profiled, captured=captured
        )  # fmt: skip
        profiled.add(key)
        save(result)
    result["copy_bytes_per_second"].append(copy_bandwidth(clock, copied))
    result["seconds"] = time.monotonic() - start
    return result
