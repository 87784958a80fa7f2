"""Predicts the time of a step on a GPU that is not available. Nothing here is a measurement.

    python -m bench.model [--json] [--set NAME ...] [--dtype fp32|bf16] [--passes N] [--window MIB]

An event model: programs take items from the real list in order, wait for loads in the phases that the compiled code
has, and share the bandwidth of memory, of L2 and of the instruction schedulers, see `bench.simulation`.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import triton

from bench.bytes_moved import read_soon
from bench.machine_code import Job, reports
from bench.parameter_sets import SETS, shapes_of
from bench.simulation import Code, Device, Item, seconds
from bench.variants import DTYPES, TARGETS, TYPES, variants
from fused_lwlr.kernels import constants
from fused_lwlr.kernels.triton.workspace import item_list, schedule, tile_list

STEPS = {
    "SGD": ("sgd momentum", None, 3, 2),
    "SGD, ELR": ("sgd momentum", "gradient", 3, 2),
    "AdamW": ("adamw", None, 4, 3),
    "AdamW, LAMB": ("adamw", "direction", 4, 3),
}
"""Step -> variant of the plain kernel, target of its norms, columns that an update reads, and columns it writes."""
TARGET_RATIOS = {"SGD, ELR": 1.25, "AdamW, LAMB": 1.5}
"""Step -> target for the predicted time, as a multiple of the plain step's, on ResNet-50 and ViT-S/16."""
PREDICTED = ("ResNet-50", "ViT-S/16", "ViT-L/16", "decoder 1.3B")


@cache
def code_of(step: str, dtype: str) -> tuple[Code, Code]:
    """Returns the code of the plain step and of the queue, compiled for sm_90.

    Assumes that an update or a direction of the queue has as many instructions as the plain step, and that the norm of
    a gradient has a negligible number.
    """
    name, target, reads, _ = STEPS[step]
    queued = name if target is None else f"{name}, ELR"
    wanted = {v.name: v for v in variants(DTYPES[dtype]) if v.name in (name, queued)}
    jobs = [Job(v.kernel, v.constants, TYPES, v.registers) for v in wanted.values()]
    found = dict(zip(wanted, reports(jobs, TARGETS["sm_90"]), strict=True))
    plain = found[name]
    vectors = constants.GPU.block * DTYPES[dtype].primitive_bitwidth // 8 // (constants.THREADS * 16)
    code = Code(plain["resident"], (), plain["phases"], plain["instructions"])
    if target is None:
        return code, code
    # in the order of the listing: norms, the weights if the norms do not read them, updates
    phases = list(found[queued]["phases"])
    update = _last(phases, reads * vectors)
    if target == "gradient":
        # the weights, several blocks at once and then one, and a single block of the norms
        _last(phases, vectors * (constants.GPU.at_once + 1))
        _last(phases, vectors)
    resident = min(found[queued]["resident"], constants.PER_PROCESSOR)
    return code, Code(resident, phases, update, plain["instructions"])


def _last(phases: list[int], loads: int) -> list[int]:
    """Removes the last phases that have this many loads, and returns them."""
    taken: list[int] = []
    while sum(taken) < loads:
        taken.insert(0, phases.pop())
    return taken


def plain_items(numel: np.ndarray, reads: int, writes: int, itemsize: int) -> list[Item]:
    """Returns the items of a step without norms, in the order of the launch."""
    block = constants.GPU.step_block
    tiles = tile_list(numel, block)
    elements = np.minimum(numel[tiles[:, 0]] - tiles[:, 1].astype(np.int64) * block, block) * itemsize
    return [
        Item(row, False, reads * size, 0.0, writes * size, 1)
        for row, size in zip(tiles[:, 0].tolist(), elements.tolist(), strict=True)
    ]


