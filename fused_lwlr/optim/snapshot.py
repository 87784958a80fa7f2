"""A snapshot of the tensors that a step depends on, taken before every step and compared with the last one."""

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_lwlr.memory import all_addressable

DTYPE, POINTER = attrgetter("dtype"), Tensor.data_ptr
Form = Callable[[Tensor], Any]
"""Reads a property of a tensor."""
SMALL = 1 << 42
"""Below most addresses. The data pointer of a tensor whose memory was freed is its offset in bytes."""


class Forms(NamedTuple):
    """The forms that gradients must have: a dtype, and number of elements, strides, lazy bits and device of parameters.

    Attributes:
        strides: reads the strides of a tensor, or only whether it is contiguous, where all parameters are.
        expected: pairs of a function that reads a property of a tensor, and its value for each gradient.
    """

    strides: Form
    expected: list[tuple[Form, list[Any]]]


class Snapshot(NamedTuple):
    """Parameters, gradients and state.

    Attributes:
        fixed: address, size and strides of every parameter, the address of every entry of the state, and what the
            caller adds. A plan fits while these are equal.
        present: for each parameter, whether it has a gradient.
        grads: the gradient of each parameter, or None.
        addresses: the data pointer of each gradient, 0 if it is absent or empty; None unless every gradient is a plain
            tensor with the form that it must have.
    """

    fixed: tuple[Any, ...]
    present: list[bool]
    grads: list[Tensor | None]
    addresses: list[int] | None


def forms_of(params: Sequence[Tensor], grad_dtypes: Sequence[torch.dtype] | None = None, *, sliced: bool) -> Forms:
    """Returns the forms that the gradients of parameters must have, by default with the dtypes of the parameters.

    `sliced` says that a parameter is cut into slices, so that its shape matters and not only its elements.
    """
    strides: Form = Tensor.stride if sliced or not all(map(Tensor.is_contiguous, params)) else Tensor.is_contiguous
    read: list[Form] = [Tensor.numel, strides, Tensor.is_neg]
    if any(map(Tensor.is_complex, params)):
        read.append(Tensor.is_conj)
    if torch.cuda.is_available():
        read.append(Tensor.get_device)
    dtypes = list(map(DTYPE, params)) if grad_dtypes is None else list(grad_dtypes)
    return Forms(strides, [(DTYPE, dtypes), *((form, list(map(form, params))) for form in read)])


def take_snapshot(
    params: Sequence[Tensor], grads: list[Tensor | None], entries: Sequence[Tensor], forms: Forms, more: Any = None
) -> Snapshot | None:
    """Returns a snapshot, or None if a tensor has no memory, as a sparse gradient.

    It maps methods of tensors over lists, since it runs in every step. All tensors are local parts, if they are
    sharded. `more` is anything else that plans depend on.
    """
    present = [grad is not None for grad in grads]
    complete = all(present)
    there: list[Any] = grads if complete else [grad for grad in grads if grad is not None]
    try:
        read = POINTER, Tensor.numel, forms.strides
        fixed = (*[list(map(each, params)) for each in read], list(map(POINTER, entries)), more)
        addresses = list(map(POINTER, there))
        matching = set(map(type, there)) <= {Tensor} and all(
            list(map(form, there)) == (expected if complete else list(compress(expected, present)))
            for form, expected in forms.expected
        )
    except (RuntimeError, TypeError):
        # a sparse tensor, or an entry that is not a tensor
        return None
    if min(addresses, default=SMALL) < SMALL and not all_addressable(there):
        return None
    if not complete:
        left = iter(addresses)
        addresses = [next(left) if here else 0 for here in present]
    return Snapshot(fixed, present, grads, addresses if matching else None)
