"""A snapshot of the tensors that a step depends on, taken before every step and compared with the last one."""

from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_, not_
from typing import Any, NamedTuple

from torch import Tensor

from fused_lwlr.memory import all_addressable

DTYPE = attrgetter("dtype")
Form = Callable[[Tensor], Any]
"""Reads a property of a tensor."""
SMALL = 1 << 42
"""Below most addresses. The data pointer of a tensor whose memory was freed is its offset in bytes."""


class Snapshot(NamedTuple):
    """Parameters, gradients and state.

    Attributes:
        fixed: the address and the form of every parameter, and the address of every entry of the state. A plan fits as
            long as they are equal.
        present: for each parameter, whether it has a gradient.
        grads: the gradient of each parameter, or None.
        addresses: the data pointer of each gradient; 0 if it is absent or empty.
        matching: whether every gradient is a plain tensor with the form of its parameter.
    """

    fixed: tuple[Any, ...]
    present: list[bool]
    grads: list[Tensor | None]
    addresses: list[int]
    matching: bool


def forms_of(params: Sequence[Tensor], *, sliced: bool) -> tuple[Form, ...]:
    """Returns the properties by which two tensors have the same form.

    These are the number of elements, dtype, strides, lazy bits and device. Where all parameters are contiguous and none
    is cut into slices, contiguity takes the place of strides.

    Args:
        params: the parameters, local parts if they are sharded.
        sliced: whether any parameter is cut into slices.
    """
    strides: Form = Tensor.stride if sliced or not all(map(Tensor.is_contiguous, params)) else Tensor.is_contiguous
    found: tuple[Form, ...] = Tensor.numel, DTYPE, strides, Tensor.is_neg, Tensor.get_device
    return (*found, Tensor.is_conj) if any(map(Tensor.is_complex, params)) else found


def take_snapshot(
    params: Sequence[Tensor], grads: list[Tensor | None], entries: Sequence[Tensor], forms: Sequence[Form]
) -> Snapshot | None:
    """Returns a snapshot, or None if a tensor has no memory, as a sparse gradient.

    It maps methods of tensors over lists, since it runs in every step.

    Args:
        params, grads: parameters, and the gradient of each; local parts, if they are sharded.
        entries: the entries of the state.
        forms: see `forms_of`.
    """
    present = list(map(not_, map(is_, grads, repeat(None))))
    there: list[Any] = grads if all(present) else [grad for grad in grads if grad is not None]
    count, tensors = len(params), [*params, *there]
    try:
        pointers = list(map(Tensor.data_ptr, [*tensors, *entries]))
        found = [list(map(form, tensors)) for form in forms]
    except (RuntimeError, TypeError):
        # a sparse tensor, or an entry that is not a tensor
        return None
    addresses = pointers[count : len(tensors)]
    if min(addresses, default=SMALL) < SMALL and not all_addressable(there):
        return None
    fixed = pointers[:count], pointers[len(tensors) :], [form[:count] for form in found]
    if len(there) == count:
        matching = all(form[count:] == form[:count] for form in found)
    else:
        matching = all(form[count:] == list(compress(form, present)) for form in found)
        left = iter(addresses)
        addresses = [next(left) if here else 0 for here in present]
    return Snapshot(fixed, present, grads, addresses, matching and set(map(type, there)) <= {Tensor})
