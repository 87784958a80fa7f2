"""Every variant of the kernels that is launched, with its compile-time arguments."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import triton.language as tl
from triton.backends.compiler import GPUTarget

from fused_lwlr import ELR, Hyperball
from fused_lwlr.kernels import ADAMW, LION, SGD, Rule, constants
from fused_lwlr.kernels.triton.numbers import HEADER

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
    "addresses": "*i64",
    **dict.fromkeys(("items", "counters", "checksums", "arrivals"), "*i32"),
    **dict.fromkeys(("floats", "partials", "factors", "grad_scale", "found_inf"), "*fp32"),
    **dict.fromkeys(("results", "statistics", "totals", "known_factors"), "*fp64"),
}
"""Types of the run-time arguments; int32 unless listed."""


class Variant(NamedTuple):
    """A kernel with its compile-time arguments.

    Attributes:
        least_resident: programs that a multiprocessor must have the registers for, see `constants.least_resident`.
    """

    name: str
    least_resident: int
    kernel: Any
    constants: dict[str, Any]

    @property
    def registers(self) -> int:
        """Most registers for each thread of a launch."""
        return constants.most_registers(self.least_resident)


def dtypes(dtype: Any, columns: str, single: str = "", states: int = 0) -> tuple[Any, ...]:
    """Returns `DTYPES` of the kernels for a rule; columns in `single` are float32."""
    names = "WGMEXYZ"[: 4 + states]
    return tuple(tl.float32 if name in single else dtype if name in columns else None for name in names)


def plain(rule: Rule) -> int:
    """Returns the programs that a multiprocessor must hold of a step without norms."""
    return rule.least_resident or constants.least_resident("step", len(rule.states))


def variants(dtype: Any) -> Iterator[Variant]:
    """Every variant that is launched for parameters of a dtype."""
    rules = {
        "sgd": (SGD, ""),
        "sgd momentum": (SGD, "X"),
        "adamw": (ADAMW, "XY"),
        "adamw amsgrad": (ADAMW, "XYZ"),
        "lion": (LION, "X"),
        "adamw cautious": (replace(ADAMW, decay="cautious"), "XY"),
        "lion cautious": (replace(LION, decay="cautious"), "X"),
    }
    made: dict[str, tuple[Rule, dict[str, Any]]] = {}
    for name, (rule, states) in rules.items():
        columns = dtypes(dtype, "WG" + states, states=len(rule.states))
        numbers = {"sgd": 4, "adamw": 8, "lion": 4}[rule.name]
        meta = {"DTYPES": columns, "RULE": step.rule_of(rule, columns), "DECAY": rule.decay, "ON_DEVICE": False}
        meta |= {"BLOCK": constants.GPU.step_block, "WIDTH": HEADER.value + numbers}
        made[name] = (rule, meta)
        yield Variant(name, plain(rule), update.step_kernel, meta)
    rule, meta = made["adamw"]
    if dtype != tl.float32:
        exact = {"DTYPES": dtypes(dtype, "WG", "XYM", 3), "RULE": formula.compiled(ADAMW.update)}
        yield Variant("adamw, master", plain(rule), update.step_kernel, {**meta, **exact})
    if dtype == tl.bfloat16:
        averaged = {"DTYPES": dtypes(dtype, "WGXY", "E", 3)}
        yield Variant("adamw, ema", plain(rule), update.step_kernel, {**meta, **averaged})
    yield from _scaled(dtype, made)
    meta = {"DTYPES": (dtype, dtype), "grad_scale": None, "BLOCK": constants.GPU.block}
    meta |= {
        "PASSES": constants.GPU.statistics_passes, "AT_ONCE": constants.GPU.at_once,
        "SLOTS": constants.GPU.statistics_slots,
    }  # fmt: skip
    yield Variant("statistics", constants.least_resident("statistics"), statistics.statistics_kernel, meta)
    of_gradients = {**meta, "DTYPES": (None, dtype)}
    yield Variant(
        "statistics of gradients", constants.least_resident("statistics"), statistics.statistics_kernel, of_gradients
    )


def _scaled(dtype: Any, made: dict[str, tuple[Rule, dict[str, Any]]]) -> Iterator[Variant]:
    """The variants with norms, from the rules and compile-time arguments of steps without."""
    for name, target in (("sgd momentum", "gradient"), ("adamw", "direction"), ("lion", "direction")):
        rule, meta = made[name]
        least = constants.least_resident("queue", len(rule.states))
        scaled = {
            **meta, "STEP": None, "COEFFICIENTS": formula.compiled(rule.coefficients), "WIDTH": meta["WIDTH"] + 2,
            "FORMULA": formula.compiled(ELR.formula), "TARGET": target,
            "ARGUMENTS": step.arguments_of(ELR(0.1).scale(rule), meta["WIDTH"] + 2),
            "SKIP": False, "RESCALE": False, "WRITE": True,
            "BLOCK": constants.GPU.block, "PASSES": constants.GPU.queue_passes, "AT_ONCE": constants.GPU.at_once,
            "SLOTS": constants.GPU.queue_slots, "RETRACTION": None,
        }  # fmt: skip
        absent = dict.fromkeys(("totals", "grad_scale", "found_inf", "known_factors", "seed"))
        yield Variant(f"{name}, ELR", least, queue.queue_kernel, {**scaled, **absent})
        spheres = {
            "FORMULA": formula.compiled(Hyperball.formula), "TARGET": "direction",
            "ARGUMENTS": step.arguments_of(Hyperball().scale(rule), meta["WIDTH"] + 2),
            "RETRACTION": (0.0, 0.0, True),
        }  # fmt: skip
        yield Variant(f"{name}, Hyperball", least, queue.queue_kernel, {**scaled, **absent, **spheres})
        everything = {"STEP": tl.float32, "SKIP": True, "RESCALE": name == "sgd momentum"}
        unused = {"known_factors": None, "seed": None}
        yield Variant(f"{name}, all", least, queue.queue_kernel, {**scaled, **everything, **unused})
        if (name, dtype) == ("adamw", tl.float32):
            balanced = {**scaled, "FORMULA": None, "TARGET": "direction"}
            balanced |= {key: None for key in absent if key != "known_factors"}
            yield Variant(f"{name}, balanced", least, queue.queue_kernel, balanced)
            yield Variant(
                f"{name}, ELR, ema",
                least,
                queue.queue_kernel,
                {**scaled, **absent, "DTYPES": dtypes(dtype, "WGXYE", states=3)},
            )
        if dtype != tl.float32:
            noise = {"STEP": tl.float32, "FORMULA": None, "TARGET": "gradient", "ON_DEVICE": True}
            del absent["seed"]
            yield Variant(f"{name}, noise", least, queue.queue_kernel, {**scaled, **absent, **noise})
