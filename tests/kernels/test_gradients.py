"""Gradients that a table accepts: their addresses, and whether others are present or have other forms."""

import pytest
import torch
from lazy import negated
from torch.nn import Parameter

from fused_lwlr.kernels import Table

SHAPES = [(3, 4), (5,), (), (4, 4)]


def made():
    """Four parameters, three of them with a gradient, whose table has seen other gradients before."""
    params = [torch.ones(shape) for shape in SHAPES]
    grads = [torch.ones_like(param) for param in params]
    grads[2] = None
    table = Table({"param": params, "grad": grads})
    again = [None if grad is None else grad.clone() for grad in grads]
    assert table.accept_gradients(again)
    return table, again


class Tagged(torch.Tensor):
    """A tensor of another class."""


ACCEPTED = {
    "as before": (1, lambda: torch.ones(5), True),
    "gone": (1, lambda: None, False),
    "one more": (2, lambda: torch.ones(()), False),
    "part of other memory": (1, lambda: torch.ones(9)[3:8], True),
    "strides": (3, lambda: torch.ones(4, 4).T, False),
    "one more with other strides": (2, lambda: torch._neg_view(torch.ones(())), False),
    "expanded": (1, lambda: torch.ones(1).expand(5), False),
    "negative": (1, lambda: negated(torch.ones(5)), False),
    "contiguous and negative": (1, lambda: torch._neg_view(torch.ones(5)), False),
    "parameter": (1, lambda: Parameter(torch.ones(5)), False),
    "class": (1, lambda: torch.ones(5).as_subclass(Tagged), False),
}


def gradients_of(table):
    return table.has_grad.tobytes(), table.grad_addresses.tolist(), table.version


@pytest.mark.parametrize("kind", ACCEPTED)
def test_accepted(kind):
    """Presence and addresses are new, and the number tells other forms and other parameters."""
    table, grads = made()
    before, (index, make, same) = table.version, ACCEPTED[kind]
    grads[index] = make()
    assert table.accept_gradients(grads)
    assert [bool(one) for one in table.has_grad] == [grad is not None for grad in grads]
    addresses = [0 if grad is None else grad.data_ptr() for grad in grads]
    assert table.grad_addresses.tolist() == addresses
    assert (table.version == before) is same
    assert all(a is b for a, b in zip(table.columns["grad"], grads, strict=True))
    # the number stays as long as these forms do
    found = gradients_of(table)
    assert table.accept_gradients(grads)
    assert gradients_of(table) == found


def freed(start):
    tensor = torch.ones(8)[start : start + 5]
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = {
    "more elements": lambda: torch.ones(6),
    "as many elements": lambda: torch.ones(5, 1),
    "dtype": lambda: torch.ones(5, dtype=torch.bfloat16),
    "dtype of the same size": lambda: torch.ones(5, dtype=torch.int32),
    "sparse": lambda: torch.ones(5).to_sparse(),
    "meta": lambda: torch.ones(5, device="meta"),
    "meta view": lambda: torch.ones(8, device="meta")[3:],
    "freed": lambda: freed(3),
    "freed from the start": lambda: freed(0),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    """Nothing changes, and it is refused again."""
    table, grads = made()
    before, columns = gradients_of(table), table.columns["grad"]
    for _ in range(2):
        assert not table.accept_gradients([grads[0], REFUSED[kind](), *grads[2:]])
        assert gradients_of(table) == before
        assert table.columns["grad"] is columns
    assert table.accept_gradients(grads)
    assert gradients_of(table) == before


def test_freed_after_it_was_accepted():
    table, grads = made()
    grads[1].untyped_storage().resize_(0)
    assert not table.accept_gradients(grads)


def test_within_a_transform():
    """A gradient that is there for a transform only has no memory."""
    table, grads = made()
    accepted = []

    def of(grad):
        accepted.append(table.accept_gradients([grads[0], grad, *grads[2:]]))
        return grad

    torch.func.vmap(of)(torch.ones(2, 5))
    assert accepted == [False]


def test_complex_conjugates():
    param = torch.ones(3, dtype=torch.complex64)
    table, numbers = Table({"param": [param], "grad": [param.clone()]}), []
    for grad in (param.clone(), param.clone(), param.conj(), param.conj()):
        assert table.accept_gradients([grad])
        numbers.append(table.version)
    assert numbers == [1, 1, 2, 2]


def test_empty_tensors():
    param = torch.ones(8)[8:]
    table = Table({"param": [param], "grad": [param.clone()]})
    assert table.accept_gradients([torch.ones(0)])
    assert table.accept_gradients([None])


def test_gradients_may_have_a_dtype_of_their_own():
    """The dtype of the first ones, not the dtype of the parameter."""
    table = Table({"param": [torch.ones(5)], "grad": [torch.ones(5, dtype=torch.bfloat16)]})
    for _ in range(2):
        assert table.accept_gradients([torch.ones(5, dtype=torch.bfloat16)])
        assert not table.accept_gradients([torch.ones(5)])
        assert table.accept_gradients([None])
        # an absent gradient keeps the dtype of gradients, and does not take the dtype of its parameter
        assert not table.accept_gradients([torch.ones(5)])
