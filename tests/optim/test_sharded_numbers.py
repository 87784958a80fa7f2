"""Numbers of sharded layers are uploaded together, from pinned memory."""

from unittest.mock import Mock

import pytest
import torch

from fused_lwlr.kernels.tensors import copy_async_
from fused_lwlr.optim import sharded


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1, 1e-30], [0.1, 1e-30]),
        ([torch.tensor(0.5), 0.1, torch.tensor([2.0], dtype=torch.float64)], [0.5, 0.1, 2.0]),
    ],
)
def test_one_upload(values, expected, monkeypatch):
    uploads = Mock(side_effect=copy_async_)
    monkeypatch.setattr(sharded, "copy_async_", uploads)
    monkeypatch.setattr(torch.Tensor, "to", Mock(side_effect=AssertionError("pageable memory is uploaded")))
    found = sharded.as_tensor(values, torch.zeros(2, dtype=torch.float64))
    assert uploads.call_count == 1
    assert found.dtype == torch.float64
    assert found.tolist() == expected


def test_numbers_on_the_device_stay_there(monkeypatch):
    """This test uses the meta device as a GPU."""
    uploads = Mock(side_effect=copy_async_)
    monkeypatch.setattr(sharded, "copy_async_", uploads)
    like, there = torch.zeros(2, dtype=torch.float64, device="meta"), torch.zeros(1, device="meta")
    found = sharded.as_tensor([0.5, there], like)
    (buffer, host), _ = uploads.call_args
    assert (found.device, found.shape, buffer.device) == (like.device, like.shape, like.device)
    assert host.tolist() == [0.5, 0.0]


def test_memory_of_an_upload_is_pinned():
    device, host = Mock(is_cuda=True), Mock()
    copy_async_(device, host)
    device.copy_.assert_called_once_with(host.pin_memory(), non_blocking=True)
    here = Mock(is_cuda=False)
    copy_async_(here, host)
    here.copy_.assert_called_once_with(host, non_blocking=True)
