"""Steps without kernels, and the bytes that launches move, by the items that programs work on."""

import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from fused_lwlr.kernels.triton.tile import NORM_KNOWN


@contextmanager
def replaced(name: str, other: Any) -> Iterator[Any]:
    """Replaces a function of `launch.py` wherever the Triton backend uses it; yields the original."""
    package = importlib.import_module("fused_lwlr.kernels.triton")
    # the package has functions with the names of some of its modules
    modules = [sys.modules.get(f"{package.__name__}.{file.name}") for file in pkgutil.iter_modules(package.__path__)]
    real = getattr(sys.modules[f"{package.__name__}.launch"], name)
    with ExitStack() as stack:
        for module in modules:
            if getattr(module, name, None) is real:
                stack.enter_context(patch.object(module, name, other))
        yield real


@contextmanager
def without_kernels() -> Iterator[None]:
    """Runs steps without launching or compiling kernels, which on a CPU would take all the time."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    with replaced("launch", nothing), replaced("compile_kernel", lambda *args: nothing):
        yield


@contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Counts launches, their "bytes", and bytes that update items read "again" after norm items."""
    counted: Counter[str] = Counter()

    def launch(kernel: Any, table: Any, *args: Any, **options: Any) -> None:
        # before the launch, which changes the set of known norms
        once, again = moved(table, kernel.meta, kernel.items.cpu().numpy())
        real(kernel, table, *args, **options)
        counted.update({"launches": int(len(kernel.items) > 0), "bytes": once, "again": again})

    with replaced("launch", launch) as real:
        yield counted


def moved(table: Any, meta: dict[str, Any], items: np.ndarray) -> tuple[int, int]:
    """Returns the bytes that one launch reads first and writes, and the bytes that its update items read again.

    Args:
        items: the work, int32 [n, 2].
    """
    worked_on = np.isin(np.arange(table.rows), items[:, 0])
    elements = table.numel * worked_on
    sizes = {name: size * elements * (table._addresses[name] != 0) for name, size in table.itemsizes.items()}
    if "UPDATE" not in meta:
        read = [sizes[name] for name, dtype in zip(("param", "grad"), meta["DTYPES"], strict=True) if dtype]
        return int(sum(read).sum()), 0
    columns = [name for name, dtype in table.dtypes.items() if dtype is not None and name not in ("grad", "step")]
    write, formula = meta.get("WRITE", True), meta.get("FORMULA")
    once = sum(int(sizes[name].sum()) * 2 for name in columns) + int(sizes["grad"].sum()) if write else 0
    if formula is None:
        return once, 0
    first = ["grad", *(name for name in columns if name != "ema")] if meta["TARGET"] == "direction" else ["grad"]
    norms = sum(sizes[name] for name in first)
    if "param" not in first:
        norms = norms + np.where(table._staged_flags & NORM_KNOWN.value, 0, sizes["param"])
    read = int(np.sum(norms))
    return (once, read) if write else (read, 0)
