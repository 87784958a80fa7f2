"""The host side of every step: which kernel, over which items, with what workspace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor

from fused_lwlr.kernels.constants import most_registers
from fused_lwlr.kernels.control import Balance, Factors, Gate, Scale
from fused_lwlr.kernels.rules.base import Number, Rule
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton import queue, update
from fused_lwlr.kernels.triton.carried import carried_of
from fused_lwlr.kernels.triton.formula import compiled
from fused_lwlr.kernels.triton.image import Image, image_of
from fused_lwlr.kernels.triton.launch import Bound, launch, residents
from fused_lwlr.kernels.triton.numbers import NOT_SHARED, Numbers, numbers_of
from fused_lwlr.kernels.triton.workspace import Workspace

STATES = 3
"""Columns of state that a rule has at most."""
TILE = update.BLOCK * queue.PASSES
PLACES = {"W": 0, "G": 1, "X": 2, "Y": 3, "Z": 4, "M": 6}
"""Columns by the names of their dtypes in the kernels."""
MORE = ("ema",)
"""Columns that only some tables have, of which no norm is."""
NO_GATE = Gate()


@dataclass
class Variant:
    """What one kind of step of a table needs besides the numbers of each: made at the first."""

    bound: Bound
    written: list[str]
    work: Any = None
    """The `Workspace`, where there is a queue."""
    moving: Sequence[Number | None] = NOT_SHARED
    """The numbers of `MOVING` that the next launch takes."""


def step(
    rule: Rule,
    table: Table,
    hyper: Sequence[Any],
    scale: Scale | Factors | Balance | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Tensor | None:
    """Takes one step of a rule, in one launch. See `fused_lwlr.kernels.reference.step`, which it does the same as."""
    return prepare(rule, table, hyper, scale, gate, write=write, rounding_seed=rounding_seed)()


def prepare(
    rule: Rule,
    table: Table,
    hyper: Sequence[Any],
    scale: Scale | Factors | Balance | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Callable[[], Tensor | None]:
    """Does everything of `step` that can fail before anything is written. Call what it returns, once, for the rest."""
    device = table.columns["param"][0].device
    more = scale.numbers if isinstance(scale, Scale) else ()
    numbers = table.launches[rule] = numbers_of(rule, hyper, more, device, table.launches.get(rule))
    image = image_of(table, columns_of(rule), numbers, tile=TILE, more=MORE)
    if scale is None and gate is None and rounding_seed is None and image.dtypes["step"] is None:
        return _plain(table, image, rule, numbers, write=write)
    return _queued(table, image, rule, numbers, scale, gate or NO_GATE, write=write, rounding_seed=rounding_seed)


@cache
def columns_of(rule: Rule) -> tuple[str, ...]:
    """Returns the columns that a kernel finds at fixed places, in the order of their dtypes in its arguments."""
    return ("param", "grad", *rule.states, *[""] * (STATES - len(rule.states)), "step", "master_weight")


def _plain(table: Table, image: Image, rule: Rule, hyper: Numbers, *, write: bool) -> Callable[[], None]:
    """A step in which no tile waits for another."""
    key = (rule, hyper.on_device, write)
    variant = table.launches.get(key)
    if variant is None or variant.bound.image is not image:
        variant = table.launches[key] = _plain_variant(image, rule, live=hyper.on_device, write=write)
    variant.moving = hyper.shared or NOT_SHARED
    variant.bound.ready(variant.moving)

    def take() -> None:
        launch(variant.bound, variant.moving)
        if write:
            image.finish(variant.written)

    return take


def _plain_variant(image: Image, rule: Rule, *, live: bool, write: bool) -> Variant:
    """What the kernel without a queue is compiled for."""
    written, passes, meta = _common(image, rule, live=live, write=write)
    tiles = image.tiles(update.BLOCK)
    return Variant(Bound(update.step_kernel, image, tiles, programs=len(tiles), passes=passes, **meta), written)


def _queued(
    table: Table,
    image: Image,
    rule: Rule,
    hyper: Numbers,
    scale: Scale | Factors | Balance | None,
    gate: Gate,
    *,
    write: bool,
    rounding_seed: int | None,
) -> Callable[[], Tensor | None]:
    """A step by a queue: of norms and updates, or with numbers that only the device knows."""
    kind = type(scale)
    formula = scale.formula if isinstance(scale, Scale) else None
    known = scale.values.contiguous() if isinstance(scale, Factors) else None
    balance = kind is Balance
    carried, rescale = carried_of(table), gate.totals is not None and image.rescales
    place = None if scale is None else scale.place
    key = (rule, hyper.on_device, write, rescale, gate.totals is None, gate.skip, kind, place, formula)
    variant = table.launches.get(key)
    if variant is None or variant.bound.image is not image or variant.work is not image.workspace:
        variant = table.launches[key] = _queue_variant(
            image, rule, scale, gate, live=hyper.on_device, write=write, rescale=rescale
        )
    work = variant.work
    arguments = (
        work.tiles, *work.buffers, carried.totals if gate.totals is None else gate.totals, carried.totals,
        gate.max_norm, gate.grad_scale, gate.found_inf, known, carried.rows if balance and write else None,
        rounding_seed,
    )  # fmt: skip
    variant.moving = hyper.shared or NOT_SHARED
    variant.bound.ready((*variant.moving, *arguments))

    def take() -> Tensor | None:
        launch(variant.bound, (*variant.moving, *arguments))
        if write:
            image.finish(variant.written)
            if rescale or balance:
                carried.remember(image.params)
        image.remember(write)
        return work.statistics if formula is not None else None

    return take


def _queue_variant(
    image: Image,
    rule: Rule,
    scale: Scale | Factors | Balance | None,
    gate: Gate,
    *,
    live: bool,
    write: bool,
    rescale: bool,
) -> Variant:
    """What the kernel with the queue is compiled for, and its workspace."""
    written, passes, meta = _common(image, rule, live=live, write=write)
    formula = scale if isinstance(scale, Scale) else None
    work = _workspace(image, None if isinstance(scale, Balance) else scale, written)
    items = work.items if write and formula is not None else work.updates if write else work.norms
    gated = gate.totals is not None or image.dtypes["step"] is not None
    bound = Bound(
        queue.queue_kernel, image, items,
        programs=max(1, min(len(items), residents(image.buffer.device))), passes=passes,
        reads=partial(work.first_reads, image, again=write) if formula is not None else None,
        registers=most_registers(f"{rule.name} queue, gated" if gated else f"{rule.name} queue"), **meta,
        STEP=image.dtypes["step"], COEFFICIENTS=compiled(rule.coefficients),
        FORMULA=compiled(formula.formula) if formula is not None else None,
        PLACE=scale.place if isinstance(scale, (Scale, Factors)) else "gradient",
        NUMBERS=len(formula.numbers) if formula is not None else 0,
        GATED=gate.totals is not None, SKIP=gate.totals is not None and gate.skip, RESCALE=rescale and write,
        WRITE=write, PASSES=queue.PASSES, SLOTS=queue.SLOTS,
    )  # fmt: skip
    return Variant(bound, written, work)


def _common(image: Image, rule: Rule, *, live: bool, write: bool) -> tuple[list[str], tuple[str, ...], dict[str, Any]]:
    """Columns that are written, a column for each time that it is read or written, and what both kernels take."""
    written = [name for name in ("param", *rule.states, "master_weight", *MORE) if image.dtypes.get(name) is not None]
    meta: dict[str, Any] = {key: image.dtypes[columns_of(rule)[at]] for key, at in PLACES.items()}
    meta |= {"E": image.dtypes.get("ema"), "RULE": compiled(rule.update), "LIVE": live}
    meta |= {"WIDTH": image.hyper_width, "BLOCK": update.BLOCK, "num_warps": update.WARPS}
    return written, (*written, *written, "grad") if write else (), meta


def _workspace(image: Image, scale: Scale | Factors | None, written: Sequence[str]) -> Workspace:
    """The image's workspace, made anew where norms are read from other columns than before."""
    first: tuple[str, ...] = ()
    if scale is not None:
        read = [name for name in written if name not in MORE]
        first = ("grad", *read) if scale.place == "direction" else ("grad",)
    work: Workspace | None = image.workspace
    if work is None or work.first != first:
        work = image.workspace = Workspace(image, TILE, first)
    return work
