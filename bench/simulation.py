"""Simulates a launch on a GPU: programs take items of work, wait for their loads, and share the bandwidth.

The order of alternatives is more reliable than absolute times. The assumptions are the fields of `Device` and the
docstrings below.
"""

import heapq
import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from fused_lwlr.kernels import constants


class Device(NamedTuple):
    """A GPU, by numbers that do not come from this project's kernels.

    Attributes:
        processors: multiprocessors.
        clock: cycles a second.
        copy: bytes that a copy reads and writes a second.
        l2: bytes that hits in L2 read a second.
        kept: bytes read by norms that L2 holds while updates stream through it.
        memory_latency, l2_latency: seconds of a load without contention.
        ticket: seconds of an atomic whose result all threads of a program get.
        block_start: seconds until a program of a grid runs.
        launch: seconds between the end of one kernel and the start of the next.
    """

    name: str = "H200"
    processors: int = 132
    clock: float = 1.7e9
    copy: float = 4.3e12
    l2: float = 5.5e12
    kept: int = 38 << 20
    memory_latency: float = 650e-9
    l2_latency: float = 300e-9
    ticket: float = 700e-9
    block_start: float = 300e-9
    launch: float = 1.5e-6


class Code(NamedTuple):
    """The properties of a compiled kernel that affect its time.

    Attributes:
        resident: programs of a multiprocessor.
        norms, update: 128-bit loads of a thread that are in flight together, for one batch after the other.
        instructions: of a thread, for one block.
    """

    resident: int
    norms: Sequence[int]
    update: Sequence[int]
    instructions: int


class Item(NamedTuple):
    """One item of work.

    Attributes:
        row: its row.
        norms: whether it is for norms, which the row's updates wait for.
        memory, cached, written: bytes read from memory, read from L2, and written.
        blocks: blocks of elements; each block waits for its loads.
    """

    row: int
    norms: bool
    memory: float
    cached: float
    written: float
    blocks: int


def seconds(items: Sequence[Item], code: Code, device: Device, tiles: int, *, queued: bool) -> float:
    """Returns when the last program of a launch ends.

    Args:
        items: in the order in which programs take them.
        tiles: the largest number of partial sums of a row.
        queued: whether programs take tickets; otherwise each item has a separate program.

    Raises:
        RuntimeError: the items wait for one another.
    """
    norms_left: dict[int, int] = {}
    for item in items:
        if item.norms:
            norms_left[item.row] = norms_left.get(item.row, 0) + 1
    waiting: dict[int, list[Any]] = {}
    free = {"memory": 0.0, "l2": 0.0}
    rates = {"memory": (device.copy, device.memory_latency), "l2": (device.l2, device.l2_latency)}
    schedulers = [0.0] * device.processors
    order = iter(items)
    # item, addresses and hyper-parameters are loaded one after the other
    chain = (device.ticket if queued else device.block_start) + 3 * device.l2_latency
    work = code.instructions * constants.WARPS / 4 / device.clock

    def program(number: int) -> Generator[Any, float, None]:
        processor = number % device.processors
        for item in order:
            yield chain
            if not item.norms and norms_left.get(item.row, 0) != 0:
                yield item.row
            loads = code.norms if item.norms else code.update
            for _ in range(item.blocks):
                for count in loads:
                    share = count / sum(loads) / item.blocks
                    yield "memory", item.memory * share
                    if item.cached:
                        yield "l2", item.cached * share
                now = yield 0.0
                begin = max(schedulers[processor], now)
                schedulers[processor] = begin + work * (0 if item.norms and len(code.norms) == 1 else 1)
                yield schedulers[processor] - now
                free["memory"] = max(free["memory"], now) + item.written / item.blocks / device.copy
            if item.norms:
                # an arrival; the last one sums two or three columns of partials, 1,024 at a time
                yield device.ticket
                norms_left[item.row] -= 1
                if norms_left[item.row] == 0:
                    norms_left[item.row] = 1
                    yield 3 * math.ceil(tiles / constants.GPU.queue_slots) * 2 * device.l2_latency
                    now = yield device.ticket
                    norms_left[item.row] = 0
                    for at, other in waiting.pop(item.row, ()):
                        heapq.heappush(events, (now + device.ticket, at, other))

    resident = min(code.resident * device.processors, len(items))
    events: list[tuple[float, int, Any]] = [(0.0, number, program(number)) for number in range(resident)]
    started, now = set[int](), 0.0
    while events:
        now, number, running = heapq.heappop(events)
        try:
            what = running.send(now) if number in started else next(running)
        except StopIteration:
            continue
        started.add(number)
        if isinstance(what, tuple):
            where, size = what
            bandwidth, latency = rates[where]
            free[where] = max(free[where], now) + size / bandwidth
            heapq.heappush(events, (free[where] + latency, number, running))
        elif isinstance(what, int):
            waiting.setdefault(what, []).append((number, running))
        else:
            heapq.heappush(events, (now + what, number, running))
    if waiting:
        raise RuntimeError(f"updates of rows {sorted(waiting)[:5]} wait for norms that no program takes")
    return max(now, free["memory"])
