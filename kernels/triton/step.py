"""The host side of every step: it chooses the kernel, the items and the workspace."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler.errors import CompilationError

from fused_lwlr.kernels.constants import PER_PROCESSOR, WARPS, least_resident, most_registers
from fused_lwlr.kernels.native import UnsupportedError
from fused_lwlr.kernels.rules.base import Rule
from fused_lwlr.kernels.step_arguments import FORMULA_STATISTICS, Factors, Gate, Retraction, Scale
from fused_lwlr.kernels.table import Table
from fused_lwlr.kernels.triton import queue, update
from fused_lwlr.kernels.triton.device_table import DeviceTable, device_table_of, tile_list
from fused_lwlr.kernels.triton.formula import compiled
from fused_lwlr.kernels.triton.launch import Kernel, launch, residents, sizes_of
from fused_lwlr.kernels.triton.numbers import Numbers, numbers_of
from fused_lwlr.kernels.triton.workspace import workspace_of

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
    scale: Scale | Factors | None = None,
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
    scale: Scale | Factors | None = None,
    gate: Gate | None = None,
    *,
    write: bool = True,
    rounding_seed: int | None = None,
) -> Callable[[], Tensor | None]:
    """Runs the part of `step` that can fail, and writes nothing. Call the returned function once for the rest."""
    more = tuple(scale.numbers.values()) if isinstance(scale, Scale) else ()
    numbers = numbers_of(rule, hyper, more, table)
    sizes = sizes_of(table.columns["param"][0].device)
    device_table = device_table_of(table, columns_of(rule), numbers.rows.shape, tile=sizes.queue_tile, more=MORE)
    plain = write and scale is None and gate is None and rounding_seed is None
    if not plain or device_table.dtypes["step"] is not None:
        return _queued(table, device_table, rule, numbers, scale, gate or NO_GATE, write, rounding_seed)
    # no tile waits for another
    device_table.refresh(table, numbers)
    items = device_table.items_of("tiles", partial(tile_list, device_table.numel, sizes.step_block))
    key = rule, numbers.on_device
    kernel = table.cache.get(key)
    if kernel is None:
        kernel = table.cache[key] = Kernel(
            update.step_kernel, device_table, items, (),
            registers=most_registers(rule.least_resident or least_resident("step", len(rule.states))),
            BLOCK=sizes.step_block, **_common(device_table, rule, on_device=numbers.on_device),
        )  # fmt: skip

    def take() -> None:
        launch(kernel, items, ())
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
    scale: Scale | Factors | None,
    gate: Gate,
    write: bool,
    rounding_seed: int | None,
) -> Callable[[], Tensor | None]:
    """Prepares a step by a queue: of norms and updates, or with numbers on the device."""
    formula = scale if isinstance(scale, Scale) else None
    retraction, known = formula and formula.retraction, None
    if isinstance(scale, Factors):
        known = scale.values.contiguous()
        if scale.rho is not None:
            known, retraction = torch.stack((scale.values, scale.rho)), RHO_IS_KNOWN
    target = None if scale is None else scale.target
    device, states = device_table.buffer.device, len(rule.states)
    rescale = gate.totals is not None and device_table.rescales
    work = workspace_of(
        device_table, target, residents(device, least_resident("queue", states)), retracts=retraction is not None
    )
    device_table.refresh(table, numbers)
    items = work.items(device_table, norms=not write or formula is not None, updates=write)
    arguments = (
        work.tiles, *work.buffers, gate.totals, gate.max_norm, gate.grad_scale, gate.found_inf, known, rounding_seed,
    )  # fmt: skip
    key = (
        rule, numbers.on_device, write, rescale, gate.skip, target, retraction,
        formula and (formula.formula, *formula.numbers), *map(type, arguments),
    )  # fmt: skip
    kernel = table.cache.get(key)
    if kernel is None:
        kernel = table.cache[key] = _queue_kernel(
            device_table, items, arguments, formula, registers=most_registers(least_resident("queue", states)),
            **_common(device_table, rule, on_device=numbers.on_device), TARGET=target or "gradient",
            COEFFICIENTS=compiled(rule.coefficients), GATED=gate.totals is not None,
            SKIP=gate.totals is not None and gate.skip, RESCALE=rescale and write, WRITE=write,
            RETRACTION=None if retraction is None else tuple(map(float, retraction[:2])),
            RADIUS=device_table.entries["radius"] if retraction is not None and retraction.fixed else None,
        )  # fmt: skip

    def take() -> Tensor | None:
        launch(kernel, items, arguments, residents(device, PER_PROCESSOR))
        if write:
            device_table.finish()
        if target != "direction":
            device_table.remember_norms()
        return work.statistics if formula is not None else None

    return take


def _queue_kernel(
    device_table: DeviceTable, items: Tensor, arguments: Sequence[Any], formula: Scale | None, **meta: Any
) -> Kernel:
    """Returns the queue kernel with its compile-time arguments.

    Raises:
        ValueError: the formula cannot be compiled.
    """
    sizes = sizes_of(device_table.buffer.device)
    try:
        return Kernel(
            queue.queue_kernel, device_table, items, arguments, **meta, STEP=device_table.dtypes["step"],
            FORMULA=compiled(formula.formula) if formula is not None else None,
            ARGUMENTS=arguments_of(formula) if formula is not None else (),
            NUMBERS=len(formula.numbers) if formula is not None else 0,
            BLOCK=sizes.block, PASSES=sizes.queue_passes, AT_ONCE=sizes.at_once, SLOTS=sizes.queue_slots,
        )  # fmt: skip
    except (CompilationError, UnsupportedError) as error:
        if formula is None:
            raise
        name = formula.formula.__qualname__
        raise ValueError(f"a step with {name} cannot be compiled: {reason_of(error)}") from error


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
        "WIDTH": device_table.hyper_shape[1], "num_warps": WARPS,
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
