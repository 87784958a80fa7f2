"""What counts as the same tensors: with PyTorch's own check of many at once, and without it."""

import pytest
import torch

from fused_lwlr.kernels import identity
from fused_lwlr.kernels.identity import Layout, addresses


def tensors():
    return [torch.ones(3, 4), torch.ones(5), torch.ones(()), torch.ones(2, 2, dtype=torch.complex64)]


OTHERS = {
    "values": (1, torch.zeros(5), True),
    "requires grad": (1, torch.ones(5, requires_grad=True), True),
    "shape": (0, torch.ones(4, 3), False),
    "longer": (1, torch.ones(6), False),
    "strides": (0, torch.ones(4, 3).T, False),
    "stride": (1, torch.ones(10)[::2], False),
    "expanded": (1, torch.ones(1).expand(5), False),
    "dtype": (1, torch.ones(5, dtype=torch.bfloat16), False),
    "device": (1, torch.ones(5, device="meta"), False),
    "negative": (1, torch._neg_view(torch.ones(5)), False),
    "conjugate": (3, torch.ones(2, 2, dtype=torch.complex64).conj(), False),
    "sparse": (0, torch.ones(3, 4).to_sparse(), False),
    "absent": (2, None, False),
}


@pytest.fixture(params=["all at once", "one by one"])
def layout_of(request, monkeypatch):
    """`Layout`, in a PyTorch that checks many tensors in one call, and in one that does not."""
    if request.param == "one by one":
        monkeypatch.setattr(identity, "_guard", lambda there: None)
    return Layout


@pytest.mark.parametrize("gap", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_one_tensor_differs(layout_of, other, gap):
    place, replacement, fits = OTHERS[other]
    absent = [None] if gap else []
    layout = layout_of(tensors() + absent)
    changed = [replacement if i == place else t for i, t in enumerate(tensors())] + absent
    assert layout.fits(changed) is fits
    # it goes on to tell
    assert layout.fits(tensors() + absent)
    assert layout.fits(changed) is fits


@pytest.mark.parametrize("count", [3, 5])
def test_another_number_of_tensors(layout_of, count):
    assert not layout_of(tensors()).fits((tensors() * 2)[:count])


def test_surroundings_do_not_matter(layout_of):
    layout = layout_of(tensors())
    with torch.autocast("cpu"):
        assert layout.fits(tensors())
    with torch.inference_mode():
        assert layout.fits(tensors())
        assert not layout.fits([torch.ones(4, 3), *tensors()[1:]])
    assert layout.fits(tensors())


def test_nothing(layout_of):
    assert layout_of([]).fits([])
    assert layout_of([None]).fits([None])
    assert not layout_of([None]).fits([torch.ones(1)])


def test_sparse_tensors_have_none():
    with pytest.raises(RuntimeError, match="sparse"):
        Layout([torch.ones(3).to_sparse()])


def test_addresses():
    memory = torch.ones(8)
    assert addresses([memory, memory[2:], torch.ones(0)]) == [memory.data_ptr(), memory.data_ptr() + 8, 0]
    assert addresses([None, memory]) == [0, memory.data_ptr()]
    assert addresses([]) == []
