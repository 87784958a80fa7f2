"""Launching kernels, and counting what was launched."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from fused_lwlr.kernels.constants import PER_PROCESSOR
from fused_lwlr.kernels.triton.image import Image

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Counters:
    """Launches, and the bytes of rows that they read and wrote, since the last `reset`.

    Attributes:
        bytes: from and to memory.
        cached: read once more by the same launch, so soon that they are still in L2.
    """

    launches: int = 0
    bytes: int = 0
    cached: int = 0

    def reset(self) -> None:
        self.launches = self.bytes = self.cached = 0


counters = Counters()


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on such tensors: on a GPU, or with TRITON_INTERPRET=1 on a CPU."""
    real_dtype = dtype.to_real() if dtype.is_complex else dtype
    # the interpreter follows addresses in the memory of the CPU
    return real_dtype in DTYPES and device.type == ("cpu" if knobs.runtime.interpret else "cuda")


def launch(
    kernel: Any, image: Image, items: Tensor, *args: Any, programs: int, passes: Sequence[str], **meta: Any
) -> None:
    """Run a kernel over a list of items, once.

    Args:
        items: int32 [n, 2], as the kernel reads them.
        args: what the kernel takes after the table.
        programs: how many share the items.
        passes: a column's name for each time that it is read or written, for the byte count.
        meta: compile-time arguments.
    """
    count = items.shape[0]
    if programs == 0:
        return
    with torch.cuda.device_of(image.buffer):
        # without contraction to FMA rounding is that of the operations as written, on every device and version
        kernel[(grid(programs),)](
            image.addresses, image.floats, items, count, image.rows, *args, **meta, enable_fp_fusion=False
        )
    counters.launches += 1
    counters.bytes += sum(int(image.sizes[column].sum()) for column in passes if column in image.sizes)


def grid(programs: int) -> int:
    """How many programs are started: any number gives the same bits."""
    return programs


@cache
def residents(device: torch.device) -> int:
    """About as many programs as a device runs at once."""
    if device.type != "cuda":
        return 1
    return PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
