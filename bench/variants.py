"""Every variant of the kernels that is launched, with its compile-time arguments."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget

from bench.machine_code import Variant
from fused_lwlr import ELR, Hyperball
from fused_lwlr.kernels import ADAMW, LION, SGD, Rule, constants
from fused_lwlr.kernels.triton.hyper_rows import HEADER

# the modules: the package exports functions of these names
statistics, queue, update, step, formula = (
    importlib.import_module(f"fused_lwlr.kernels.triton.{n}")
    for n in ("statistics", "queue", "update", "step", "formula")
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}
TYPES = {
    "max_norm": "fp32",
    "integers": "*i64",
    **dict.fromkeys(("items", "counters", "checksums", "arrivals"), "*i32"),
    **dict.fromkeys(("floats", "partials", "factors", "grad_scale", "found_inf"), "*fp32"),
    **dict.fromkeys(("results", "statistics", "totals"), "*fp64"),
}
"""Types of the run-time arguments; int32 unless listed."""


def dtypes(dtype: Any, columns: str, single: str = "", states: int = 0) -> tuple[Any, ...]:
    """Returns `DTYPES` of the kernels for a rule; columns in `single` are float32."""
    names = "WGMEXYZ"[: 4 + states]
    return tuple(tl.float32 if name in single else dtype if name in columns else None for name in names)


def variants(dtype: Any) -> Iterator[Variant]:
    """Every variant that is launched for parameters of a dtype."""
    rules = {
        "sgd": (SGD, "", 4),
        "sgd momentum": (SGD, "X", 4),
        "adamw": (ADAMW, "XY", 8),
        "adamw amsgrad": (ADAMW, "XYZ", 8),
        "lion": (LION, "X", 4),
        "adamw cautious": (replace(ADAMW, decay_mode="cautious"), "XY", 8),
        "lion cautious": (replace(LION, decay_mode="cautious"), "X", 4),
    }
    for name, (rule, states, numbers) in rules.items():
        columns = dtypes(dtype, "WG" + states, states=len(rule.states))
        meta = {
            "DTYPES": columns, "UPDATE": step.compiled_update(rule, columns), "DECAY": rule.decay_mode,
            "ON_DEVICE": False,
            "BLOCK": constants.GPU.step_block, "WIDTH": HEADER.value + numbers, "RULE_WIDTH": numbers,
        }  # fmt: skip
        changes: dict[str, dict[str, Any]] = {"": {}}
        if name == "adamw" and dtype != tl.float32:
            exact = formula.compiled(ADAMW.update)
            changes[", master"] = {"DTYPES": dtypes(dtype, "WG", "XYM", 3), "UPDATE": exact}
        if name == "adamw" and dtype == tl.bfloat16:
            changes[", ema"] = {"DTYPES": dtypes(dtype, "WGXY", "E", 3)}
        least = rule.least_resident or constants.least_resident("step", len(rule.states))
        for label, change in changes.items():
            yield Variant(name + label, least, update.step_kernel, {**meta, **change})
        if name in ("sgd momentum", "adamw", "lion"):
            yield from _scaled(dtype, name, rule, meta)
    for name, columns in (("statistics", (dtype, dtype)), ("statistics of gradients", (None, dtype))):
        meta = {
            "DTYPES": columns, "grad_scale": None, "BLOCK": constants.GPU.block, "AT_ONCE": constants.GPU.at_once,
            "PASSES": constants.GPU.statistics_passes, "SLOTS": constants.GPU.statistics_slots,
        }  # fmt: skip
        yield Variant(name, constants.least_resident("statistics"), statistics.statistics_kernel, meta)


def _scaled(dtype: Any, name: str, rule: Rule, meta: dict[str, Any]) -> Iterator[Variant]:
    """The variants with norms, from the compile-time arguments of a step without."""
    width = meta["WIDTH"] + 2
    target = "gradient" if rule is SGD else "direction"
    absent = dict.fromkeys(("totals", "grad_scale", "found_inf", "seed"))
    scaled = {
        **meta, "STEP_DTYPE": None, "COEFFICIENTS": formula.compiled(rule.coefficients), "WIDTH": width,
        "FORMULA": formula.compiled(ELR.formula), "TARGET": target,
        "ARGUMENTS": step.arguments_of(ELR(0.1).factor_formula(rule), width),
        "SKIP": False, "RESCALE": False, "WRITE": True,
        "BLOCK": constants.GPU.block, "PASSES": constants.GPU.queue_passes, "AT_ONCE": constants.GPU.at_once,
        "SLOTS": constants.GPU.queue_slots, "RETRACTS": False, "FIXED_RADIUS": False, **absent,
    }  # fmt: skip
    # changes of these arguments, and arguments that are given when the kernel runs
    found: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "ELR": ({}, ()),
        "Hyperball": ({
            "FORMULA": formula.compiled(Hyperball.formula), "TARGET": "direction",
            "ARGUMENTS": step.arguments_of(Hyperball().factor_formula(rule), width), "RETRACTS": True,
            "FIXED_RADIUS": True,
        }, ()),
        "all": (
            {"STEP_DTYPE": tl.float32, "SKIP": True, "RESCALE": rule is SGD}, ("totals", "grad_scale", "found_inf"),
        ),
    }  # fmt: skip
    if rule is ADAMW and dtype == tl.float32:
        found["balanced"] = ({"FORMULA": None}, ())
        found["ELR, ema"] = ({"DTYPES": dtypes(dtype, "WGXYE", states=3)}, ())
    if dtype != tl.float32:
        noise = {"STEP_DTYPE": tl.float32, "FORMULA": None, "TARGET": None, "ON_DEVICE": True}
        found["noise"] = (noise, ("seed",))
    for label, (changes, given) in found.items():
        arguments = {key: value for key, value in {**scaled, **changes}.items() if key not in given}
        least = constants.least_resident("queue", len(rule.states))
        yield Variant(f"{name}, {label}", least, queue.queue_kernel, arguments)
