"""The queue and two launches of the same kernels, bit for bit, under contention.

    python -m bench.stress [--rehearsal]

A queue of many items takes many steps, in orders of the items that are drawn at random, and on a GPU while a copy runs
on a second stream. A tensor of more than 2**31 elements follows. Writes one row for each check.
"""

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from bench import rows
from bench.clock import here
from bench.contestants import OPTIONS
from bench.parameter_sets import Shapes, parameters, shapes_of
from fused_lwlr.backends import pick
from fused_lwlr.kernels import ADAMW, SGD, Factors, Hyper, Row, Table
from fused_lwlr.scaling import ELR, LAMB

RULES: dict[str, Any] = {"sgd": (SGD, ELR(0.1)), "adamw": (ADAMW, LAMB())}
LR = 1e-3
SAME_ORDER = 20
"""Steps that are taken in one order."""
COPIED = 1 << 30
"""Bytes of the copy on the second stream."""
PART = (1 << 20) + 5
"""The last elements of a large tensor, which are stepped alone too."""
SMALL: Shapes = [(70, 128), (5,), (300, 900), (), (64, 64, 3), (200, 128), *[(64,)] * 20]


class TwoLaunches:
    """A step by our kernels whose first launch finds the factors and writes nothing, and whose second one uses them."""

    def __init__(self, named: Any, rule: str):
        params: list[Tensor] = [param.detach() for _, param in named]
        self._named = [param for _, param in named]
        self._rule, scaling = RULES[rule]
        columns: dict[str, Any] = {name: [torch.zeros_like(p) for p in params] for name in self._rule.states[:2]}
        columns |= {"param": params, "grad": [param.grad for param in self._named]}
        self.table = Table(columns, [Row(i, scaled=True) for i in range(len(params))])
        own = {"dampening": 0.0, "nesterov": False, **OPTIONS[rule]}
        self._hyper = Hyper(LR, own["weight_decay"], hyperparameters=self._rule.hyperparameters(own))
        self._scale: Any = scaling.factor_formula(self._rule)
        self._backend = pick("auto", params[0].device, params[0].dtype)
        self._taken = 0

    def step(self) -> None:
        """One step."""
        self.update(self._launch(self._scale, write=False)[:, -1])

    def update(self, factors: Tensor) -> None:
        """The second launch alone, with factors of the tensors."""
        self._launch(Factors(factors, self._scale.target), write=True)
        self._taken += 1

    def step_in_one(self) -> Tensor:
        """The same step in one launch; returns the statistics that it found."""
        found = self._launch(self._scale, write=True)
        self._taken += 1
        return found

    def _launch(self, scale: Any, *, write: bool) -> Any:
        grads: list[Any] = [param.grad for param in self._named]
        self.table.accept_gradients(grads)
        # with 0 steps taken the momentum of SGD is the gradient
        self.table.steps = np.full(len(grads), self._taken, dtype=np.float32)
        return self._backend.step(self._rule, self.table, [self._hyper], scale, write=write)


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


def twins(named: Any, rule: str) -> tuple[TwoLaunches, TwoLaunches]:
    """Returns two equal optimizers that share gradients but not weights and state."""
    others = [(name, nn.Parameter(param.detach().clone())) for name, param in named]
    for (_, other), (_, param) in zip(others, named, strict=True):
        other.grad = param.grad
    return TwoLaunches(named, rule), TwoLaunches(others, rule)


def wrong_elements(one: TwoLaunches, two: TwoLaunches) -> int:
    """The number of elements of weights and state that differ."""
    columns = one.table.columns
    return sum(differing(a, b) for name in columns for a, b in zip(columns[name], two.table.columns[name], strict=True))


def orders(shapes: Shapes, rule: str, dtype: torch.dtype, device: torch.device, steps: int) -> dict[str, Any]:
    """Steps in random orders; ends at the first difference."""
    torch.manual_seed(0)
    named = parameters(shapes, dtype, device)
    one, two = twins(named, rule)
    on_gpu = device.type == "cuda"
    stream = torch.cuda.Stream(device) if on_gpu else None
    source, target = (torch.zeros(COPIED if on_gpu else 0, dtype=torch.uint8, device=device) for _ in range(2))
    taken = wrong = 0
    while taken < steps and not wrong:
        # lists of items in the last order
        one.table.device_tables.clear()
        for _ in range(min(SAME_ORDER, steps - taken)):
            for _, param in named:
                assert param.grad is not None
                param.grad.uniform_(-1, 1)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            with shuffled(taken):
                one.step_in_one()
            two.step()
            taken += 1
        wrong = wrong_elements(one, two)
    return {"steps": taken, "wrong": wrong}


def large(elements: int, device: torch.device) -> dict[str, Any]:
    """One tensor: its weight norm against PyTorch's, its last elements against the same step of these alone."""
    torch.manual_seed(0)
    named = parameters([(elements,)], torch.bfloat16, device)
    one, two = twins(named, "sgd")
    weight = named[0][1].detach()
    tail = nn.Parameter(weight[-PART:].clone())
    assert named[0][1].grad is not None
    tail.grad = named[0][1].grad[-PART:].clone()
    expected = math.fsum(float(some.double().square().sum()) for some in weight.split(1 << 28))
    found = one.step_in_one()
    two.step()
    error = abs(float(found[0, 3]) / expected - 1)
    TwoLaunches([("tail", tail)], "sgd").update(found[:, -1].clone())
    wrong = wrong_elements(one, two) + differing(tail.detach(), weight[-PART:])
    return {"elements": elements, "norm error": error, "wrong": wrong + int(not error < 1e-5)}


def checks(device: torch.device, shapes: Shapes, steps: int, elements: int) -> Iterator[dict[str, Any]]:
    """A row for each check; "wrong" is 0 where all is right."""
    for rule in RULES:
        for dtype in (torch.float32, torch.bfloat16):
            begin = time.monotonic()
            found = orders(shapes, rule, dtype, device, steps)
            yield {"check": f"{rule} {dtype}", **found, "seconds": round(time.monotonic() - begin, 1)}
    yield {"check": "large", **large(elements, device)}


def main() -> int:
    """Writes the rows; returns 1 if anything was wrong."""
    small = rows.command(__doc__, "--rehearsal").parse_args().rehearsal
    wrong = 0
    for row in checks(here(), *((SMALL, 3, 2**21) if small else (shapes_of("ViT-L/16"), 200, 2**31 + 5))):
        rows.write(row)
        wrong += row["wrong"]
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
