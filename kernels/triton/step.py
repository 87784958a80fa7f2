"""The host side of every step: it chooses the kernel, the items and the workspace."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler.errors import CompilationError

from fused_lwlr.kernels.constants import PER_PROCESSOR, WARPS, least_resident, most_registers
from fused_lwlr.kernels.native import UnsupportedError
from fused_lwlr.kernels.rules.base import Rule
from fused_lwlr.kernels.step_arguments import FORMULA_STATISTICS, Balance, Factors, Gate, Retraction, Scale
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton import queue, update
from fused_lwlr.kernels.triton.device_table import DeviceTable, device_table_of, tile_list
from fused_lwlr.kernels.triton.formula import compiled
from fused_lwlr.kernels.triton.launch import BoundKernel, launch, residents, sizes_of
from fused_lwlr.kernels.triton.numbers import NOT_SHARED, Numbers, numbers_of
from fused_lwlr.kernels.triton.weight_norms import weight_norms_of
from fused_lwlr.kernels.triton.workspace import Workspace

STATES = 3
"""The largest number of state columns of a rule."""
MORE = ("ema", "radius")
"""Columns that only some tables have, and that norms ignore."""
NO_GATE = Gate()
RHO_IS_KNOWN = Retraction(fixed=False)


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
    """Takes one step of a rule, in one launch: the same as `fused_lwlr.kernels.reference.step`."""
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
    """Runs the part of `step` that can fail, and writes nothing. Call the returned function once for the rest."""
    more = tuple(scale.numbers.values()) if isinstance(scale, Scale) else ()
    numbers = numbers_of(rule, hyper, more, table, table.cache.get(rule))
    table.cache[rule] = numbers
    columns = columns_of(rule)
    device_table = table.cache.get(columns)
    if device_table is None or device_table.hyper_rows < numbers.rows or device_table.hyper_width != numbers.width:
        tile = sizes_of(table.columns["param"][0].device).queue_tile
        device_table = device_table_of(table, columns, numbers, tile=tile, more=MORE)
    if not (scale is None and gate is None and rounding_seed is None and device_table.dtypes["step"] is None):
        gate = gate or NO_GATE
        return _queued(table, device_table, rule, numbers, scale, gate, write=write, rounding_seed=rounding_seed)
    device_table.refresh(table, numbers)
    # no tile waits for another
    key = rule, numbers.on_device, write
    kernel = table.cache.get(key)
    if kernel is None or kernel.device_table is not device_table:
        meta = _common(device_table, rule, on_device=numbers.on_device)
        block = sizes_of(device_table.buffer.device).step_block
        registers = most_registers(rule.least_resident or least_resident("step", len(rule.states)))
        kernel = table.cache[key] = BoundKernel(
            update.step_kernel, device_table, registers=registers, BLOCK=block, **meta
        )
    items = device_table.items.get("tiles")
    if items is None:
        block = sizes_of(device_table.buffer.device).step_block
        items = device_table.make_items("tiles", lambda: tile_list(device_table.numel, block))
    arguments = numbers.shared or NOT_SHARED
    if tuple(map(type, arguments)) not in kernel.compiled:
        kernel.compile(items, arguments)

    def take() -> None:
        launch(kernel, items, arguments)
        if write:
            device_table.finish()

    return take


@cache
def columns_of(rule: Rule) -> tuple[str, ...]:
    """Returns the columns that a kernel finds at fixed places, see tile.py."""
    return ("param", "grad", "master_weight", *rule.states, *[""] * (STATES - len(rule.states)), "step")


def _queued(
    table: Table,
    device_table: DeviceTable,
    rule: Rule,
    numbers: Numbers,
    scale: Scale | Factors | Balance | None,
    gate: Gate,
    *,
    write: bool,
    rounding_seed: int | None,
) -> Callable[[], Tensor | None]:
    """Prepares a step by a queue: of norms and updates, or with numbers on the device."""
    formula = scale.formula if isinstance(scale, Scale) else None
    known, retraction = None, scale.retraction if isinstance(scale, Scale) else None
    if isinstance(scale, Factors):
        known = scale.values.contiguous()
        if scale.rho is not None:
            known, retraction = torch.stack((scale.values, scale.rho)), RHO_IS_KNOWN
    balance = isinstance(scale, Balance)
    norms, rescale = weight_norms_of(table), gate.totals is not None and device_table.rescales
    totals = norms.totals
    device, work = device_table.buffer.device, device_table.workspace
    programs = residents(device, least_resident("queue", len(rule.states)))
    work_key = scale.target if isinstance(scale, (Scale, Factors)) else None, programs, retraction is not None
    if work is None or work.key != work_key:
        work = device_table.workspace = Workspace(device_table, sizes_of(device), *work_key)
        device_table.keep_buffers(work.buffers)
        # its sums of squares are zeros
        norms.forget_rows()
    device_table.refresh(table, numbers)
    target = None if scale is None else scale.target
    key = (
        rule, numbers.on_device, write, rescale, gate.totals is None, gate.skip, type(scale), target, formula,
        retraction, tuple(scale.numbers) if isinstance(scale, Scale) else (),
    )  # fmt: skip
    kernel, workspace = table.cache.get(key, (None, None))
    if kernel is None or kernel.device_table is not device_table or workspace is not work:
        kernel = _queue_kernel(device_table, rule, scale, gate, numbers.on_device, write, rescale, retraction)
        table.cache[key] = kernel, work
    items = work.items(device_table, norms=not write or formula is not None, updates=write)
    arguments = (
        *(numbers.shared or NOT_SHARED), work.tiles, *work.buffers,
        totals if gate.totals is None else gate.totals, totals, gate.max_norm, gate.grad_scale,
        gate.found_inf, known, norms.row_sums if balance and write else None, rounding_seed,
    )  # fmt: skip
    if tuple(map(type, arguments)) not in kernel.compiled:
        try:
            kernel.compile(items, arguments)
        except (CompilationError, UnsupportedError) as error:
            if formula is None:
                raise
            raise ValueError(f"a step with {formula.__qualname__} cannot be compiled: {reason_of(error)}") from error

    def take() -> Tensor | None:
        launch(kernel, items, arguments)
        if write:
            device_table.finish()
            if rescale or balance:
                norms.remember_totals(table)
        if target != "direction":
            device_table.remember_norms()
        return work.statistics if formula is not None else None

    return take


def _queue_kernel(
    device_table: DeviceTable,
    rule: Rule,
    scale: Scale | Factors | Balance | None,
    gate: Gate,
    on_device: bool,
    write: bool,
    rescale: bool,
    retraction: Retraction | None,
) -> BoundKernel:
    """Returns the queue kernel with its compile-time arguments."""
    formula = scale if isinstance(scale, Scale) else None
    device = device_table.buffer.device
    sizes = sizes_of(device)
    return BoundKernel(
        queue.queue_kernel, device_table, most_programs=residents(device, PER_PROCESSOR),
        registers=most_registers(least_resident("queue", len(rule.states))),
        **_common(device_table, rule, on_device=on_device),
        STEP=device_table.dtypes["step"], COEFFICIENTS=compiled(rule.coefficients),
        FORMULA=compiled(formula.formula) if formula is not None else None,
        ARGUMENTS=arguments_of(formula) if formula is not None else (),
        TARGET=scale.target if isinstance(scale, (Scale, Factors)) else "gradient",
        NUMBERS=len(formula.numbers) if formula is not None else 0,
        GATED=gate.totals is not None, SKIP=gate.totals is not None and gate.skip, RESCALE=rescale and write,
        WRITE=write, BLOCK=sizes.block, PASSES=sizes.queue_passes, AT_ONCE=sizes.at_once,
        SLOTS=sizes.queue_slots, RETRACTION=None if retraction is None else tuple(map(float, retraction[:2])),
        RADIUS=device_table.entries["radius"] if retraction is not None and retraction.fixed else None,
    )  # fmt: skip


def reason_of(error: BaseException) -> str:
    """Returns the innermost message of an error of the compiler, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(getattr(error, "error_message", None) or error).split())


