"""The host side of every step: which kernel, over which items, with what workspace."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fused_lwlr.kernels.control import Balance, Factors, Gate, Scale
from fused_lwlr.kernels.hyper import Number
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton import launch as launching
from fused_lwlr.kernels.triton import queue, update
from fused_lwlr.kernels.triton.carried import carried_of
from fused_lwlr.kernels.triton.formula import compiled
from fused_lwlr.kernels.triton.hyper import staged
from fused_lwlr.kernels.triton.image import Image, image_of
from fused_lwlr.kernels.triton.launch import launch, residents
from fused_lwlr.kernels.triton.workspace import Workspace

STATES = 3
"""Columns of state that a rule has at most."""
TILE = update.BLOCK * queue.PASSES
PLACES = {"W": 0, "G": 1, "X": 2, "Y": 3, "Z": 4, "M": 6}
"""Columns by the names of their dtypes in the kernels."""


def step(
    table: Table,
    states: Sequence[str],
    rule: Any,
    coefficients: Any,
    hyper: Sequence[Sequence[Number]],
    scale: Scale | Factors | Balance | None,
    gate: Gate | None,
    *,
    write: bool,
    rounding_seed: int | None,
) -> Tensor | None:
    """One step of a rule (see `update`) on every row of a table, in one launch."""
    columns = ("param", "grad", *states, *[""] * (STATES - len(states)), "step", "master_weight")
    formula = scale if isinstance(scale, Scale) else None
    numbers = formula.numbers if formula is not None else ()
    rows, live = staged(hyper, numbers, table.columns["param"][0].device)
    image = image_of(table, columns, rows, tile=TILE)
    written = [name for name in ("param", *states, "master_weight") if image.dtypes.get(name) is not None]
    passes = (*written, *written, "grad") if write else ()
    meta: dict[str, Any] = {key: image.dtypes[columns[at]] for key, at in PLACES.items()}
    meta |= {"RULE": rule, "LIVE": live, "WIDTH": image.hyper_width, "BLOCK": update.BLOCK, "num_warps": update.WARPS}
    if scale is None and gate is None and rounding_seed is None and image.dtypes["step"] is None:
        tiles = image.tiles(update.BLOCK)
        launch(update.step_kernel, image, tiles, programs=len(tiles), passes=passes, **meta)
        image.finish(table, written)
        return None
    gate = gate or Gate()
    balance = isinstance(scale, Balance)
    work = _workspace(image, None if isinstance(scale, Balance) else scale, written)
    items = work.items if write and formula is not None else work.updates if write else work.norms
    known = scale.values.contiguous() if isinstance(scale, Factors) else None
    carried, rescale = carried_of(table), gate.totals is not None and any(row.power for row in table.rows)
    launch(
        queue.queue_kernel, image, items, work.tiles, *work.buffers,
        carried.totals if gate.totals is None else gate.totals, carried.totals, gate.max_norm,
        gate.grad_scale, gate.found_inf, known, carried.rows if balance and write else None, rounding_seed,
        programs=max(1, min(len(items), residents(image.buffer.device))), passes=passes, **meta,
        STEP=image.dtypes["step"], COEFFICIENTS=coefficients,
        FORMULA=compiled(formula.formula) if formula is not None else None,
        PLACE=scale.place if isinstance(scale, (Scale, Factors)) else "gradient", NUMBERS=len(numbers),
        GATED=gate.totals is not None, SKIP=gate.totals is not None and gate.skip, RESCALE=rescale and write,
        WRITE=write, PASSES=queue.PASSES, SLOTS=queue.SLOTS,
    )  # fmt: skip
    if formula is not None:
        _count_first_reads(image, work, table, again=write)
    if write:
        image.finish(table, written)
        if rescale or balance:
            carried.remember(table)
    image.remember(table)
    return work.statistics if formula is not None else None


def _workspace(image: Image, scale: Scale | Factors | None, written: Sequence[str]) -> Workspace:
    """The image's workspace, made anew where norms are read from other columns than before."""
    first: tuple[str, ...] = ()
    if scale is not None:
        first = ("grad", *written) if scale.place == "direction" else ("grad",)
    work: Workspace | None = image.workspace
    if work is None or work.first != first:
        work = image.workspace = Workspace(image, TILE, first)
    return work


def _count_first_reads(image: Image, work: Workspace, table: Table, *, again: bool) -> None:
    """Count what norm items read; if update items read it again, only where it has left L2 by then."""
    read = sum(image.sizes.get(name, 0) for name in work.first)
    if "param" not in work.first:
        # the norm of a weight that was changed
        read = read + np.where(image.known(table), 0, image.sizes["param"])
    within = work.within & again
    launching.counters.cached += int(np.sum(read * within))
    launching.counters.bytes += int(np.sum(read * ~within))
