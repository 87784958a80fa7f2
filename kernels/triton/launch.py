"""Launching kernels, and counting launches."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from fused_lwlr.kernels.constants import CPU, GPU, GRAIN, Sizes
from fused_lwlr.kernels.native import compile_kernel
from fused_lwlr.kernels.triton.device_table import DeviceTable
from fused_lwlr.kernels.triton.upload import is_capturing

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


counters: Counter[str] = Counter()
"""The number of "launches" since the last `counters.clear()`."""


def is_native(device: torch.device) -> bool:
    """Whether kernels are compiled for this CPU."""
    return device.type == "cpu" and not knobs.runtime.interpret


def sizes_of(device: torch.device) -> Sizes:
    """Returns how work is divided on a device."""
    if not is_native(device):
        return GPU
    # a thread waits for another's cache if it writes data that the other has just read: all norms first
    return CPU if torch.get_num_threads() == 1 else CPU._replace(window=1 << 60)


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on such tensors: on a GPU or a CPU, and with TRITON_INTERPRET=1 only on a CPU."""
    real_dtype = dtype.to_real() if dtype.is_complex else dtype
    # the interpreter follows addresses in the memory of the CPU
    return real_dtype in DTYPES and device.type in (("cpu",) if knobs.runtime.interpret else ("cuda", "cpu"))


class BoundKernel:
    """A kernel with its constant properties: its device table, and its compilation.

    Args:
        kernel: takes addresses, floats, items, the number of items and of rows, then the arguments of the launch, and
            last the compile-time arguments.
        device_table: the device table of addresses, floats and rows.
        most_programs: the maximum number of programs; by default one for each item.
        registers: the maximum for a thread; by default the compiler chooses, as always on AMD.
        meta: compile-time arguments.
    """

    def __init__(
        self,
        kernel: Any,
        device_table: DeviceTable,
        *,
        most_programs: int | None = None,
        registers: int | None = None,
        **meta: Any,
    ):
        self.device_table, self.meta = device_table, meta
        self._kernel, self.most_programs = kernel, most_programs
        self._options = {"maxnreg": registers} if registers is not None and torch.version.hip is None else {}
        # does nothing for tensors on the CPU
        self.device = torch.cuda.device(device_table.buffer.device.index if device_table.buffer.is_cuda else -1)
        self.compiled: dict[tuple[type, ...], Any] = {}

    def compile(self, items: Tensor, args: Sequence[Any]) -> None:
        """Compiles and loads the kernel for such arguments, so that a later launch cannot fail for this reason.

        Raises:
            RuntimeError: during a capture in a CUDA graph, since a capture cannot load kernels.
        """
        if items.shape[0]:
            if is_capturing():
                raise RuntimeError(
                    "step() is captured in a CUDA graph and needs a kernel that was not compiled: take a step with the "
                    "same options, types of learning rates and loss scale before the capture"
                )
            with self.device:
                self.compiled[tuple(map(type, args))] = self._runner_of(self.arguments(items, args))

    def arguments(self, items: Tensor, args: Sequence[Any]) -> tuple[Any, ...]:
        """Returns all run-time arguments."""
        table = self.device_table
        return table.addresses, table.floats, items, items.shape[0], table.rows, *args

    def _runner_of(self, arguments: tuple[Any, ...]) -> Callable[[tuple[int, int, int], tuple[Any, ...]], None]:
        # do not capture self, which holds these functions: a reference cycle would delay freeing device memory
        kernel, meta = self._kernel, self.meta
        if knobs.runtime.interpret:
            return lambda size, arguments: kernel[size](*arguments, **meta)
        if is_native(self.device_table.buffer.device):
            run = compile_kernel(kernel, arguments, meta)
            alone = self.device_table.numel.sum() < GRAIN
            return lambda size, arguments: run(size[0], arguments, alone)
        # without contraction to FMA, each operation is rounded separately, on every device and version
        compiled = kernel.warmup(*arguments, **meta, grid=(1, 1, 1), enable_fp_fusion=False, **self._options)
        # a compiled kernel takes all arguments by position, and ignores compile-time ones
        constants = [meta[name] for name in kernel.arg_names[len(arguments) :]]
        return lambda size, arguments: compiled[size](*arguments, *constants)


def launch(kernel: BoundKernel, items: Tensor, args: Sequence[Any]) -> None:
    """Runs a compiled kernel once, and counts the launch.

    Args:
        items: the work of the programs, int32 [n, 2]; an empty list is not launched.
        args: arguments of the kernel after the number of rows.
    """
    count = items.shape[0]
    if not count:
        return
    programs = count if kernel.most_programs is None else min(count, kernel.most_programs)
    arguments = kernel.arguments(items, args)
    with kernel.device:
        kernel.compiled[tuple(map(type, args))]((grid(programs), 1, 1), arguments)
        kernel.device_table.keep_for_stream()
    counters["launches"] += 1


def grid(programs: int) -> int:
    """Returns the number of programs that are started. Results do not depend on it."""
    return programs


def residents(device: torch.device, per_processor: int) -> int:
    """Returns the number of programs that a device runs at once, with `per_processor` on each multiprocessor."""
    if device.type != "cuda":
        return torch.get_num_threads() if is_native(device) else 1
    return per_processor * multi_processors(device)


@cache
def multi_processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
