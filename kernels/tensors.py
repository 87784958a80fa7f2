"""Small operations on tensors that both backends and the optimizers use."""

import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch._compile import _disable_dynamo  # unlike torch.compiler.disable, imports torch._dynamo at the first call

PLAIN = (nn.Parameter, Tensor)
"""Types of tensors that are no wrappers and not distributed; the type is checked first, since this is fast."""
HALF = (torch.bfloat16, torch.float16)
DOUBLE = (torch.float64, torch.complex128)
Function = TypeVar("Function", bound=Callable[..., Any])
POINTER = Tensor.data_ptr
"""A function in C: `map` runs no Python code for each tensor."""
MAY_BE_OFFSET = 1 << 42
"""A tensor without memory returns its offset in bytes as its pointer. Below this number, a pointer may be only an
offset. Some builds of Python do have memory there."""
IMPORTING_PROCESS = os.getpid()
"""The process that imported this package. A child process after a fork has another number, and does not have
the threads of its parent. The number is in this module, since a child may be the first to import the compiler."""


def untraced(function: Function) -> Function:
    """Hides a function from torch.compile, which cannot trace tables: its graph breaks at the call."""
    return _disable_dynamo(function)  # type: ignore[return-value]


def to_float32(tensor: Tensor) -> Tensor:
    """Returns a float32 copy of a half-precision tensor, and any other tensor itself."""
    return tensor.float() if tensor.dtype in HALF else tensor


def sum_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of sums: float64 if the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def real(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a complex tensor as pairs of reals: a view, unless it is a lazy conjugate."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the rows of all tensors as one tensor, on the device of the first. A single tensor is not copied."""
    first, *others = tensors
    return torch.cat([first, *(each.to(first.device, non_blocking=True) for each in others)]) if others else first


def copy_async_(target: Tensor, host: Tensor) -> Tensor:
    """Copies a tensor of the host to a tensor on a device, perhaps after this returns."""
    if target.is_cuda:
        # a new block each time: the caching host allocator keeps it until the copy from it is done
        host = host.pin_memory()
    return target.copy_(host, non_blocking=True)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on a device, without waiting for it as `to` and `torch.tensor(..., device=)` do on a GPU."""
    return copy_async_(torch.empty_like(host, device=device), host)


def addresses_of(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """Returns data pointers: 0 for an absent or empty tensor, None for a tensor without its own memory.

    None stands for a sparse tensor, a wrapper subclass (`TwoTensor`, quantized weights), a `FakeTensor`, a meta tensor,
    or a tensor within a `torch.func` transform.
    """
    return [0 if tensor is None or tensor.numel() == 0 else _address(tensor) for tensor in tensors]


def pointers_of(tensors: Sequence[Tensor]) -> Sequence[int | None]:
    """Returns the same as `addresses_of`, in a fraction of the time; for plain, dense tensors."""
    pointers = list(map(POINTER, tensors))
    lowest = min(pointers, default=MAY_BE_OFFSET)
    if lowest == 0 or (lowest < MAY_BE_OFFSET and any(map(Tensor.storage_offset, tensors))):
        return addresses_of(tensors)
    return pointers


def _address(tensor: Tensor) -> int | None:
    try:
        if type(tensor) in PLAIN:
            address = tensor.data_ptr()
        else:
            # `data_ptr` of a FakeTensor warns. Plain tensors skip this block, since leaving it makes Python repeat
            # warnings that it has shown
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                address = tensor.data_ptr()
    except RuntimeError:
        return None
    # the data pointer of a tensor without memory is its offset
    return address if address != tensor.storage_offset() * tensor.element_size() else None


def tensor_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Returns a function that takes the same number of tensors. It returns True if all of them have the forms of these.

    A form is type, dtype, device, shape, strides, lazy bits and `requires_grad`. The function keeps no tensor. It also
    returns False if inference mode is on now and was off, or the other way round, and may return False for equal forms,
    for example under autocast. A model compiled by `torch.compile` checks its arguments in this way.
    """
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check
