"""Launching kernels."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from fused_lwlr.kernels.constants import CPU, GPU, MIN_NUMEL_OF_THREADS, Sizes
from fused_lwlr.kernels.native import compile_kernel
from fused_lwlr.kernels.triton.device_table import DeviceTable
from fused_lwlr.kernels.triton.tile import TRITON_DTYPES


def is_native(device: torch.device) -> bool:
    """Whether kernels are compiled for this CPU."""
    return device.type == "cpu" and not knobs.runtime.interpret


def sizes_of(device: torch.device) -> Sizes:
    """Returns how work is divided on a device."""
    if not is_native(device):
        return GPU
    # writing to memory that another core has just read is slow: with several threads all norms come before all updates
    return CPU if torch.get_num_threads() == 1 else CPU._replace(window=1 << 60)


def supports(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run on such tensors: on a GPU or a CPU, and with TRITON_INTERPRET=1 only on a CPU."""
    real_dtype = dtype.to_real() if dtype.is_complex else dtype
    # the interpreter follows addresses in the memory of the CPU
    device_types = ("cpu",) if knobs.runtime.interpret else ("cuda", "cpu")
    return real_dtype in TRITON_DTYPES and device.type in device_types


class Kernel:
    """A kernel, compiled for a device table and for arguments of some types.

    Args:
        function: the Triton function. It takes addresses, floats, items, the number of items and of rows, then the
            arguments of the launch, and last the compile-time arguments.
        items, args: of the first launch, see `launch`.
        registers: the maximum for a thread; on AMD the compiler chooses.
        max_programs: the maximum of programs; without it there is one for each item.
        meta: compile-time arguments.

    Attributes:
        meta, max_programs: as given.
        items: the work of programs, int32 [n, 2], on the device; None if it must be made again, for other active rows.
        context: a context in which the device of the table is the current device.
        run: runs the kernel; takes the number of programs and all run-time arguments.
    """

    def __init__(
        self, function: Any, device_table: DeviceTable, items: Tensor, args: Sequence[Any], *, registers: int,
        max_programs: int | None = None, **meta: Any,
    ):  # fmt: skip
        self.meta, self.items, self.max_programs = meta, items, max_programs
        # does nothing for tensors on the CPU
        self.context = torch.cuda.device(device_table.buffer.device.index if device_table.buffer.is_cuda else -1)
        options = {"maxnreg": registers} if torch.version.hip is None else {}
        example = _arguments(device_table, items, args)
        self.run: Callable[[int, tuple[Any, ...]], None]
        # not a method: `self` in a closure would be a reference cycle, which delays freeing device memory
        if knobs.runtime.interpret:
            self.run = lambda programs, arguments: function[programs, 1, 1](*arguments, **meta)
        elif is_native(device_table.buffer.device):
            one_thread = bool(device_table.numel.sum() < MIN_NUMEL_OF_THREADS)
            self.run = partial(compile_kernel(function, example, meta), one_thread=one_thread)
        else:
            with self.context:
                # without contraction to FMA, each operation is rounded separately, on every device and version
                compiled = function.warmup(*example, **meta, grid=(1, 1, 1), enable_fp_fusion=False, **options)
            # a compiled kernel takes all arguments by position, and ignores compile-time ones
            constants = [meta[name] for name in function.arg_names[len(example) :]]
            self.run = lambda programs, arguments: compiled[programs, 1, 1](*arguments, *constants)


def _arguments(device_table: DeviceTable, items: Tensor, args: Sequence[Any]) -> tuple[Any, ...]:
    """Returns all run-time arguments."""
    return device_table.integers, device_table.floats, items, items.shape[0], device_table.rows, *args


def launch(kernel: Kernel, device_table: DeviceTable, args: Sequence[Any], *, counts_steps: bool = False) -> None:
    """Runs a kernel once. `args` are the arguments after the number of rows.

    Without items nothing is launched, unless the kernel counts steps: steps of empty parameters count, too.
    """
    programs = kernel.items.shape[0] or int(counts_steps)
    if programs == 0:
        return
    if kernel.max_programs is not None:
        programs = min(programs, kernel.max_programs)
    with kernel.context:
        kernel.run(grid(programs), _arguments(device_table, kernel.items, args))
        record_streams(device_table)


def record_streams(device_table: DeviceTable) -> None:
    """Keeps the memory of a launch from being reused before the current stream, which may not own it, is done."""
    if device_table.buffer.is_cuda:
        stream = torch.cuda.current_stream(device_table.buffer.device)
        for tensor in device_table.memory():
            tensor.record_stream(stream)


def grid(programs: int) -> int:
    """Returns the number of programs that are started. Results do not depend on it: tests replace this function."""
    return programs


def resident_programs(device: torch.device, per_processor: int) -> int:
    """Returns how many programs a device runs at once, with this number on a multiprocessor."""
    if device.type == "cuda":
        return per_processor * torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads() if is_native(device) else 1
