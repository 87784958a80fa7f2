"""Snapshots of parameters, gradients and state: every change that needs a new plan is noticed, and no other."""

from types import SimpleNamespace

import pytest
import torch
from lazy import negated
from torch.nn import Parameter

from fused_lwlr.optim.snapshot import forms_of, take_snapshot

SHAPES = [(3, 4), (5,), (), (4, 4)]


def made():
    """Four parameters, three of them with a gradient, and two entries of state."""
    params = [Parameter(torch.ones(shape)) for shape in SHAPES]
    for i in (0, 1, 3):
        params[i].grad = torch.ones_like(params[i])
    return SimpleNamespace(
        params=params, entries=[torch.ones(3, 4), torch.ones(5)], forms=forms_of(params, sliced=False)
    )


def take(it):
    return take_snapshot(it.params, [param.grad for param in it.params], it.entries, it.forms)


def set_data(tensor, data):
    tensor.data = data


NOTICED = {
    "nothing": (lambda it: None, False),
    "parameter elsewhere": (lambda it: set_data(it.params[0], torch.ones(3, 4)), True),
    "parameter as another view": (lambda it: set_data(it.params[3], it.params[3].data.T), True),
    "values": (lambda it: [param.data.mul_(2) for param in it.params], False),
    "gradient elsewhere": (lambda it: setattr(it.params[0], "grad", torch.ones(3, 4)), False),
    "gradient gone": (lambda it: setattr(it.params[0], "grad", None), False),
    "entry elsewhere": (lambda it: it.entries.__setitem__(0, torch.ones(3, 4)), True),
    "entry moved": (lambda it: set_data(it.entries[0], torch.ones(3, 4)), True),
    "entry gone": (lambda it: it.entries.pop(), True),
    "another object of an entry": (lambda it: it.entries.__setitem__(0, it.entries[0].detach()), False),
}


@pytest.mark.parametrize("edit", NOTICED)
def test_changes_that_need_a_new_plan(edit):
    it = made()
    before, (apply, noticed) = take(it), NOTICED[edit]
    # memory that is replaced must stay, so that nothing new takes its address
    kept = [*(param.data for param in it.params), *it.entries, *(entry.data for entry in it.entries)]
    apply(it)
    assert (take(it).fixed != before.fixed) is noticed
    del kept


class Tagged(torch.Tensor):
    """A tensor of another class."""


GRADIENTS = {
    "as the parameter": (1, lambda: torch.ones(5), True),
    "none": (1, lambda: None, True),
    "strides": (3, lambda: torch.ones(4, 4).T, False),
    "expanded": (1, lambda: torch.ones(1).expand(5), False),
    "more elements": (1, lambda: torch.ones(6), False),
    "dtype": (1, lambda: torch.ones(5, dtype=torch.bfloat16), False),
    "dtype of the same size": (1, lambda: torch.ones(5, dtype=torch.int32), False),
    "negative": (1, lambda: negated(torch.ones(5)), False),
    "contiguous and negative": (1, lambda: torch._neg_view(torch.ones(5)), False),
    "parameter": (1, lambda: Parameter(torch.ones(5)), False),
    "class": (1, lambda: torch.ones(5).as_subclass(Tagged), False),
    "part of other memory": (1, lambda: torch.ones(9)[3:8], True),
}


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients(kind, sliced):
    """Presence, address and form; the fixed part is not affected."""
    it = made()
    it.forms = forms_of(it.params, sliced=sliced)
    before = take(it)
    place, make, matching = GRADIENTS[kind]
    grads = [param.grad for param in it.params]
    grads[place] = make()
    found = take_snapshot(it.params, list(grads), it.entries, it.forms)
    assert found.fixed == before.fixed
    assert found.present == [grad is not None for grad in grads]
    addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
    assert found.addresses == (addresses if matching else None)
    assert all(a is b for a, b in zip(found.grads, grads, strict=True))


def test_complex_conjugates():
    params = [Parameter(torch.ones(3, dtype=torch.complex64))]
    forms = forms_of(params, sliced=False)
    for grad, matching in ((torch.ones(3, dtype=torch.complex64), True), (params[0].detach().conj(), False)):
        assert take_snapshot(params, [grad], [], forms).addresses == ([grad.data_ptr()] if matching else None)


def freed(start):
    tensor = torch.ones(8)[start:]
    tensor.untyped_storage().resize_(0)
    return tensor


NO_MEMORY = {
    "sparse": lambda: torch.ones(5).to_sparse(),
    "meta": lambda: torch.ones(5, device="meta"),
    "meta view": lambda: torch.ones(8, device="meta")[3:],
    "freed": lambda: freed(3),
    "freed from the start": lambda: freed(0),
}


@pytest.mark.parametrize("kind", NO_MEMORY)
def test_gradients_without_memory(kind):
    it = made()
    assert take_snapshot(it.params, [None, NO_MEMORY[kind](), None, None], it.entries, it.forms) is None


def test_entries_that_are_no_tensors():
    it = made()
    it.entries[0] = 2.0
    assert take(it) is None


def test_empty_tensors():
    params = [Parameter(torch.ones(8)[8:])]
    found = take_snapshot(params, [params[0].detach()], [], forms_of(params, sliced=False))
    assert found.addresses == [params[0].data_ptr()]
    assert take_snapshot([], [], [], forms_of([], sliced=False)).present == []


def test_gradients_may_have_their_own_dtypes():
    """Each gradient must have the dtype that is expected of it, not the dtype of its parameter."""
    params = [Parameter(torch.ones(5)), Parameter(torch.ones(3))]
    forms = forms_of(params, [torch.bfloat16, torch.float32], sliced=False)
    half, single = torch.ones(5, dtype=torch.bfloat16), torch.ones(3)
    for grads, matching in (
        ([half, single], True), ([half, None], True), ([half.float(), single], False), ([half, single.half()], False),
    ):  # fmt: skip
        assert (take_snapshot(params, grads, [], forms).addresses is not None) is matching
