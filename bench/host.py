"""Host time of `step()` without the kernel, whose launch is replaced by an empty function.

    python -m bench.host [--quick]

The same tiny tensors and one thread, ours and torch.optim's in turns; runs on any machine. The rate is changed before
every step, as by a scheduler. For a rate for every tensor, torch.optim has a param group for each, and ours has
multipliers. Gradients are kept, or new in every step, or some are missing: layers of four tensors are left out at
random, one in twenty, and others in every step.
"""

import itertools
import random
import statistics
from collections.abc import Iterator
from typing import Any

import torch

import fused_lwlr
from bench.bytes_moved import without_kernels
from bench.clock import Clock
from bench.parameter_sets import parameters
from bench.rows import command, show

CLOCK = Clock()
ROUNDS, STEPS = 15, 20
COUNTS = (16, 161, 2000)
GRADIENTS = ("kept", "new", "some")
FEW = 200
"""Largest number of tensors for the case with missing gradients: more tensors would take minutes."""
LAYER, LEFT_OUT = 4, 0.05
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ELR": {"scaling": fused_lwlr.ELR(0.01, select="*")},
    "LARS": {"scaling": fused_lwlr.LARS(select="*")},
}
COLUMNS = (*OURS, "fused", "groups")
"""Ours with multipliers, alone and scaled; torch's fused, alone and with a group for each tensor."""

HEAD = ("optimizer", "tensors", "gradients", *(f"{who} µs" for who in COLUMNS), "ours / fused")


def contestants(name: str, count: int) -> dict[str, torch.optim.Optimizer]:
    """One optimizer for each of `COLUMNS`, all over the same parameters, whose addresses affect the time much."""
    options, named = OPTIONS[name], parameters([(8,)] * count, torch.float32, torch.device("cpu"))
    params = [param for _, param in named]
    multipliers = {layer: 0.5 for layer, _ in named}
    ours, torchs = getattr(fused_lwlr, name), getattr(torch.optim, name)
    groups = [{"params": [param], "lr": options["lr"] * 0.5} for param in params]
    return {
        **{who: ours(named, layers=multipliers, backend="triton", **more, **options) for who, more in OURS.items()},
        "fused": torchs(params, fused=True, **options),
        "groups": torchs(groups, fused=True, **options),
    }


def seconds(optimizer: torch.optim.Optimizer, gradients: str, steps: int) -> float:
    """Time of one step, the median of a few, with the rate changed and gradients, one of `GRADIENTS`, set before."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    kept = [param.grad for param in params]
    if gradients == "some":
        # torch's fused SGD cannot handle a parameter whose first gradient comes after another parameter's
        optimizer.step()
    times = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            group["lr"] *= 0.999
        there = [gradients != "some" or random.random() >= LEFT_OUT for _ in range(0, len(params), LAYER)]
        for i, (param, grad) in enumerate(zip(params, kept, strict=True)):
            new = torch.zeros_like(param) if gradients == "new" else grad
            param.grad = new if there[i // LAYER] else None
        times.append(CLOCK.wall_seconds(optimizer.step)[0])
    for param, grad in zip(params, kept, strict=True):
        param.grad = grad
    return statistics.median(times)


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Seconds for each optimizer, number of tensors, and kind of gradients, on one thread.

    Other work on a machine slows it down by up to a factor of two, for seconds. So for torch's fused step this is the
    minimum over rounds, and for the others that minimum times the median over rounds of their ratio to the fused step.
    """
    torch.set_num_threads(1)
    rounds, steps = (5, 5) if quick else (ROUNDS, STEPS)
    for name, count in itertools.product(OPTIONS, COUNTS):
        for gradients in GRADIENTS if count <= FEW else GRADIENTS[:2]:
            optimizers = contestants(name, count)
            timed = []
            for turn in range(rounds):
                order = [*COLUMNS[turn % len(COLUMNS) :], *COLUMNS[: turn % len(COLUMNS)]]
                with without_kernels():
                    timed.append({who: seconds(optimizers[who], gradients, steps) for who in order})
            least = min(times["fused"] for times in timed)
            ratios = {who: statistics.median(times[who] / times["fused"] for times in timed) for who in optimizers}
            times = {who: ratio * least for who, ratio in ratios.items()}
            yield {"optimizer": name, "tensors": count, "gradients": gradients, **times}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, in the order of `HEAD`."""
    times = [f"{row[who] * 1e6:,.0f}" for who in COLUMNS]
    return [row["optimizer"], f"{row['tensors']:,}", row["gradients"], *times, f"{row['ours'] / row['fused']:.2f}"]


def main() -> None:
    """Print every row when it is measured."""
    show(HEAD, map(cells, rows(command(__doc__, "--quick").parse_args().quick)))


if __name__ == "__main__":
    main()
