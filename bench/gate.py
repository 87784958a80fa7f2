"""Contestants are checked before they are timed: two steps against our PyTorch reference in float64.

    python -m bench.gate

checks ours in parallel, which compiles their kernels for a bench that follows. Writes a row for each.
"""

import itertools
import multiprocessing
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from bench import rows
from bench.clock import here
from bench.contestants import Contestant, contestants, ours
from bench.parameter_sets import DTYPES, parameters

# above any block, below one, of one element, and of no multiple of a vector
SHAPES = [(70, 65), (7,), (1,), (3, 5, 3, 3), (128, 8)]
LR = {"sgd": 0.1, "adamw": 0.05}
# for weights below 2: rounding of the few operations of two steps; half precision also rounds stored values
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4 * 2**-7}


def error_of(contestant: Contestant, dtype: torch.dtype, device: torch.device) -> float:
    """The largest absolute error of a weight after two steps; for statistics, the largest relative error."""
    torch.manual_seed(0)
    named = parameters(SHAPES, dtype, device)
    exact = [(name, nn.Parameter(param.detach().double().cpu())) for name, param in named]
    grads = [param.grad.clone() for _, param in named if param.grad is not None]
    for (_, param), grad in zip(exact, grads, strict=True):
        param.grad = grad.double().cpu()
    lr = LR.get(contestant.rule, 0.0)
    optimizer = contestant.build(named, lr, False)
    if contestant.rule == "statistics":
        return _statistics_error(optimizer.step(), exact)
    reference = ours(contestant.rule, contestant.method).build(exact, lr, False)
    for _ in range(2):
        for (_, param), grad in zip(named, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        reference.step()
    pairs = zip(named, exact, strict=True)
    return max(float((param.detach().cpu() - right.detach()).abs().max()) for (_, param), (_, right) in pairs)


def _statistics_error(found: Tensor, named: Any) -> float:
    """Error of Σ|g|, ‖g‖, max|g|, ‖w‖, which both contestants compute."""
    pairs = [(param.grad, param.detach()) for _, param in named]
    expected = torch.stack([torch.stack([g.abs().sum(), g.norm(), g.abs().max(), w.norm()]) for g, w in pairs])
    if found.shape[-1] == 6:  # ours
        found = torch.stack((found[:, 0], found[:, 1].sqrt(), found[:, 4], found[:, 3].sqrt()))
    found = found.T.double().cpu()
    return float(((found - expected) / expected).abs().max())


def failure(raised: Exception) -> str:
    """Says in a line how a contestant failed."""
    return f"fails: {type(raised).__name__}: {raised}".splitlines()[0]


def refusal(contestant: Contestant, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why a contestant is not timed: it fails, or is wrong; None if it is correct."""
    try:
        error = error_of(contestant, dtype, device)
    except Exception as raised:
        # the report names the error, and the other contestants are still measured
        return failure(raised)
    # not above, and not NaN
    return None if error <= TOLERANCE[dtype] else f"wrong by {error:.1e}, more than {TOLERANCE[dtype]:.1e}"


def _check(contestant: str, dtype: str) -> dict[str, Any]:
    checked = next(c for c in contestants() if c.name == contestant)
    return {"contestant": contestant, "dtype": dtype, "wrong": refusal(checked, DTYPES[dtype], here())}


def main() -> int:
    """Checks our contestants, each in one of many processes; returns 1 if one is refused."""
    names = [contestant.name for contestant in contestants() if contestant.library == "ours"]
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        found = [pool.apply_async(_check, task) for task in itertools.product(names, DTYPES)]
        for result in found:
            rows.write(result.get())
    return int(any(result.get()["wrong"] for result in found))


if __name__ == "__main__":
    sys.exit(main())
