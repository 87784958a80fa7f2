"""The host side of every step: it chooses the kernel, the items and the workspace."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from fused_lwlr.kernels.constants import PER_PROCESSOR, WARPS, least_resident, max_registers
from fused_lwlr.kernels.rules.base import Rule
from fused_lwlr.kernels.step_arguments import (
    FACTOR,
    FORMULA_STATISTICS,
    RETRACTION_STATISTICS,
    STEP_STATISTICS,
    FactorFormula,
    Factors,
    FactorTarget,
    Gate,
)
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton import queue, update, work
from fused_lwlr.kernels.triton.device_table import SCALAR_COLUMNS, DeviceTable
from fused_lwlr.kernels.triton.formula import compiled
from fused_lwlr.kernels.triton.hyper_rows import HyperRows, hyper_rows_of
from fused_lwlr.kernels.triton.launch import Kernel, launch, resident_programs, sizes_of


def step(*args: Any, **options: Any) -> Tensor | None:
    """Takes one step of a rule, in one launch: the same as `fused_lwlr.kernels.reference.step`."""
    return prepare(*args, **options)()


def prepare(
    rule: Rule,
    table: Table,
    hyper: Sequence[Any],
    factor: FactorFormula | Factors | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Callable[[], Tensor | None]:
    """Runs the part of `step` that can fail, and writes nothing. Call the returned function once for the rest."""
    hyper_rows = hyper_rows_of(rule, hyper, factor if isinstance(factor, FactorFormula) else None, table)
    device = table.columns["param"][0].device
    columns, shape = ("param", "grad", "master_weight", "ema", *rule.states), hyper_rows.values.shape
    device_table = table.device_tables.get((columns, shape))
    if device_table is None:
        tile = sizes_of(device).queue_tile
        device_table = table.device_tables[columns, shape] = DeviceTable(table, columns, shape, tile)
    has_options = not write or factor is not None or gate is not None or rounding_seed is not None
    if has_options or device_table.dtypes["step"] is not None:
        return _queued(table, device_table, rule, hyper_rows, factor, gate or Gate(), write, rounding_seed)
    # otherwise no tile waits for another
    device_table.refresh(table, hyper_rows)
    kernel = device_table.kernel(
        ("step", rule, hyper_rows.on_device),
        lambda: work.tile_list(device_table.active_numel, sizes_of(device).step_block, short_first=True),
        lambda items: Kernel(
            update.step_kernel, device_table, items, (),
            registers=max_registers(rule.least_resident or least_resident("step", len(rule.states))),
            BLOCK=sizes_of(device).step_block, **_common(device_table, rule, hyper_rows),
        ),
    )  # fmt: skip

    def take_step() -> None:
        launch(kernel, device_table, ())
        device_table.commit_writes()

    return take_step


def _queued(
    table: Table, device_table: DeviceTable, rule: Rule, hyper_rows: HyperRows, factor: FactorFormula | Factors | None,
    gate: Gate, write: bool, rounding_seed: int | None,
) -> Callable[[], Tensor | None]:  # fmt: skip
    """Prepares a step by the queue: with factors, a gate, random rounding or counts on the device, or of norms only."""
    device = device_table.buffer.device
    formula = factor if isinstance(factor, FactorFormula) else None
    retraction = None if formula is None else formula.retraction
    fixed_radius = retraction is not None and retraction.fixed
    target = None if factor is None else factor.target
    has_factor = factor is not None
    if has_factor not in device_table.workspaces:
        device_table.workspaces[has_factor] = queue_workspace(device_table, has_factor=has_factor)
    device_table.refresh(table, hyper_rows)
    counters, partials, checksums, factors, statistics = device_table.workspaces[has_factor]
    retracts = retraction is not None
    if isinstance(factor, Factors):
        retracts = factor.rho is not None
        factors = factor.values.contiguous() if factor.rho is None else torch.stack((factor.values, factor.rho))
    arguments = (
        device_table.tiles, counters, partials, checksums, factors, statistics, gate.totals, gate.max_norm,
        gate.grad_scale, gate.found_inf, rounding_seed,
    )  # fmt: skip
    # compiled again where a name outside of the formula has another value
    function = None if formula is None else compiled(formula.function)
    # on a CPU, the most programs depend on the number of threads
    key: list[Any] = ["queue", rule, hyper_rows.on_device, write, gate.skip, target, retracts, torch.get_num_threads()]
    key += map(type, arguments)
    if formula is not None:
        key += (function, *formula.constants, fixed_radius)

    def make(items: Tensor) -> Kernel:
        sizes = sizes_of(device)
        return Kernel(
            queue.queue_kernel, device_table, items, arguments,
            registers=max_registers(least_resident("queue", len(rule.states))),
            max_programs=resident_programs(device, PER_PROCESSOR),
            **_common(device_table, rule, hyper_rows), STEP_DTYPE=device_table.dtypes["step"], TARGET=target,
            FORMULA=function, RETRACTS=retracts, FIXED_RADIUS=fixed_radius,
            ARGUMENTS=None if formula is None else arguments_of(formula, device_table.hyper_shape[1]),
            COEFFICIENTS=compiled(rule.coefficients), SKIP=gate.totals is not None and gate.skip,
            RESCALE=write and gate.totals is not None and table.rescales, WRITE=write, BLOCK=sizes.block,
            PASSES=sizes.queue_passes, AT_ONCE=sizes.at_once, SLOTS=sizes.queue_slots,
        )  # fmt: skip

    kernel = device_table.kernel(
        tuple(key), lambda: queue_items(device_table, target, rule, norms=formula is not None, updates=write), make
    )

    def take_step() -> Tensor | None:
        launch(kernel, device_table, arguments, counts_steps=write and device_table.dtypes["step"] is not None)
        if write:
            device_table.commit_writes()
        if has_factor:
            device_table.remember_norms(stored=target != "direction")
        if formula is None:
            return None
        return statistics if retracts else statistics[:, : len(STEP_STATISTICS)]

    return take_step


def queue_workspace(device_table: DeviceTable, *, has_factor: bool) -> tuple[Tensor, ...]:
    """Returns counters, partials, checksums, factors and statistics, see `queue_kernel`."""
    device = device_table.buffer.device
    # without a factor no result is stored for a row or a tile
    rows, tiles = (device_table.rows, device_table.tiles) if has_factor else (0, 0)
    statistics = torch.zeros(rows, len(RETRACTION_STATISTICS), dtype=torch.float64, device=device)
    # a row without elements has no item: its factor stays 1
    statistics[:, FACTOR] = 1
    return (
        torch.zeros(2 + 2 * device_table.rows, dtype=torch.int32, device=device),
        torch.zeros(6 * tiles, dtype=torch.float32, device=device),
        torch.zeros(tiles, dtype=torch.int32, device=device),
        torch.ones(2 * rows, dtype=torch.float32, device=device),
        statistics,
    )


def queue_items(
    device_table: DeviceTable, target: FactorTarget | None, rule: Rule, *, norms: bool, updates: bool
) -> np.ndarray:
    """Returns the items of active rows, int32 [n, 2]: norms, updates, or both in the order of `schedule`."""
    sizes = sizes_of(device_table.buffer.device)
    # one kind of all rows, in their order
    segments = 2 * np.arange(device_table.rows) + updates
    if norms and updates:
        # norms read only the gradient, or, for a direction, all columns except the average
        itemsizes, numel = device_table.itemsizes, device_table.active_numel
        itemsize = sum(itemsizes.values()) - itemsizes["ema"] if target == "direction" else itemsizes["grad"]
        counts = -(-numel // sizes.queue_tile)
        programs = resident_programs(device_table.buffer.device, least_resident("queue", len(rule.states)))
        segments = work.schedule(itemsize * numel, counts, sizes.window, programs)
    is_active = device_table.active[segments >> 1]
    return work.item_list(segments[is_active], device_table.numel, sizes.queue_tile)


def arguments_of(factor: FactorFormula, width: int) -> tuple[int, ...]:
    """Returns a number for each argument of a formula: where `finalize_row` finds it.

    For a statistic it is the index in `FORMULA_STATISTICS`. For a constant it is `len(FORMULA_STATISTICS)` plus the
    offset in a hyper row of this width, which ends with the constants.
    """
    indices = {name: i for i, name in enumerate(FORMULA_STATISTICS)}
    first_offset = width - len(factor.constants)
    indices |= {name: len(FORMULA_STATISTICS) + first_offset + i for i, name in enumerate(factor.constants)}
    return tuple(indices[name] for name in factor.arguments)


def _common(device_table: DeviceTable, rule: Rule, hyper_rows: HyperRows) -> dict[str, Any]:
    """Returns the compile-time arguments of both kernels."""
    # `prepare` has the columns in this order
    dtypes = tuple(device_table.dtypes.values())[len(SCALAR_COLUMNS) :]
    return {
        "DTYPES": dtypes, "UPDATE": compiled_update(rule, dtypes), "DECAY": rule.decay_mode,
        "ON_DEVICE": hyper_rows.on_device,
        "WIDTH": device_table.hyper_shape[1], "RULE_WIDTH": hyper_rows.rule_width, "num_warps": WARPS,
    }  # fmt: skip


def compiled_update(rule: Rule, dtypes: Sequence[Any]) -> Any:
    """Returns the Triton function of a rule: exact to the last bit, unless all results are stored in half precision."""
    weight, _, master, _, *states = dtypes
    # in the interpreter scalars are numbers of Python, which the approximate functions cannot take
    return compiled(rule.update, exact=knobs.runtime.interpret or tl.float32 in (weight, master, *states))
