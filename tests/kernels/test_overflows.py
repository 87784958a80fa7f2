"""Integer overflows are reported, so that kernel tests find the unintended ones."""

import pytest
import torch
import triton
import triton.language as tl

from fused_lwlr.kernels.triton.rounding import wrapping_add, wrapping_mul

LARGEST = 2**31 - 1
pytestmark = pytest.mark.interpreter


@triton.jit
def arithmetic(x, y, out, HOW: tl.constexpr):
    a, b = tl.load(x), tl.load(y)
    if HOW == "add":
        tl.store(out, a + b)
    elif HOW == "sub":
        tl.store(out, a - b)
    elif HOW == "mul":
        tl.store(out, a * b)
    elif HOW == "wrapping add":
        tl.store(out, wrapping_add(a, b))
    else:
        tl.store(out, wrapping_mul(a, b))


def run(a, b, how):
    x, y, out = (torch.tensor([number], dtype=torch.int32) for number in (a, b, 0))
    arithmetic[(1,)](x, y, out, how)
    return out.item()


@pytest.mark.parametrize(
    ("how", "a", "b"),
    [("add", LARGEST, 1), ("add", -LARGEST, -2), ("sub", -LARGEST, 2), ("sub", LARGEST, -1), ("mul", 2**16, 2**15)],
)
def test_told(how, a, b):
    with pytest.raises(Exception, match=f"int32 overflow in {how}"):
        run(a, b, how)


def test_integers_that_fit_are_not_reported():
    assert run(LARGEST - 1, 1, "add") == LARGEST
    assert run(-LARGEST, 1, "sub") == -LARGEST - 1
    assert run(2**15, 2**15, "mul") == 2**30


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_wrapping_operations_wrap():
    assert run(LARGEST, 1, "wrapping add") == -LARGEST - 1
    assert run(2**16, 2**15, "wrapping mul") == -LARGEST - 1
