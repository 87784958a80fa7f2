"""Launching kernels, and counting what was launched."""

from collections.abc import Callable, Sequence
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


class Bound:
    """A kernel, and what stays the same from launch to launch: its table's image, its items, how it is compiled.

    Args:
        kernel: takes addresses, floats, items, their number and that of the rows, then what differs between launches,
            and last what it is compiled for.
        items: int32 [n, 2], as the kernel reads them.
        programs: how many share the items.
        passes: a column's name for each time that it is read or written, for the byte count.
        reads: says of what is read besides, how many bytes come from memory, and how many from L2.
        registers: of a thread at most; None leaves them to the compiler, as AMD's has it in any case.
        meta: compile-time arguments.
    """

    def __init__(
        self,
        kernel: Any,
        image: Image,
        items: Tensor,
        *,
        programs: int,
        passes: Sequence[str],
        reads: Callable[[], tuple[int, int]] | None = None,
        registers: int | None = None,
        **meta: Any,
    ):
        self.image, self.passes, self.reads, self.programs = image, tuple(passes), reads, programs
        self._kernel, self._meta = kernel, meta
        self._options = {"maxnreg": registers} if registers is not None and torch.version.hip is None else {}
        self._fixed = (image.addresses, image.floats, items, items.shape[0], image.rows)
        # for what is not on a GPU it does nothing
        self._device = torch.cuda.device(image.buffer.device.index if image.buffer.is_cuda else -1)
        self._runners: dict[tuple[type, ...], Callable[..., None]] = {}
        self._runner: Callable[..., None] | None = None

    def ready(self, args: Sequence[Any]) -> None:
        """Compile and load the kernel for such arguments, so that a launch can no longer fail for want of that."""
        if not self.programs:
            return
        kinds = tuple(map(type, args))
        if kinds not in self._runners:
            with self._device:
                self._runners[kinds] = self._interpreted() if knobs.runtime.interpret else self._compiled(args)
        self._runner = self._runners[kinds]

    def run(self, args: Sequence[Any]) -> None:
        """Run the kernel once, with arguments such as it was made ready for last."""
        if self._runner is not None:
            with self._device:
                self._runner(*self._fixed, *args)

    def _interpreted(self) -> Callable[..., None]:
        # without self, which holds what is returned: nothing is to wait for the collector of cycles
        kernel, programs, meta = self._kernel, self.programs, self._meta

        def run(*args: Any) -> None:
            kernel[(grid(programs),)](*args, **meta)

        return run

    def _compiled(self, args: Sequence[Any]) -> Callable[..., None]:
        # without contraction to FMA rounding is that of the operations as written, on every device and version
        size, fixed = (grid(self.programs), 1, 1), (*self._fixed, *args)
        compiled = self._kernel.warmup(*fixed, **self._meta, grid=size, enable_fp_fusion=False, **self._options)
        # a compiled kernel takes all arguments by position, and does nothing with those that it was compiled for
        constants = [self._meta[name] for name in self._kernel.arg_names[len(fixed) :]]
        launcher = compiled[size]

        def run(*args: Any) -> None:
            launcher(*args, *constants)

        return run


def launch(bound: Bound, args: Sequence[Any]) -> None:
    """Run a kernel that is ready, and count it.

    Args:
        args: what it takes after the items.
    """
    bound.run(args)
    if bound.programs:
        counters.launches += 1
        counters.bytes += bound.image.bytes_of(bound.passes)
        if bound.reads is not None:
            read, cached = bound.reads()
            counters.bytes += read
            counters.cached += cached


def grid(programs: int) -> int:
    """How many programs are started: any number gives the same bits."""
    return programs


@cache
def residents(device: torch.device) -> int:
    """About as many programs as a device runs at once."""
    if device.type != "cuda":
        return 1
    return PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
