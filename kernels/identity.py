"""Whether tensors are what they were in the last step: asked of all of them before every step, so it must be quick."""

import warnings
from array import array
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

FACTS = attrgetter("dtype", "device", "shape", "layout")


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
    if not isinstance(known, Traits) or not known.hold(tensors):
        known = Traits(tensors)
    return _addresses(tensors), known


class Traits:
    """What tensors are, but for their addresses and values."""

    def __init__(self, tensors: Sequence[Tensor | None]):
        there = [t for t in tensors if t is not None]
        facts = list(map(FACTS, there))
        if any(layout is not torch.strided for *_, layout in facts):
            raise RuntimeError("a sparse tensor has neither strides nor an address")
        self._present = [t is not None for t in tensors]
        self._count = len(there)
        self._facts = [facts, [*map(Tensor.stride, there)], [*map(Tensor.is_conj, there), *map(Tensor.is_neg, there)]]
        self._guard = _guard(there)

    def hold(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether other tensors are the same in all of this."""
        there: Sequence[Any] = tensors
        if not all(self._present):
            if [t is not None for t in tensors] != self._present:
                return False
            there = [t for t in tensors if t is not None]
        if len(there) != self._count:
            return False
        # None, too, is not what the guard looks for
        if self._guard is not None and self._guard.check(*there):
            return True
        # the guard is stricter than we are: it looks at requires_grad, autocast and the like
        other = Traits(tensors)
        if (other._present, other._facts) != (self._present, self._facts):
            return False
        self._guard = other._guard
        return True


def _guard(tensors: list[Tensor]) -> Any:
    """What checks all of this in one call; None if this PyTorch has it not: it is not public, and saves time only."""
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


class Watch:
    """Notices what became of parameters, their gradients and their state since it was made: see `watch`."""

    def __init__(self, params: Sequence[Tensor], states: dict[Any, dict[str, Any]], names: Sequence[str]):
        self._objects = list(map(id, params))
        self._where, self._what = identify(params)
        self._names = names
        self._state = self._entries(states)
        _require_addresses(params, self._where)
        self._grads: object = None
        self._present = b""
        self._alike = False

    def look(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None] | None,
        states: dict[Any, dict[str, Any]],
        count_versions: bool,
    ) -> tuple[bytes, Sequence[Tensor], bytes | None, int | None] | None:
        """Look again.

        Args:
            params, states: what there is in the place of what there was.
            grads: those of the parameters; None to ask each for its own.
            count_versions: whether to add up version counters.

        Returns:
            None if a parameter is another object or elsewhere, or an entry is elsewhere. Else, for each parameter, one
            byte that says whether it has a gradient; the gradients that there are; their addresses, int64 each, if all
            go with their parameters: plain tensors of the same dtype, device, shape and strides (of a single
            element any will do); and the sum of the version counters of the parameters that have one, if they are
            counted.

        Raises:
            RuntimeError: there is something that has no address.
        """
        if grads is None:
            grads = [param.grad for param in params]
        if list(map(id, params)) != self._objects or len(grads) != len(params):
            return None
        where, what = identify(params, self._what)
        if what is not self._what or where != self._where or self._entries(states) != self._state:
            return None
        present = bytes([grad is not None for grad in grads])
        there: Any = [*compress(grads, present)]
        stepped = [*compress(params, present)]
        addresses, traits = identify(there, self._grads)
        _require_addresses(there, addresses)
        if traits is not self._grads or present != self._present:
            self._alike = all(map(_alike, there, stepped))
            self._grads, self._present = traits, present
        alike = self._alike and {*map(type, there)} <= {Tensor}
        versions = sum(param._version for param in stepped) if count_versions else None
        return present, there, addresses if alike else None, versions

    def _entries(self, states: dict[Any, dict[str, Any]]) -> bytes:
        dicts = [state if isinstance(state, dict) else {} for state in states.values()]
        found = [state.get(name) for state in dicts for name in self._names]
        entries = [entry if isinstance(entry, Tensor) else None for entry in found]
        addresses = _addresses(entries)
        _require_addresses(entries, addresses)
        return addresses


def _alike(grad: Tensor, param: Tensor) -> bool:
    """Whether a gradient goes with its parameter as almost all do."""
    lazy = (grad.is_conj(), grad.is_neg()) != (param.is_conj(), param.is_neg())
    return FACTS(grad) == FACTS(param) and not lazy and agree(grad, param.stride())


def agree(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides, of single elements any."""
    found = tensor.stride()
    return found == strides or all(a == b or size == 1 for size, a, b in zip(tensor.shape, found, strides, strict=True))


def watch(params: Sequence[Tensor], states: dict[Any, dict[str, Any]], names: Sequence[str]) -> Any:
    """A `Watch` over parameters, their gradients and their state.

    Args:
        params: they must live for as long as the watch.
        states: such as `optimizer.state`.
        names: of the entries that matter; what is no tensor or not there is at the address 0.

    Raises:
        RuntimeError: there is something that has no address.
    """
    return Watch(params, states, names)


def _addresses(tensors: Sequence[Tensor | None]) -> bytes:
    try:
        return array("q", map(Tensor.data_ptr, tensors)).tobytes()  # type: ignore[arg-type]
    except (TypeError, RuntimeError, Warning):
        return array("q", map(_address, tensors)).tobytes()


def _address(tensor: Tensor | None) -> int:
    """The data pointer of a tensor; 0 if it is absent or has none."""
    if tensor is None:
        return 0
    try:
        with warnings.catch_warnings():
            # FakeTensor warns that it has no data pointer
            warnings.simplefilter("ignore")
            address, offset = tensor.data_ptr(), int(tensor.storage_offset()) * tensor.element_size()
            return 0 if address == offset else address
    except RuntimeError:
        # torch.func transforms wrap tensors that have no data pointer either
        return 0


def _require_addresses(tensors: Sequence[Tensor | None], addresses: bytes) -> None:
    """Raises RuntimeError if a tensor has elements but no memory, so that its address is its offset, or 0."""
    for address, tensor in zip(memoryview(addresses).cast("q"), tensors, strict=True):
        if tensor is not None and tensor.numel() > 0 and address == tensor.storage_offset() * tensor.element_size():
            raise RuntimeError("a tensor has elements but no data pointer")


def kinds(tensors: Sequence[Any]) -> list[Any]:
    """What tensors of one column of a table have to keep: dtype, device and shape of each, None of what is absent."""
    return [None if t is None else (t.dtype, t.device, t.shape) for t in tensors]
