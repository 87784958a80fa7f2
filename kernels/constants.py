"""Launch constants of the Triton kernels, in one place and without Triton.

One value serves every family of devices, except where a family needs another to move 128 bits a thread at a time.
None of them was measured on a GPU yet: they come from generated code (`python -m bench.codegen`), which shows the
width of accesses, registers and spills, and from data sheets (L2 of an A100 40 MB, H100 50 MB, B200 126 MB). `python -m
bench.sweep` times others on a device, each in a process of its own that sets them before the kernels are imported, and
on copies that are restored before each trial; kernels that work in place are never autotuned. What is measured belongs
into `MEASURED`.
"""

import torch

MEASURED: dict[str, str] = {}
"""Name of a device -> date and figures that the constants come from there. Empty: nothing was measured."""

THREADS = 128
"""Threads of a program. With 1,024 elements a block has 8 for each: 16 bytes in half precision, 32 in single."""
LANES = 64 if torch.version.hip else 32
"""Threads of a warp, for the GPUs that this build of torch is for: 64 on AMD's gfx9, 32 on NVIDIA's."""
WARPS = THREADS // LANES

BLOCK = 1024
"""Elements that a program loads at a time."""
QUEUE_PASSES = 4
"""Blocks in an item of the queue."""
QUEUE_SLOTS = 1024
"""Partial sums that are read at a time by the program that settles a row of the queue."""
STATISTICS_PASSES = 16
"""Blocks in a tile of the statistics kernel, which has less to do for each."""
STATISTICS_SLOTS = 128
"""Partial sums that the statistics kernel reads at a time."""
WINDOW = 16 << 20
"""Bytes of rows that wait in the queue for their updates; of an L2 of 40 MB and up twice as much is counted on."""
PER_PROCESSOR = 8
"""Programs of the queue that are started for each multiprocessor: those that do not fit find an empty queue later."""

LEAST_RESIDENT = {
    "sgd": 12, "adamw": 6, "sgd queue": 6, "sgd queue, gated": 5, "adamw queue": 4, "adamw queue, gated": 4,
    "lion": 8, "lion queue": 5, "lion queue, gated": 5, "statistics": 8, "totals": 8,
}  # fmt: skip
"""Programs with blocks of 1,024 elements that a multiprocessor must have the registers for, by rule and kernel; a gated
queue has a gate, or counts steps on the device. Each waits for one block of every column, so of a step at the least 5
programs x 3 columns x 2 KB are under way in half precision: 30 KB. By Little's law 4.8 TB/s over the 132
multiprocessors of an H200, at 800 ns of latency, ask for 29 KB; neither was measured."""


def most_registers(kind: str) -> int:
    """Registers of a thread with which as much is under way on a multiprocessor of NVIDIA's as `LEAST_RESIDENT` says.

    What compilers may take for queues and statistics, in eights. Left to themselves they take more (Triton 3.6 for
    AdamW with ELR 141, a program less), or save some that are not short by keeping scalars in memory.
    """
    programs = LEAST_RESIDENT[kind] * 1024 / BLOCK
    return min(int(65536 / (programs * THREADS)) // 8 * 8, 255)
