"""Loops over all tensors of a step in C, compiled where they run by what Triton compiles its own launchers with."""

import subprocess
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from triton.runtime.build import compile_module_from_src

from fused_lwlr.kernels import identity

VERSION = attrgetter("_version")
UNKNOWN = (RuntimeError, BufferError)
"""What torch, and DLPack by its specification, raise for a tensor that cannot be described, such as of some dtypes."""


def identify(tensors: Sequence[Tensor | None], known: object = None, *, objects: bool = False) -> tuple[bytes, object]:
    """Where tensors are, and what they are but for their values.

    Args:
        tensors: of any dtypes and devices; None stands for an absent one.
        known: what an earlier call said that such tensors are.
        objects: whether another object is another tensor, wherever it is; they must live for as long as `known`.

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
            addresses, traits = native.identify(tensors, objects)
            return addresses, known if traits == known else traits
        except UNKNOWN:
            pass
    return identity.identify(tensors, known, objects=objects)


def gradients(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of each parameter; None where there is none."""
    native = _compiled()
    found: list[Tensor | None] = (native or identity).gradients(params)
    return found


def entry_addresses(states: Sequence[dict[str, Any]], names: Sequence[str]) -> bytes:
    """Where the tensors in some dicts are.

    Args:
        states: such as those of parameters in `optimizer.state`.
        names: of the entries.

    Returns:
        addresses, int64 each, of all names in the first dict, then in the next; 0 of what is empty, no tensor, or not
        there.
    """
    native = _compiled()
    if native is not None:
        try:
            found: bytes = native.entry_addresses(states, names)
            return found
        except UNKNOWN:
            pass
    return identity.entry_addresses(states, names)


def version_sum(tensors: Sequence[Tensor]) -> int:
    """The sum of version counters: one moves up whenever its tensor is written to, save through `.data`."""
    native = _compiled()
    total: int = sum(map(VERSION, tensors)) if native is None else native.version_sum(tensors)
    return total


@cache
def _compiled() -> Any:
    """The module; None where there is no compiler, or torch has no such functions: 2.8 has not, 2.11 has."""
    if not hasattr(Tensor, "__dlpack_c_exchange_api__"):
        return None
    source = Path(__file__).with_suffix(".c").read_text()
    try:
        module = compile_module_from_src(source, "fused_lwlr_native")
        module.bind(Tensor, nn.Parameter)
    except (RuntimeError, ImportError, OSError, subprocess.CalledProcessError):
        return None
    return module
