"""Loops over all tensors of a step in C, compiled where they run by what Triton compiles its own launchers with."""

import ctypes
import subprocess
import warnings
from array import array
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from triton.runtime.build import compile_module_from_src

from fused_lwlr.kernels import identity

SOURCES = ("tensors.c", "watch.c", "native.c")
VERSION = attrgetter("_version")
GETTERS = (
    "layout",
    "data_ptr",
    "numel",
    "storage_offset",
    "dim",
    "sizes",
    "strides",
    "dtype",
    "device_type",
    "device_index",
)
"""What torch's functions tell of a tensor, in the order of `shim` in tensors.c."""


def identify(tensors: Sequence[Tensor | None], known: object = None) -> tuple[bytes, object]:
    """Where tensors are, and what they are but for their values.

    Args:
        tensors: of any dtypes and devices; None stands for an absent one.
        known: what an earlier call said that such tensors are.

    Returns:
        addresses, int64 each, 0 of what is absent or empty; and what stands for the dtype, device, shape, strides of
        each and whether its memory holds the conjugate or the negative of what it means: `known` itself if all of that
        is as it was.

    Raises:
        RuntimeError: a tensor is sparse.
    """
    native = _compiled()
    if native is not None:
        try:
            addresses, traits = native.identify(tensors)
            return addresses, known if traits == known else traits
        except RuntimeError:
            pass
    return identity.identify(tensors, known)


def watch(params: Sequence[Tensor], states: dict[Any, dict[str, Any]], names: Sequence[str]) -> Any:
    """A `Watch` over parameters, their gradients and their state.

    Args:
        params: they must live for as long as the watch.
        states: such as `optimizer.state`.
        names: of the entries that matter; what is no tensor or not there is at the address 0.

    Raises:
        RuntimeError: there is something that has no address.
    """
    native = _compiled()
    # the C code reads dicts only
    if native is not None and isinstance(states, dict):
        try:
            return native.Watch(tuple(params), states, tuple(names))
        except RuntimeError:
            pass
    return identity.watch(params, states, names)


def pack(
    rows: list[tuple[Any, ...]], last: tuple[float, ...], shared: tuple[int, ...] = ()
) -> tuple[bytes, tuple[float, ...]] | None:
    """Rows of numbers as float32, one after the other.

    Args:
        last: more numbers that every row ends with.
        shared: columns that are the same in all rows, of which 0 is written instead.

    Returns:
        The rows, and what they share; None if there is something that is neither a float nor an int, or if what should
        be shared is not.
    """
    native = _compiled()
    if native is not None:
        packed: tuple[bytes, tuple[float, ...]] | None = native.pack(rows, last, shared)
        return packed
    if not all(isinstance(number, (float, int)) for row in rows for number in row):
        return None
    singles = [array("f", (*row, *last)) for row in rows]
    for at in shared:
        if len({row[at : at + 1].tobytes() for row in singles}) > 1:
            return None
        for row in singles:
            row[at] = 0.0
    return b"".join(row.tobytes() for row in singles), tuple(float(rows[0][at]) for at in shared)


def version_sum(tensors: Sequence[Tensor]) -> int:
    """The sum of version counters: one moves up whenever its tensor is written to, save through `.data`."""
    native = _compiled()
    total: int = sum(map(VERSION, tensors)) if native is None else native.version_sum(tensors)
    return total


@cache
def _compiled() -> Any:
    """The module; None where torch lacks a function (2.8 does, 2.11 does not) or, with a warning, no build works."""
    library = ctypes.CDLL(torch._C.__file__)
    functions = [getattr(library, f"aoti_torch_get_{name}", None) for name in GETTERS]
    addresses = array("Q", [ctypes.cast(it, ctypes.c_void_p).value or 0 for it in functions if it is not None])
    if len(addresses) < len(functions):
        return None
    # in one, since Triton keeps what it compiled by its text alone
    source = "".join(Path(__file__).with_name(name).read_text() for name in SOURCES)
    try:
        module = compile_module_from_src(source, "fused_lwlr_native")
        module.bind(Tensor, nn.Parameter, addresses, _handle_at(Tensor()))
    except (RuntimeError, ImportError, OSError, ValueError, subprocess.CalledProcessError) as error:
        warnings.warn(
            f"fused_lwlr could not build its part in C, so that its steps take longer on the host: {error!r}. "
            "Triton's kernels need a C compiler and the headers of Python, too: install these",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return module


def _handle_at(tensor: Tensor) -> int:
    """Where in a tensor the at::Tensor of C++ is: it consists of the address that `_cdata` tells.

    Raises:
        ValueError: it is not there.
    """
    words = array("Q", ctypes.string_at(id(tensor), Tensor.__basicsize__ // 8 * 8))
    return 8 * words.index(tensor._cdata)
