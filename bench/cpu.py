"""Steps on this machine's CPU: ours, torch's fused ones, compositions of torch's calls, and timm's.

    python -m bench.cpu [--quick] [--json]

Contestants of a set are timed in turns. Results are milliseconds, ratios to torch's fused step (for
statistics, to the `_foreach_norm` calls for the same numbers) and to our own plain step, and the percentage of the copy
bandwidth that was measured in the same rounds.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.contestants import Contestant, contestants
from bench.gate import parameters, refusal
from bench.parameter_sets import Shapes, decoder, numel, shapes_of, tiny
from bench.peers import peers

SETS = {
    "ResNet-50": lambda: shapes_of("ResNet-50"),
    "ViT-S/16": lambda: shapes_of("ViT-S/16"),
    "a layer of a 1.3 B decoder": lambda: decoder(layers=1)[2:],
    "16 tiny": lambda: tiny(16),
}
METHODS = ("plain", "ELR", "LARS", "NG", "clip", "LAMB", "statistics")
ROUNDS = {False: 11, True: 3}
PASSES = {"sgd plain": 5, "adamw plain": 7}
"""How often a step that needs no norms reads or writes an element."""
HEAD = ("set", "threads", "step", "ms", "/ torch's", "/ our plain step", "% of copy")
CPU = torch.device("cpu")
Row = dict[str, Any]


def chosen() -> list[Contestant]:
    """The contestants whose results are correct."""
    found = []
    for contestant in (*contestants(), *peers()[0]):
        again = contestant.who == "torch foreach" and contestant.method == "plain"
        if contestant.method in METHODS and not again and refusal(contestant, torch.float32, CPU) is None:
            found.append(contestant)
    return found


def measure(name: str, shapes: Shapes, threads: int, every: list[Contestant], rounds: int) -> Iterator[Row]:
    """Times all contestants on one set of shapes."""
    torch.set_num_threads(threads)
    repeats = max(1, 10**6 // numel(shapes))
    # separate weights: the norms that a step keeps for the next one are valid only while no other contestant steps
    steps = [contestant.build(parameters(shapes, torch.float32, CPU, 1e-4), 1e-6, False) for contestant in every]
    seconds: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step.step()
    source = torch.ones(max(numel(shapes), 1 << 24))
    target, copies = torch.empty_like(source), []
    for _ in range(rounds):
        for times, step in zip(seconds, steps, strict=True):
            start = time.perf_counter()
            for _ in range(repeats):
                step.step()
            times.append((time.perf_counter() - start) / repeats)
        start = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - start)
    bandwidth = 8 * source.numel() / statistics.median(copies)
    medians = {contestant.name: statistics.median(times) for contestant, times in zip(every, seconds, strict=True)}
    for contestant in every:
        took, kind = medians[contestant.name], f"{contestant.rule} {contestant.method}"
        plain, fused = (medians.get(f"{contestant.rule} plain, {who}") for who in ("ours", "torch fused"))
        base = medians["statistics, foreach"] if contestant.rule == "statistics" else fused
        share = None if kind not in PASSES else 4 * PASSES[kind] * numel(shapes) / took / bandwidth
        yield {
            "set": name, "threads": threads, "step": contestant.name, "seconds": took,
            "of_torch": base and took / base, "of_plain": plain and took / plain, "of_bandwidth": share,
        }  # fmt: skip


def cells(row: Row) -> list[str]:
    """A row as text, in the order of `HEAD`."""
    ratios = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("of_torch", "of_plain")]
    share = "" if row["of_bandwidth"] is None else f"{100 * row['of_bandwidth']:.0f}"
    return [row["set"], str(row["threads"]), row["step"], f"{1e3 * row['seconds']:.3f}", *ratios, share]


def main() -> None:
    """Measure, and print a line of text or one JSON object for each row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="three rounds of the two smaller sets")
    args = parser.parse_args()
    every = chosen()
    for name in ("ViT-S/16", "16 tiny") if args.quick else SETS:
        for threads in sorted({1, len(os.sched_getaffinity(0))}):
            for row in measure(name, SETS[name](), threads, every, ROUNDS[args.quick]):
                print(json.dumps(row) if args.json else "  ".join(cells(row)), flush=True)


if __name__ == "__main__":
    main()
