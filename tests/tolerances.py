"""Tolerances between two correct results. Values in these tests are drawn from [-1, 1] and stay below 2."""

import torch
from torch import Tensor
from torch.testing import assert_close

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}

TOLERANCE = {
    # four operations on numbers below 2; one side contracts some of them to a fused multiply-add: half an
    # ulp of 2, that is one EPS, for each; the relative part is for sums of squares and the like, above 2
    torch.float32: {"rtol": 2 * EPS[torch.float32], "atol": 4 * EPS[torch.float32]},
    # computed in float32 and rounded once: one ulp if the two sides round a tie differently
    torch.bfloat16: {"rtol": EPS[torch.bfloat16], "atol": 4 * EPS[torch.float32]},
    torch.float16: {"rtol": EPS[torch.float16], "atol": 4 * EPS[torch.float32]},
    torch.float64: {"rtol": 2 * EPS[torch.float64], "atol": 4 * EPS[torch.float64]},
}

# times the sum of the magnitudes of the terms: 16 passes over a tile and a tree of 10 levels round 27 times by
# half an EPS, in any order; sums over tiles are in double precision
STATISTICS = 16 * EPS[torch.float32]


def close(actual: Tensor, expected: Tensor, steps: int = 1) -> None:
    """Equal within the tolerance of the dtype; errors of successive steps add up."""
    if _equal(actual, expected):
        return
    dtype = actual.dtype.to_real() if actual.dtype.is_complex else actual.dtype
    tolerance = TOLERANCE[dtype]
    assert_close(actual, expected, rtol=tolerance["rtol"], atol=tolerance["atol"] * steps, equal_nan=True)


def same_on_cpu(actual: Tensor, expected: Tensor, steps: int = 1) -> None:
    """Equal bit for bit on a CPU, and close on a GPU, where the two sides round the same formula in another order."""
    if actual.is_cpu:
        same(actual, expected)
    else:
        close(actual, expected, steps)


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit."""
    if not _equal(actual, expected):
        assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def _equal(actual: Tensor, expected: Tensor) -> bool:
    """Whether `assert_close` would find no difference at all; this takes a tenth of its time."""
    alike = (actual.dtype, actual.device, actual.layout) == (expected.dtype, expected.device, expected.layout)
    return alike and torch.equal(actual, expected)
