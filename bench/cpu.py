"""Steps on this machine's CPU: ours, torch's fused ones, compositions of torch's calls, and timm's.

    python -m bench.cpu [--quick]

Contestants of a set are timed in turns. Results are milliseconds, ratios to torch's fused step (for
statistics, to the `_foreach_norm` calls for the same numbers) and to our own plain step, and the percentage of the copy
bandwidth that was measured in the same rounds.
"""

import os
import statistics
from collections.abc import Iterator
from timeit import timeit
from typing import Any

import torch

from bench.contestants import Contestant, contestants, peers
from bench.gate import refusal
from bench.parameter_sets import Shapes, decoder, numel, parameters, shapes_of, tiny
from bench.rows import command, show

SETS = {
    "ResNet-50": lambda: shapes_of("ResNet-50"),
    "ViT-S/16": lambda: shapes_of("ViT-S/16"),
    "a layer of a 1.3 B decoder": lambda: decoder(layers=1)[2:],
    "16 tiny": lambda: tiny(16),
}
METHODS = ("plain", "ELR", "LARS", "NG", "clip", "LAMB", "statistics")
PASSES = {"sgd plain": 5, "adamw plain": 7}
"""How often a step that needs no norms reads or writes an element."""
HEAD = ("set", "threads", "step", "ms", "/ torch's", "/ our plain step", "% of copy")
CPU = torch.device("cpu")
Row = dict[str, Any]


def measure(name: str, shapes: Shapes, threads: int, every: list[Contestant], rounds: int) -> Iterator[Row]:
    """Times all contestants on one set of shapes."""
    torch.set_num_threads(threads)
    size = numel(shapes)
    # separate weights: the norms that a step keeps for the next one are valid only while no other contestant steps
    steps = {c.name: c.build(parameters(shapes, torch.float32, CPU, 1e-4), 1e-6, False).step for c in every}
    source = torch.ones(max(size, 1 << 24))
    target = torch.empty_like(source)
    for step in steps.values():
        step()
    calls = {**steps, "copy": lambda: target.copy_(source)}
    repeats = dict.fromkeys(steps, max(1, 10**6 // size)) | {"copy": 1}
    timed = [{name: timeit(calls[name], number=n) / n for name, n in repeats.items()} for _ in range(rounds)]
    medians = {name: statistics.median(times[name] for times in timed) for name in calls}
    bandwidth = 8 * source.numel() / medians["copy"]
    for contestant in every:
        took, kind = medians[contestant.name], f"{contestant.rule} {contestant.method}"
        plain, fused = (medians.get(f"{contestant.rule} plain, {who}") for who in ("ours", "torch fused"))
        base = medians.get("statistics, foreach") if contestant.rule == "statistics" else fused
        share = None if kind not in PASSES else 4 * PASSES[kind] * size / took / bandwidth
        yield {
            "set": name, "threads": threads, "step": contestant.name, "seconds": took,
            "of_torch": base and took / base, "of_plain": plain and took / plain, "of_bandwidth": share,
        }  # fmt: skip


def rows(quick: bool) -> Iterator[Row]:
    """All sets, with one thread and with all; three rounds of the two smaller sets if it has to be quick."""
    entrants = [contestant for contestant in (*contestants(), *peers()[0]) if contestant.method in METHODS]
    every = [contestant for contestant in entrants if refusal(contestant, torch.float32, CPU) is None]
    for name in ("ViT-S/16", "16 tiny") if quick else SETS:
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            yield from measure(name, SETS[name](), threads, every, 3 if quick else 11)


def cells(row: Row) -> list[str]:
    """A row as text, in the order of `HEAD`."""
    ratios = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("of_torch", "of_plain")]
    share = "" if row["of_bandwidth"] is None else f"{100 * row['of_bandwidth']:.0f}"
    return [row["set"], str(row["threads"]), row["step"], f"{1e3 * row['seconds']:.3f}", *ratios, share]


def main() -> None:
    """Print every row when it is measured."""
    show(HEAD, map(cells, rows(command(__doc__, "--quick").parse_args().quick)))


if __name__ == "__main__":
    main()
