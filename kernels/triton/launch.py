"""Launching kernels, and counting what was launched."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from fused_lwlr.kernels.triton.image import Image

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Counters:
    """Launches, and the bytes of rows that they read and wrote, since the last `reset`."""

    launches: int = 0
    bytes: int = 0

    def reset(self) -> None:
        self.launches = self.bytes = 0


counters = Counters()


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on such tensors: on a GPU, or with TRITON_INTERPRET=1 on a CPU."""
    real_dtype = dtype.to_real() if dtype.is_complex else dtype
    # the interpreter follows addresses in the memory of the CPU
    return real_dtype in DTYPES and device.type == ("cpu" if knobs.runtime.interpret else "cuda")


def launch(kernel: Any, image: Image, tiles: Tensor, *args: Any, passes: Sequence[str], **meta: Any) -> None:
    """Run a kernel over a list of tiles, once.

    Args:
        tiles: int32 [n, 2], the (row, index) of each tile.
        args: what the kernel takes after the table.
        passes: a column's name for each time that it is read or written, for the byte count.
        meta: compile-time arguments.
    """
    count = tiles.shape[0]
    if count == 0:
        return
    with torch.cuda.device_of(image.buffer):
        # without contraction to FMA rounding is that of the operations as written, on every device and version
        kernel[(programs(count),)](
            image.addresses, image.floats, tiles, count, image.rows, *args, **meta, enable_fp_fusion=False
        )
    counters.launches += 1
    counters.bytes += sum(image.bytes[column] for column in passes)


def programs(tiles: int) -> int:
    """How many programs share a list of tiles: any number gives the same bits. One for each tile."""
    return tiles
