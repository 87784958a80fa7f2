"""The host side of every step: which kernel, over which items, with what workspace."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from fused_lwlr.kernels.constants import most_registers
from fused_lwlr.kernels.control import Balance, Factors, Gate, Scale
from fused_lwlr.kernels.hyper import Number
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton import queue, update
from fused_lwlr.kernels.triton.carried import carried_of
from fused_lwlr.kernels.triton.formula import compiled
from fused_lwlr.kernels.triton.hyper import ABSENT, Staged, packed_rows, padded, staged
from fused_lwlr.kernels.triton.image import Image, image_of
from fused_lwlr.kernels.triton.launch import Bound, launch, residents
from fused_lwlr.kernels.triton.workspace import Workspace

STATES = 3
"""Columns of state that a rule has at most."""
TILE = update.BLOCK * queue.PASSES
PLACES = {"W": 0, "G": 1, "X": 2, "Y": 3, "Z": 4, "M": 6}
"""Columns by the names of their dtypes in the kernels."""
MORE = ("ema",)
"""Columns that only some tables have, of which no norm is."""
NO_GATE = Gate()


@dataclass(frozen=True, eq=False)
class Rule:
    """What tells SGD from AdamW.

    Attributes:
        name: in `LEAST_RESIDENT`.
        states: columns of state.
        function: see `update`.
        coefficients: see `update`.
        row: the numbers of a hyper row.
        moving: those of `MOVING`.
        options: what all others come from.
    """

    name: str
    states: tuple[str, ...]
    function: Any
    coefficients: Any
    row: Callable[[Any], tuple[Number, ...]]
    moving: Callable[[Any], tuple[Number, float, float]]
    options: Callable[[Any], tuple[Any, ...]]

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """All columns, in the order of their dtypes in the kernels."""
        return ("param", "grad", *self.states, *[""] * (STATES - len(self.states)), "step", "master_weight")


@dataclass
class Variant:
    """What one kind of step of a table needs besides the numbers of each: made at the first."""

    bound: Bound
    written: list[str]
    work: Any = None
    """The `Workspace`, where there is a queue."""
    moving: Sequence[Number | None] = ABSENT
    """The numbers of `MOVING` that the next launch takes."""


Take = Callable[[], Tensor | None]
"""Launches a step of a table, which it must not hold, since the table holds it."""


@dataclass(slots=True)
class Last:
    """The last step of a table, which the next one often differs from in its numbers and gradients only.

    Attributes:
        options: of each row, what its data comes from.
        data: all rows.
        ending: what every row ends with.
        shares: whether the kernel takes the numbers of `MOVING`.
    """

    scale: Scale | None
    write: bool
    rounding_seed: int | None
    options: list[tuple[Any, ...]]
    data: bytes
    ending: tuple[float, ...]
    shares: bool
    variant: Variant
    take: Take

    def numbers(self, rule: Rule, hyper: Sequence[Any]) -> tuple[bytes, Sequence[Number]] | None:
        """The data of as many rows, and what they share; None if the kernel of this step does not take them so."""
        if self.shares:
            shared = None
            for i, row in enumerate(hyper):
                # a tensor is not to be compared
                if type(row.lr) is not float or type(row.weight_decay) is not float:
                    break
                if rule.options(row) != self.options[i]:
                    break
                moving = rule.moving(row)
                if shared is not None and moving != shared:
                    break
                shared = moving
            else:
                return self.data, shared or ()
        packed = packed_rows(list(map(rule.row, hyper)), self.ending)
        if packed is None or bool(packed[1]) != self.shares:
            return None
        self.options, self.data = list(map(rule.options, hyper)), packed[0]
        return packed


def prepare(
    table: Table,
    rule: Rule,
    hyper: Sequence[Any],
    scale: Scale | Factors | Balance | None,
    gate: Gate | None,
    write: bool,
    rounding_seed: int | None,
) -> Callable[[], Tensor | None]:
    """All of a step of a rule on every row of a table but its one launch, which what is returned does."""
    last: Last | None = table.launches.get(rule)
    if (
        last is not None
        and gate is None
        and scale is last.scale
        and write == last.write
        and rounding_seed == last.rounding_seed
        and len(hyper) == len(last.options)
        and (known := last.numbers(rule, hyper)) is not None
    ):
        data, shared = known
        last.variant.bound.image.refresh(table, data)
        last.variant.moving = shared or ABSENT
        return last.take
    # what follows may give the image another workspace
    table.launches.pop(rule, None)
    rows = list(map(rule.row, hyper))
    ending = padded(rows, scale.numbers if isinstance(scale, Scale) else ())
    numbers = staged(rows, ending, table.columns["param"][0].device)
    image = image_of(table, rule.columns, numbers, tile=TILE, more=MORE)
    if scale is None and gate is None and rounding_seed is None and image.dtypes["step"] is None:
        variant, take = _plain(table, image, rule, numbers, write=write)
    else:
        variant, take = _queued(
            table, image, rule, numbers, scale, gate or NO_GATE, write=write, rounding_seed=rounding_seed
        )
    if rows and gate is None and not numbers.live and (scale is None or isinstance(scale, Scale)):
        options, shares = list(map(rule.options, hyper)), bool(numbers.shared)
        table.launches[rule] = Last(scale, write, rounding_seed, options, numbers.data, ending, shares, variant, take)
    return take


def _plain(table: Table, image: Image, rule: Rule, hyper: Staged, *, write: bool) -> tuple[Variant, Take]:
    """A step in which no tile waits for another."""
    key = (rule, hyper.live, write)
    variant = table.launches.get(key)
    if variant is None or variant.bound.image is not image:
        variant = table.launches[key] = _plain_variant(image, rule, live=hyper.live, write=write)
    variant.moving = hyper.shared or ABSENT
    variant.bound.ready(variant.moving)

    def take() -> None:
        launch(variant.bound, variant.moving)
        if write:
            image.finish(variant.written)

    return variant, take


def _plain_variant(image: Image, rule: Rule, *, live: bool, write: bool) -> Variant:
    """What the kernel without a queue is compiled for."""
    written, passes, meta = _common(image, rule, live=live, write=write)
    tiles = image.tiles(update.BLOCK)
    return Variant(Bound(update.step_kernel, image, tiles, programs=len(tiles), passes=passes, **meta), written)


def _queued(
    table: Table,
    image: Image,
    rule: Rule,
    hyper: Staged,
    scale: Scale | Factors | Balance | None,
    gate: Gate,
    *,
    write: bool,
    rounding_seed: int | None,
) -> tuple[Variant, Take]:
    """A step by a queue: of norms and updates, or with numbers that only the device knows."""
    kind = type(scale)
    formula = scale.formula if isinstance(scale, Scale) else None
    known = scale.values.contiguous() if isinstance(scale, Factors) else None
    balance = kind is Balance
    carried, rescale = carried_of(table), gate.totals is not None and image.rescales
    place = None if scale is None else scale.place
    key = (rule, hyper.live, write, rescale, gate.totals is None, gate.skip, kind, place, formula)
    variant = table.launches.get(key)
    if variant is None or variant.bound.image is not image or variant.work is not image.workspace:
        variant = table.launches[key] = _queue_variant(
            image, rule, scale, gate, live=hyper.live, write=write, rescale=rescale
        )
    work = variant.work
    arguments = (
        work.tiles, *work.buffers, carried.totals if gate.totals is None else gate.totals, carried.totals,
        gate.max_norm, gate.grad_scale, gate.found_inf, known, carried.rows if balance and write else None,
        rounding_seed,
    )  # fmt: skip
    variant.moving = hyper.shared or ABSENT
    variant.bound.ready((*variant.moving, *arguments))

    def take() -> Tensor | None:
        launch(variant.bound, (*variant.moving, *arguments))
        if write:
            image.finish(variant.written)
            if rescale or balance:
                carried.remember(image.params)
        image.remember(write)
        return work.statistics if formula is not None else None

    return variant, take


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
        STEP=image.dtypes["step"], COEFFICIENTS=rule.coefficients,
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
    meta: dict[str, Any] = {key: image.dtypes[rule.columns[at]] for key, at in PLACES.items()}
    meta |= {"E": image.dtypes.get("ema"), "RULE": rule.function, "LIVE": live}
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
