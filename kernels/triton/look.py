"""Compares parameters, gradients and state with what they were in the step before, in C where possible.

The C code is compiled at the first use. `docs/private-names.md` lists the private names of torch that it uses. A
self-test at load describes a few known tensors. If a description is wrong, or nothing compiles,
`fused_lwlr.kernels.look` does the same in Python, and a warning says so.
"""

import ctypes
import sysconfig
import warnings
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr.kernels import look
from fused_lwlr.kernels.c_library import load_library

GETTERS = (
    "layout",
    "dtype",
    "device_type",
    "device_index",
    "data_ptr",
    "storage_offset",
    "numel",
    "dim",
    "sizes",
    "strides",
)
"""torch's C functions that describe a tensor, in the order of `torch` in look.c."""
ERRORS = (AttributeError, ImportError, OSError, RuntimeError, ValueError)
"""Raised where the C code does not compile, does not load, or fails its self-test."""
Known = tuple[Tensor, int, int, list[tuple[int, int]]]
"""A tensor, the number of its dtype in C++, its lazy bits, and the size and stride of each dimension."""


def look_at(params: Sequence[Tensor], states: Mapping[Any, Any], names: Sequence[str]) -> Any:
    """Returns a `fused_lwlr.kernels.look.Look`, or an object in C with the same method.

    Raises:
        RuntimeError: a parameter or an entry has elements but no memory.
    """
    # the C code reads dicts only
    module = _compiled() if isinstance(states, dict) and _is_plain(torch.empty(0, device="cpu")) else None
    if module is not None:
        try:
            return module.Look(tuple(params), states, tuple(names))
        except RuntimeError:
            pass
    return look.look_at(params, states, names)


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether tensors made now have values, as the self-test needs: not in a FakeTensorMode."""
    return type(tensor) is Tensor


@cache
def _compiled() -> Any:
    """Returns the module in C, or None: without a warning if this torch lacks a function, as torch 2.8 does."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        functions = [getattr(library, f"aoti_torch_get_{name}", None) for name in GETTERS]
        addresses = array("Q", [ctypes.cast(it, ctypes.c_void_p).value or 0 for it in functions if it is not None])
        if len(addresses) < len(functions):
            return None
        source = Path(__file__).with_name("look.c").read_text()
        # the default scheme of Debian names a folder without headers
        flags = ["-O3", f"-I{sysconfig.get_path('include', 'posix_prefix')}"]
        key = f"{source} {sysconfig.get_config_var('EXT_SUFFIX')}"
        module = load_library("fused_lwlr_look", lambda: source, flags, key, _imported)
        known = _known_tensors()
        offset = _handle_offset(known[0][0])
        # before any C code follows an address from there
        if any(ctypes.c_uint64.from_address(id(tensor) + offset).value != tensor._cdata for tensor, *_ in known):
            raise ImportError("a Python tensor does not hold its at::Tensor where expected")
        module.bind(Tensor, nn.Parameter, addresses, offset)
        _self_test(module, known)
    except ERRORS as error:
        warnings.warn(
            f"fused_lwlr could not build its part in C, so that its steps take longer on the host: {error!r}. "
            "Triton's kernels need a C compiler and the headers of Python, too: install these",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return module


def _imported(path: str) -> Any:
    """Returns the extension module in a file."""
    loader = ExtensionFileLoader("fused_lwlr_look", path)
    module = module_from_spec(ModuleSpec(loader.name, loader, origin=path))
    loader.exec_module(module)
    return module


def _handle_offset(tensor: Tensor) -> int:
    """Returns the offset of the at::Tensor in a Python tensor: it consists of the address that `_cdata` returns.

    Raises:
        ValueError: there is no such word.
    """
    words = array("Q", ctypes.string_at(id(tensor), Tensor.__basicsize__ // 8 * 8))
    return 8 * words.index(tensor._cdata)


def _self_test(module: Any, known: list[Known]) -> None:
    """Describe known tensors in C.

    Raises:
        ImportError: a description is wrong.
    """
    for tensor, dtype, lazy, dims in known:
        expected = [tensor.data_ptr(), len(dims), dtype, 0, -1, lazy, *(number for pair in dims for number in pair)]
        found = list(memoryview(module.describe(tensor)).cast("q"))
        if found != expected:
            raise ImportError(f"the C code describes a tensor as {found}, not as {expected}")


def _known_tensors() -> list[Known]:
    """Returns tensors on the CPU and their descriptions."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu")

    lazy = zeros(3, 1, dtype=torch.complex64).conj()
    return [
        (zeros(3, 4, dtype=torch.float32), 6, 0, [(3, 4), (4, 1)]),
        (zeros(5, 6, dtype=torch.bfloat16)[1:, 2:5].T, 15, 0, [(3, 1), (4, 6)]),
        (zeros(0, 3, dtype=torch.float16), 5, 0, [(0, 3), (3, 1)]),
        (zeros(2, 3, dtype=torch.complex64), 9, 0, [(2, 3), (3, 1)]),
        (lazy, 9, 2, [(3, 1), (1, 1)]),
        (lazy.imag, 6, 1, [(3, 2), (1, 1)]),
        (nn.Parameter(zeros(7, dtype=torch.float64)), 7, 0, [(7, 1)]),
        (zeros(dtype=torch.int64), 4, 0, []),
    ]
