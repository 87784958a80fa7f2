"""Copies from the host that do not wait for the device."""

from torch import Tensor


def upload(device: Tensor, host: Tensor) -> Tensor:
    """Copies to the device, perhaps after this returns."""
    if device.is_cuda:
        # a new block each time: the caching host allocator keeps it until the copy from it is done
        host = host.pin_memory()
    return device.copy_(host, non_blocking=True)
