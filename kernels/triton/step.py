"""The host side of every step: which kernel, over which items, with what workspace."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fused_lwlr.kernels.control import Gate, Scale
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton import launch as launching
from fused_lwlr.kernels.triton import queue, update
from fused_lwlr.kernels.triton.carried import carried_of
from fused_lwlr.kernels.triton.formula import compiled
from fused_lwlr.kernels.triton.image import Image, image_of
from fused_lwlr.kernels.triton.launch import launch, residents
from fused_lwlr.kernels.triton.workspace import Workspace

STATES = 3
"""Columns of state that a rule has at most."""
TILE = update.BLOCK * queue.PASSES


def step(
    table: Table,
    states: Sequence[str],
    rule: Any,
    coefficients: Any,
    hyper: Sequence[tuple[float, ...]],
    scale: Scale | None,
    gate: Gate | None,
) -> Tensor | None:
    """One step of a rule (see `update`) on every row of a table, in one launch."""
    columns = ("param", "grad", *states, *[""] * (STATES - len(states)), "step")
    written = ("param", *states)
    passes = (*written, *written, "grad")
    extra = scale.numbers if scale is not None else ()
    image = image_of(table, columns, [(*h, *extra) for h in hyper] if extra else hyper, tile=TILE)
    meta: dict[str, Any] = {key: image.dtypes[name] for key, name in zip("WGXYZ", columns, strict=False)}
    meta |= {"RULE": rule, "WIDTH": image.hyper_width, "BLOCK": update.BLOCK, "num_warps": update.WARPS}
    if scale is None and gate is None:
        tiles = image.tiles(update.BLOCK)
        launch(update.step_kernel, image, tiles, programs=len(tiles), passes=passes, **meta)
        image.finish(table, written)
        return None
    first: tuple[str, ...] = ()
    if scale is not None:
        first = ("grad", *written) if scale.place == "direction" else ("grad",)
    work = image.workspace
    if work is None or work.first != first:
        work = image.workspace = Workspace(image, TILE, first)
    carried, rescale = carried_of(table), gate is not None and any(row.power for row in table.rows)
    launch(
        queue.queue_kernel, image, work.items, work.tiles, *work.buffers,
        carried.totals if gate is None else gate.totals, carried.totals, math.inf if gate is None else gate.max_norm,
        programs=min(len(work.items), residents(image.buffer.device)), passes=passes, **meta,
        STEP=image.dtypes["step"], COEFFICIENTS=coefficients,
        FORMULA=compiled(scale.formula) if scale is not None else None,
        PLACE=scale.place if scale is not None else "gradient", NUMBERS=len(extra),
        GATED=gate is not None, SKIP=gate is not None and gate.skip, RESCALE=rescale,
        PASSES=queue.PASSES, SLOTS=queue.SLOTS,
    )  # fmt: skip
    _count_second_reads(image, work, table)
    image.finish(table, written)
    image.remember(table)
    if rescale:
        carried.remember(table)
    return work.statistics if scale is not None else None


def _count_second_reads(image: Image, work: Workspace, table: Table) -> None:
    """Count what norm items read and update items read again: from memory only where it has left L2 by then."""
    again = sum(image.sizes.get(name, 0) for name in work.first)
    if work.first and "param" not in work.first:
        # the norm of a weight that was changed
        again = again + np.where(image.known(table), 0, image.sizes["param"])
    launching.counters.cached += int(np.sum(again * work.within))
    launching.counters.bytes += int(np.sum(again * ~work.within))
