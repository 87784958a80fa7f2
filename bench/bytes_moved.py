"""Bytes that launches move, by the items that programs work on."""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from bench.without_launch import without_launch


@contextmanager
def recorded() -> Iterator[Counter[str]]:
    """Counts launches, "bytes" from and to memory, and "cached" bytes that a launch reads once more from L2."""
    importlib.import_module("fused_lwlr.kernels.triton")
    real = sys.modules["fused_lwlr.kernels.triton.launch"].launch  # type: ignore[attr-defined]
    counted: Counter[str] = Counter()

    def launch(kernel: Any, items: Any, args: Any, most_programs: Any = None) -> None:
        # before the launch, which changes the set of known norms
        memory, cached = moved(kernel.device_table, kernel.meta, items.cpu().numpy())
        real(kernel, items, args, most_programs)
        counted.update({"launches": int(len(items) > 0), "bytes": memory, "cached": cached})

    with without_launch(launch):
        yield counted


def moved(table: Any, meta: dict[str, Any], items: np.ndarray) -> tuple[int, int]:
    """Returns bytes from and to memory, and bytes from L2, of one launch.

    Args:
        items: the work, int32 [n, 2].
    """
    worked_on = np.isin(np.arange(table.rows), items[:, 0])
    sizes = {name: size * worked_on * (table._addresses[name] != 0) for name, size in table.sizes.items()}
    if "RULE" not in meta:
        read = [sizes[name] for name, dtype in zip(("param", "grad"), meta["DTYPES"], strict=True) if dtype]
        return int(sum(read).sum()), 0
    columns = [name for name, dtype in table.dtypes.items() if dtype is not None and name not in ("grad", "step")]
    write, formula = meta.get("WRITE", True), meta.get("FORMULA")
    memory = sum(int(sizes[name].sum()) * 2 for name in columns) + int(sizes["grad"].sum()) if write else 0
    if formula is None:
        return memory, 0
    first = ["grad", *(name for name in columns if name != "ema")] if meta["TARGET"] == "direction" else ["grad"]
    read = sum(sizes[name] for name in first)
    norms = read.copy()
    if "param" not in first:
        read = read + np.where(table.known, 0, sizes["param"])
    launch: Any = sys.modules["fused_lwlr.kernels.triton.launch"]
    window, tile = launch.sizes_of(table.buffer.device).window, meta["BLOCK"] * meta["PASSES"]
    soon = read_soon(items, table.numel, tile, norms, window)
    cached = int((read * (soon & write)).sum())
    return memory + int(read.sum()) - cached, cached


def read_soon(items: np.ndarray, numel: np.ndarray, tile: int, norms: np.ndarray, window: int) -> np.ndarray:
    """Returns, for each row, whether the bytes read by its norm items are still in L2 when its update items read them.

    This holds if norms read at most twice the window in between. Bytes moved by updates are not counted: they are the
    first to be evicted.

    Args:
        numel: elements of each row.
        tile: elements of an item.
        norms: bytes of each row that its norm items read.
        window: see `Sizes`.
    """
    row, kind, slot = items[:, 0].astype(np.int64), items[:, 1] % 2, items[:, 1] // 2
    counts = -(-numel // tile)
    elements = np.minimum(numel[row] - (slot - (np.cumsum(counts) - counts)[row]) * tile, tile)
    bytes_read = np.where(kind == 0, norms[row], 0) * (elements / np.maximum(numel[row], 1))
    passed = np.cumsum(bytes_read)
    begin, end = np.full(len(numel), np.inf), np.zeros(len(numel))
    np.minimum.at(begin, row[kind == 0], (passed - bytes_read)[kind == 0])
    np.maximum.at(end, row[kind == 1], passed[kind == 1])
    return end - begin <= 2 * window
