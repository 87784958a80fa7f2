"""The queue and two launches of the same kernels, bit for bit, under contention.

    python -m bench.stress [--rehearsal]

A queue of many items takes many steps, in orders of the items that are drawn at random, and on a GPU while a copy runs
on a second stream. A tensor of more than 2**31 elements follows. Writes one row for each check.
"""

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from bench import rows
from bench.gate import parameters
from bench.parameter_sets import Shapes, shapes_of
from bench.two_launches import TwoLaunches
from fused_lwlr.scaling import ELR, LAMB

SCALINGS: dict[str, Any] = {"sgd": ELR(0.1), "adamw": LAMB()}
LR = 1e-3
SAME_ORDER = 20
"""Steps that are taken in one order."""
SMALL: Shapes = [(70, 128), (5,), (300, 900), (), (64, 64, 3), (200, 128), *[(64,)] * 20]


def shuffle(items: np.ndarray, seed: int) -> np.ndarray:
    """Returns the items of the queue in a random order in which the norms of a row come before its updates."""
    place = np.random.default_rng(seed).random(len(items))
    row, update = items[:, 0], items[:, 1] % 2 == 1
    last = np.zeros(row.max() + 1)
    np.maximum.at(last, row[~update], place[~update])
    place[update] += last[row[update]]
    return np.ascontiguousarray(items[np.argsort(place, kind="stable")])


@contextlib.contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Lists of items that are made inside have a random order."""
    from fused_lwlr.kernels.triton import work

    make = work.item_list
    with patch.object(work, "item_list", lambda *args: shuffle(make(*args), seed)):
        yield


def differing(one: Tensor, other: Tensor) -> int:
    """The number of elements whose bits differ."""
    bits = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return int((one.view(bits) != other.view(bits)).sum())


def copy_beside(device: torch.device, size: int = 1 << 30) -> Callable[[], object]:
    """Returns a function that starts a copy on a second stream of a GPU, and does nothing elsewhere."""
    if device.type != "cuda":
        return lambda: None
    stream = torch.cuda.Stream(device)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))

    def begin() -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    return begin


def twins(named: Any, rule: str) -> tuple[TwoLaunches, TwoLaunches]:
    """Returns two equal optimizers that share gradients but not weights and state."""
    others = [(name, nn.Parameter(param.detach().clone())) for name, param in named]
    for (_, other), (_, param) in zip(others, named, strict=True):
        other.grad = param.grad
    return TwoLaunches(named, LR, rule, SCALINGS[rule]), TwoLaunches(others, LR, rule, SCALINGS[rule])


def wrong_elements(one: TwoLaunches, two: TwoLaunches) -> int:
    """The number of elements of weights and state that differ."""
    columns = one.table.columns
    return sum(differing(a, b) for name in columns for a, b in zip(columns[name], two.table.columns[name], strict=True))


def orders(shapes: Shapes, rule: str, dtype: torch.dtype, device: torch.device, steps: int) -> dict[str, Any]:
    """Steps in random orders; ends at the first difference."""
    torch.manual_seed(0)
    named = parameters(shapes, dtype, device)
    one, two = twins(named, rule)
    begin_copy, taken, wrong = copy_beside(device), 0, 0
    while taken < steps and not wrong:
        # lists of items in the last order
        one.table.cache.clear()
        for _ in range(min(SAME_ORDER, steps - taken)):
            for _, param in named:
                assert param.grad is not None
                param.grad.uniform_(-1, 1)
            begin_copy()
            with shuffled(taken):
                one.step_in_one()
            two.step()
            taken += 1
        wrong = wrong_elements(one, two)
    return {"steps": taken, "wrong": wrong}


def large(elements: int, device: torch.device, *, part: int = (1 << 20) + 5) -> dict[str, Any]:
    """One tensor: its weight norm against PyTorch's, its last elements against the same step of these alone."""
    torch.manual_seed(0)
    named = parameters([(elements,)], torch.bfloat16, device)
    one, two = twins(named, "sgd")
    weight = named[0][1].detach()
    tail = nn.Parameter(weight[-part:].clone())
    assert named[0][1].grad is not None
    tail.grad = named[0][1].grad[-part:].clone()
    expected = math.fsum(float(some.double().square().sum()) for some in weight.split(1 << 28))
    found = one.step_in_one()
    two.step()
    error = abs(float(found[0, 3]) / expected - 1)
    alone = TwoLaunches([("tail", tail)], LR, "sgd", SCALINGS["sgd"])
    alone.update(found[:, -1].clone())
    wrong = wrong_elements(one, two) + differing(tail.detach(), weight[-part:])
    return {"elements": elements, "norm error": error, "wrong": wrong + int(not error < 1e-5)}


def checks(device: torch.device, shapes: Shapes, steps: int, elements: int) -> Iterator[dict[str, Any]]:
    """A row for each check; "wrong" is 0 where all is right."""
    for rule in SCALINGS:
        for dtype in (torch.float32, torch.bfloat16):
            begin = time.monotonic()
            found = orders(shapes, rule, dtype, device, steps)
            yield {"check": f"{rule} {dtype}", **found, "seconds": round(time.monotonic() - begin, 1)}
    yield {"check": "large", **large(elements, device)}


def main() -> int:
    """Writes the rows; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearsal", action="store_true", help="small tensors, on any machine")
    small = parser.parse_args().rehearsal
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wrong = 0
    sizes = (SMALL, 3, 2**21) if small else (shapes_of("ViT-L/16"), 200, 2**31 + 5)
    for row in checks(device, *sizes):
        rows.write(row)
        wrong += row["wrong"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
