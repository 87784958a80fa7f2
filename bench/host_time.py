"""Host time of `step()`: everything but the kernel, which is replaced by nothing.

    python bench/host_time.py

Same tiny tensors, one thread, ours and torch.optim's in turns; runs on any machine. A step with a rate for
every tensor needs as many param groups in torch.optim, and multipliers in ours.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import importlib
import statistics
import time
from typing import Any

import torch

import fused_lwlr

ROUNDS, STEPS = 15, 20
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}


def parameters(count: int) -> list[tuple[str, torch.nn.Parameter]]:
    """Named parameters of eight elements each, with gradients."""
    named = [(f"layer{i}", torch.nn.Parameter(torch.randn(8))) for i in range(count)]
    for _, param in named:
        param.grad = torch.randn(8)
    return named


def contestants(name: str, count: int) -> dict[str, torch.optim.Optimizer]:
    """Ours with a multiplier for every tensor, without and with ELR; torch's fused without and with a rate for each."""
    options = OPTIONS[name]
    ours, scaled, fused, grouped = (parameters(count) for _ in range(4))
    torch_class = getattr(torch.optim, name)
    groups = [{"params": [param], "lr": options["lr"] * 0.5} for _, param in grouped]
    multipliers = {layer: 0.5 for layer, _ in ours}
    return {
        "ours": getattr(fused_lwlr, name)(ours, multipliers=multipliers, backend="triton", **options),
        "elr": getattr(fused_lwlr, name)(
            scaled, multipliers=multipliers, scaling=fused_lwlr.ELR(0.01, select="*"), backend="triton", **options
        ),
        "fused": torch_class([param for _, param in fused], fused=True, **options),
        "groups": torch_class(groups, fused=True, **options),
    }


def microseconds(optimizer: torch.optim.Optimizer, reallocate: bool) -> float:
    """Time of one step, the mean of a few, with the rate changed and gradients set anew before each."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    total = 0.0
    for _ in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] *= 0.999
        if reallocate:
            for param in params:
                param.grad = torch.zeros_like(param)
        start = time.perf_counter()
        optimizer.step()
        total += time.perf_counter() - start
    return total / STEPS * 1e6


def nothing(*args: Any, **kwargs: Any) -> None:
    """Stands in for a launch."""


def main() -> None:
    """Print the median over rounds for each optimizer, number of tensors, and kind of gradients."""
    torch.set_num_threads(1)
    # an interpreted kernel would take all the time; the reference's time is no host time
    module: Any = importlib.import_module("fused_lwlr.kernels.triton.step")
    module.launch = nothing
    print(f"torch {torch.__version__}, one thread; µs per step, median of {ROUNDS} x {STEPS}")
    head = f"{'tensors':>7} {'gradients':>9} {'ours':>7} {'+ ELR':>7} {'fused':>7} {'ratio':>6} {'groups':>8}"
    print(f"{'':5} {head}   (groups: fused, with a param group for each tensor)")
    for name in OPTIONS:
        for count in (16, 161, 2000):
            for reallocate in (False, True):
                optimizers = contestants(name, count)
                timed: dict[str, list[float]] = {who: [] for who in optimizers}
                for _ in range(ROUNDS):
                    for who, optimizer in optimizers.items():
                        timed[who].append(microseconds(optimizer, reallocate))
                ours, elr, fused, groups = map(statistics.median, timed.values())
                kind = "new" if reallocate else "kept"
                times = f"{ours:7.0f} {elr:7.0f} {fused:7.0f} {ours / fused:6.2f} {groups:8.0f}"
                print(f"{name:5} {count:7} {kind:>9} {times}", flush=True)


if __name__ == "__main__":
    main()
