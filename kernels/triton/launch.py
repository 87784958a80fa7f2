"""Launching kernels, and counting what was launched."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from fused_lwlr.kernels.constants import PER_PROCESSOR
from fused_lwlr.kernels.triton.device_table import DeviceTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


counters: Counter[str] = Counter()
"""Launches since the last `counters.clear()`, the bytes of rows that they read from and wrote to memory ("bytes"), and
those that they read once more from L2 ("cached")."""


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on such tensors: on a GPU, or with TRITON_INTERPRET=1 on a CPU."""
    real_dtype = dtype.to_real() if dtype.is_complex else dtype
    # the interpreter follows addresses in the memory of the CPU
    return real_dtype in DTYPES and device.type == ("cpu" if knobs.runtime.interpret else "cuda")


class BoundKernel:
    """A kernel with what stays the same from launch to launch: its device table, and how it is compiled.

    Args:
        kernel: takes addresses, floats, items, the number of items and of rows, then what differs between launches, and
            last the compile-time arguments.
        device_table: the device table of addresses, floats and rows.
        passes: the name of a column for each time that it is read or written, for the byte count.
        reads: returns the bytes that are read besides, from memory and from L2.
        most_programs: the number of programs at most; by default one for each item.
        registers: of a thread at most; by default the compiler chooses, as it always does on AMD.
        meta: compile-time arguments.
    """

    def __init__(
        self,
        kernel: Any,
        device_table: DeviceTable,
        passes: Sequence[str],
        *,
        reads: Callable[[], tuple[int, int]] | None = None,
        most_programs: int | None = None,
        registers: int | None = None,
        **meta: Any,
    ):
        self.device_table, self._passes, self._reads = device_table, tuple(passes), reads
        self._kernel, self._most, self._meta = kernel, most_programs, meta
        self._options = {"maxnreg": registers} if registers is not None and torch.version.hip is None else {}
        # does nothing for tensors on the CPU
        self._device = torch.cuda.device(device_table.buffer.device.index if device_table.buffer.is_cuda else -1)
        self.compiled: dict[tuple[type, ...], Any] = {}

    def compile(self, items: Tensor, args: Sequence[Any]) -> None:
        """Compiles and loads the kernel for such arguments, so that a launch cannot fail for want of that."""
        types = tuple(map(type, args))
        if len(items) and types not in self.compiled:
            with self._device:
                self.compiled[types] = self._runner_of(self._arguments(items, args))

    def run(self, items: Tensor, args: Sequence[Any]) -> None:
        """Runs the kernel once, with arguments such as it was compiled for, and counts the launch."""
        if not len(items):
            return
        programs = len(items) if self._most is None else min(len(items), self._most)
        with self._device:
            self.compiled[tuple(map(type, args))]((grid(programs), 1, 1), self._arguments(items, args))
        counters["launches"] += 1
        counters["bytes"] += self.device_table.bytes_of(self._passes)
        if self._reads is not None:
            read, cached = self._reads()
            counters["bytes"] += read
            counters["cached"] += cached

    def _arguments(self, items: Tensor, args: Sequence[Any]) -> tuple[Any, ...]:
        table = self.device_table
        return table.addresses, table.floats, items, len(items), table.rows, *args

    def _runner_of(self, arguments: tuple[Any, ...]) -> Callable[[tuple[int, int, int], tuple[Any, ...]], None]:
        # the functions do not hold self, which holds them: nothing is to wait for the collector of cycles
        kernel, meta = self._kernel, self._meta
        if knobs.runtime.interpret:
            return lambda size, arguments: kernel[size](*arguments, **meta)
        # without contraction to FMA, rounding is that of the operations as written, on every device and version
        compiled = kernel.warmup(*arguments, **meta, grid=(1, 1, 1), enable_fp_fusion=False, **self._options)
        # a compiled kernel takes all arguments by position, and ignores those that it was compiled for
        constants = [meta[name] for name in kernel.arg_names[len(arguments) :]]
        return lambda size, arguments: compiled[size](*arguments, *constants)


def launch(kernel: BoundKernel, items: Tensor, args: Sequence[Any]) -> None:
    """Runs a compiled kernel.

    Args:
        items: the work of the programs, int32 [n, 2].
        args: what the kernel takes after the number of rows.
    """
    kernel.run(items, args)


def grid(programs: int) -> int:
    """Returns the number of programs that are started. Results do not depend on it."""
    return programs


@cache
def residents(device: torch.device) -> int:
    """About as many programs as a device runs at once."""
    if device.type != "cuda":
        return 1
    return PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
