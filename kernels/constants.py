"""Launch constants of the Triton kernels, in one place and without Triton.

All GPUs use the same constants, except that the size of a warp and `queue_passes` differ on AMD. `MEASURED` names the
devices where they were measured. `python -m bench.sweep` tries other values on a device. Each value has its own
process, since kernels read constants when they are imported. Tensors are restored before each trial, since kernels work
in place; for this reason, kernels are never autotuned. `python -m bench.codegen` shows what compilers make of the
constants: the width of accesses, registers and spills.
"""

from typing import NamedTuple

import torch

MEASURED = {"NVIDIA H200": "2026-11-26, Triton 3.6: bench/results/constants-nvidia-h200.md"}
"""Name of a device -> date and figures that the constants come from."""

THREADS = 128
"""Threads of a program. With 1,024 elements a block has 8 for each: 16 bytes in half precision, 32 in single."""
LANES = 64 if torch.version.hip else 32
"""Threads of a warp, for the GPUs that this build of torch is for: 64 on AMD's gfx9, 32 on NVIDIA's."""
WARPS = THREADS // LANES

PER_PROCESSOR = 8
"""Programs of the queue started for each multiprocessor. Programs that do not fit start later, and find no work."""


class Sizes(NamedTuple):
    """How work is divided on one kind of device.

    Attributes:
        step_block: elements of an item of a step without norms.
        block: elements that the queue and the statistics load at a time.
        queue_passes, statistics_passes: blocks of an item.
        at_once: blocks that are loaded before the first is used, where few columns are loaded.
        queue_slots, statistics_slots: partial sums that are read at a time.
        window: bytes that the norms of a group of rows read, see `schedule`.
    """

    step_block: int
    block: int
    queue_passes: int
    queue_slots: int
    statistics_passes: int
    at_once: int
    statistics_slots: int
    window: int

    @property
    def queue_tile(self) -> int:
        """Elements of an item of the queue."""
        return self.block * self.queue_passes

    @property
    def statistics_tile(self) -> int:
        """Elements of an item of the statistics."""
        return self.block * self.statistics_passes


GPU = Sizes(
    step_block=1024, block=1024, queue_passes=8, queue_slots=1024, statistics_passes=16, at_once=4,
    statistics_slots=128, window=19 << 20,
)  # fmt: skip
"""The window hardly matters on an H200: norms and updates of a row are too far apart for its L2 of 60 MB."""
if torch.version.hip:
    # a release writes all of L2 back there: larger items need fewer
    GPU = GPU._replace(queue_passes=16)
CPU = Sizes(
    step_block=16384, block=128, queue_passes=256, queue_slots=32, statistics_passes=128, at_once=1,
    statistics_slots=32, window=2 << 20,
)  # fmt: skip
"""Accumulators of 128 elements fit into the first cache, and two windows into the last. Each thread has a window.
Measured with `python -m bench.cpu` on an AMD EPYC. AdamW with LAMB on ResNet-50, in tiles of 65,536: one thread
takes 20.0 ms with this window and 23.6 without one, two threads 22.9 with it and 13.9 without. A lane adds up one
element of each block in single precision, so larger tiles are less exact. They are up to a tenth faster."""
MIN_NUMEL_OF_THREADS = 1 << 16
"""A table with fewer elements runs on one thread of a CPU."""

LEAST_RESIDENT = {"step": (10, 8, 6), "queue": (8, 8, 6), "statistics": (6,)}
"""Programs with blocks of 1,024 elements that must fit on a multiprocessor at once: by kernel, and by the number of
state columns of the rule. The last number is also for more columns. The limit for the registers of a thread follows
from it. Programs of the queue wait for tickets, tables and other programs as well as for data. On an H200 more of them
are faster, although their scalars are spilled then."""


def least_resident(kernel: str, states: int = 0) -> int:
    """Returns the programs of a kernel that must fit on a multiprocessor at once, see `LEAST_RESIDENT`."""
    programs = LEAST_RESIDENT[kernel]
    return programs[min(states, len(programs) - 1)]


def max_registers(resident: int) -> int:
    """Returns the most registers of a thread with which a multiprocessor of NVIDIA GPUs holds these programs.

    A multiple of eight, for compilers. Without a limit they take more (Triton 3.6 for AdamW with ELR 141, a program
    less), or save registers without need: by keeping scalars in memory, or by loading columns one after the other.
    `resident` counts programs with blocks of 1,024 elements.
    """
    programs = resident * 1024 / GPU.block
    return min(int(65536 / (programs * THREADS)) // 8 * 8, 255)