def queue_items(
    numel: np.ndarray,
    target: str,
    reads: int,
    writes: int,
    itemsize: int,
    device: Device,
    sizes: constants.Sizes,
    programs: int,
) -> list[Item]:
    """Returns the items of a step with norms, in the order of the queue; `programs` run at once."""
    first = reads if target == "direction" else 1
    norm_bytes = numel * itemsize * first
    segments = schedule(norm_bytes, -(-numel // sizes.queue_tile), sizes.window, programs, measured=True)
    items = item_list(segments, numel, sizes.queue_tile)
    soon = read_soon(items, numel, sizes.queue_tile, norm_bytes, device.kept // 2)
    row, kind, slot = items[:, 0], items[:, 1] % 2, items[:, 1].astype(np.int64) // 2
    counts = -(-numel // sizes.queue_tile)
    begin = (slot - (np.cumsum(counts) - counts)[row]) * sizes.queue_tile
    elements = np.minimum(numel[row] - begin, sizes.queue_tile)
    found = []
    for at, is_update, count, hit in zip(
        row.tolist(), kind.tolist(), elements.tolist(), soon[row].tolist(), strict=True
    ):
        size, blocks = count * itemsize, math.ceil(count / sizes.block)
        again = first * size if is_update and hit else 0
        if is_update:
            found.append(Item(at, False, reads * size - again, again, writes * size, blocks))
        else:
            together = sizes.at_once if target == "gradient" else 1
            found.append(Item(at, True, first * size, 0.0, 0.0, math.ceil(blocks / together)))
    return found


def predict(name: str, step: str, dtype: str, device: Device, sizes: constants.Sizes) -> dict[str, Any]:
    """Returns the predicted time of a step of a parameter set, and of the same work in two launches."""
    _, target, reads, writes = STEPS[step]
    numel = np.array([math.prod(shape) for shape in shapes_of(name)])
    itemsize = DTYPES[dtype].primitive_bitwidth // 8
    plain, code = code_of(step, dtype)
    found: dict[str, Any] = {"set": name, "dtype": dtype, "step": step, "device": device.name}
    floor = int(numel.sum()) * itemsize * (reads + writes) / device.copy
    base = seconds(plain_items(numel, reads, writes, itemsize), plain, device, 1, queued=False)
    if target is None:
        return {**found, "seconds": base, "floor": floor, "of_plain": 1.0}
    programs = constants.least_resident("queue", reads - 2) * device.processors
    items = queue_items(numel, target, reads, writes, itemsize, device, sizes, programs)
    tiles = int(-(-numel.max() // sizes.queue_tile))
    time = seconds(items, code, device, tiles, queued=True)
    apart = [[item for item in items if item.norms is norms] for norms in (True, False)]
    # L2 keeps no data of the first launch for the second
    apart[1] = [item._replace(memory=item.memory + item.cached, cached=0.0) for item in apart[1]]
    two = device.launch + sum(seconds(part, code, device, tiles, queued=True) for part in apart)
    return {**found, "seconds": time, "floor": floor, "of_plain": time / base, "two_launches": two}


def rows(
    sets: Sequence[str], dtypes: Sequence[str], device: Device, sizes: constants.Sizes
) -> Iterator[dict[str, Any]]:
    """Yields a prediction for every step of every set."""
    for name in sets:
        for dtype in dtypes:
            for step in STEPS:
                yield predict(name, step, dtype, device, sizes)


def line(row: dict[str, Any]) -> str:
    """Returns one row of the printed table."""
    two = f"{row['two_launches'] * 1e6:10.0f}" if "two_launches" in row else ""
    share = 100 * row["floor"] / row["seconds"]
    return (
        f"{row['set']:13} {row['dtype']:5} {row['step']:12} {row['seconds'] * 1e6:9.0f} {share:7.0f} "
        f"{row['of_plain']:8.2f} {two}"
    )


HEAD = f"{'set':13} {'dtype':5} {'step':12} {'predicted µs':>9} {'% copy':>6} {'/ plain':>8} {'two launches µs':>10}"


def main() -> None:
    """Predict, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--set", action="append", choices=SETS, help="again for each; four by default")
    parser.add_argument("--dtype", action="append", choices=("fp32", "bf16"), help="again for each; both by default")
    parser.add_argument("--passes", type=int, help="blocks of an item of the queue")
    parser.add_argument("--window", type=int, help="MiB that the norms of a group of rows read")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_args()
    sizes = constants.GPU
    if options.passes is not None:
        sizes = sizes._replace(queue_passes=options.passes)
    if options.window is not None:
        sizes = sizes._replace(window=options.window << 20)
    device = Device()
    if not options.json:
        print(f"PREDICTED, not measured; compiled by triton {triton.__version__} for sm_90; {device}")
        print(HEAD)
    for row in rows(options.set or PREDICTED, options.dtype or ("fp32", "bf16"), device, sizes):
        print(json.dumps(row) if options.json else line(row), flush=True)


if __name__ == "__main__":
    main()
