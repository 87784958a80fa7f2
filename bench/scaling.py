"""Host time and table memory against the number of tensors, and against the number of parameters.

    python -m bench.scaling [--json]

Launches are replaced by an empty function, and memory that is never touched costs nothing: a billion parameters fit.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bench.without_launch import without_launch  # isort: skip

import fused_lwlr
from fused_lwlr.kernels.table import Table

TENSORS = (10, 30, 100, 300, 1000, 3000, 10_000)
PARAMETERS = (10**4, 10**5, 10**6, 10**7, 10**8, 10**9)
SCALINGS = {"plain": None, "ELR": fused_lwlr.ELR(0.1, select="*")}
STEPS = 5
HEAD = ("over", "scaling", "n", "first step ms", "later steps ms", "tables kB")


def optimizer_of(sizes: list[int], scaling: Any) -> torch.optim.Optimizer:
    """SGD, which keeps no state, over tensors whose memory was never written."""
    named = [(f"p{i}", nn.Parameter(torch.empty(size))) for i, size in enumerate(sizes)]
    for _, param in named:
        param.grad = torch.empty_like(param)
    return fused_lwlr.SGD(named, lr=0.1, scaling=scaling, backend="triton")


def table_bytes(optimizer: Any) -> int:
    """Bytes of device memory that an optimizer holds, without parameters, gradients and state."""
    own = {p.untyped_storage().data_ptr() for group in optimizer.param_groups for p in group["params"]}
    tables = [plan.table for plan in optimizer._plans.plans]
    found: dict[int, int] = {}
    for table in tables:
        _collect(table.cache, found, set())
    return sum(size for address, size in found.items() if address not in own)


def _collect(thing: Any, found: dict[int, int], seen: set[int]) -> None:
    """Storages that can be reached from an object by its items and attributes."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, dict):
        for value in thing.values():
            _collect(value, found, seen)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            _collect(value, found, seen)
    elif type(thing).__module__.startswith("fused_lwlr") and not isinstance(thing, Table):
        for value in vars(thing).values() if hasattr(thing, "__dict__") else ():
            _collect(value, found, seen)


def measure(sizes: list[int], scaling: Any) -> dict[str, float]:
    """Seconds of the first step, which builds the tables, and of later ones; bytes of the tables."""
    optimizer = optimizer_of(sizes, scaling)
    taken = []
    for _ in range(1 + STEPS):
        start = time.perf_counter()
        optimizer.step()
        taken.append(time.perf_counter() - start)
    return {"first": taken[0], "step": statistics.median(taken[1:]), "table_bytes": table_bytes(optimizer)}


def rows() -> Iterator[dict[str, Any]]:
    """Both sweeps: tensors of 64 elements, and 100 tensors that share a number of parameters."""
    # objects that are built or loaded once for all
    measure([64], None)
    for name, scaling in SCALINGS.items():
        for count in TENSORS:
            yield {"over": "tensors", "scaling": name, "n": count, **measure([64] * count, scaling)}
        for numel in PARAMETERS:
            yield {"over": "parameters", "scaling": name, "n": numel, **measure([numel // 100] * 100, scaling)}


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text, in the order of `HEAD`."""
    times = f"{row['first'] * 1e3:.2f}", f"{row['step'] * 1e3:.3f}"
    return [row["over"], row["scaling"], f"{row['n']:,}", *times, f"{row['table_bytes'] / 1e3:,.1f}"]


def main() -> None:
    """Print every row when it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with without_launch():
        for row in rows():
            print(json.dumps(row) if options.json else "  ".join(cells(row)), flush=True)


if __name__ == "__main__":
    main()