def arguments_of(scale: Scale) -> tuple[int, ...]:
    """Returns the index of each argument of a formula in `FORMULA_STATISTICS`, and then in the numbers of the scale."""
    names = [*FORMULA_STATISTICS, *scale.numbers]
    return tuple(names.index("norm" if name == "direction_norm" else name) for name in scale.arguments)


def _common(device_table: DeviceTable, rule: Rule, *, on_device: bool) -> dict[str, Any]:
    """Returns the compile-time arguments of both kernels."""
    dtypes = tuple([device_table.dtypes.get(name) for name in ("param", "grad", "master_weight", "ema", *rule.states)])
    return {
        "DTYPES": dtypes, "RULE": rule_of(rule, dtypes), "DECAY": rule.decay, "ON_DEVICE": on_device,
        "WIDTH": device_table.hyper_width, "num_warps": WARPS,
    }  # fmt: skip


def rule_of(rule: Rule, dtypes: Sequence[Any]) -> Any:
    """Returns the Triton function of a rule: exact to the last bit, unless all results are stored in half precision.

    Args:
        rule: the rule.
        dtypes: `DTYPES`, see update.py.
    """
    weight, _, master, _, *states = dtypes
    # numbers that a compiler sees as scalars are Python's in the interpreter
    return compiled(rule.update, exact=knobs.runtime.interpret or tl.float32 in (weight, master, *states))
