"""Every variant of the kernels that is launched, with its compile-time arguments."""

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton.language as tl
from triton.backends.compiler import GPUTarget

from fused_lwlr import ELR, Hyperball
from fused_lwlr.kernels import ADAMW, LION, LR_IN_MOMENTUM, SGD, Rule, constants, sphere

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
    "addresses": "*i64",
    "floats": "*fp32",
    "items": "*i32",
    "shared_lr": "fp32",
    "shared_c1": "fp32",
    "shared_c2": "fp32",
    "counters": "*i32",
    "partials": "*fp32",
    "prints": "*i32",
    "factors": "*fp32",
    "arrivals": "*i32",
    "results": "*fp64",
    "statistics": "*fp64",
    "totals": "*fp64",
    "next_totals": "*fp64",
    "max_norm": "fp32",
    "grad_scale": "*fp32",
    "found_inf": "*fp32",
    "known_factors": "*fp64",
    "row_sums": "*fp64",
}
"""Of the arguments that are not compile-time; int32 where not said."""


class Variant(NamedTuple):
    """A kernel with its compile-time arguments.

    Attributes:
        kind: the key of `constants.LEAST_RESIDENT` that it falls under.
    """

    name: str
    kind: str
    kernel: Any
    constants: dict[str, Any]

    @property
    def registers(self) -> int:
        """Those that it is launched with at most, for each thread."""
        return constants.most_registers(self.kind)


def cautious(rule: Rule) -> Rule:
    """The rule with cautious decay."""
    assert rule.cautious is not None
    return rule.cautious


def dtypes(dtype: Any, columns: str, single: str = "") -> tuple[Any, ...]:
    """`DTYPES` of the kernels, of which some columns have a dtype and some are float32."""
    return tuple(tl.float32 if name in single else dtype if name in columns else None for name in "WGXYZME")


def variants(dtype: Any) -> Iterator[Variant]:
    """Every variant that is launched for parameters of a dtype."""
    rules = {
        "sgd": (SGD, "", 16),
        "sgd momentum": (SGD, "X", 16),
        "sgd lr in momentum": (LR_IN_MOMENTUM, "X", 16),
        "adamw": (ADAMW, "XY", 20),
        "adamw amsgrad": (ADAMW, "XYZ", 20),
        "lion": (LION, "X", 16),
        "adamw cautious": (cautious(ADAMW), "XY", 20),
        "lion cautious": (cautious(LION), "X", 16),
    }
    made = {}
    for name, (rule, states, width) in rules.items():
        columns = dtypes(dtype, "WG" + states)
        meta = {"DTYPES": columns, "RULE": step.rule_of(rule, columns), "ON_DEVICE": False}
        meta |= {"BLOCK": constants.GPU.step_block, "WIDTH": width}
        made[name] = (rule, meta)
        yield Variant(name, name.split()[0], update.step_kernel, meta)
    # of param groups with different rates
    own = dict.fromkeys(("shared_lr", "shared_c1", "shared_c2"))
    if dtype == tl.float32:
        yield Variant("adamw, groups", "adamw", update.step_kernel, {**made["adamw"][1], **own})
    else:
        exact = {"DTYPES": dtypes(dtype, "WG", "XYM"), "RULE": formula.compiled(ADAMW.update)}
        yield Variant("adamw, master", "adamw", update.step_kernel, {**made["adamw"][1], **exact})
    if dtype == tl.bfloat16:
        yield Variant(
            "adamw, ema", "adamw", update.step_kernel, {**made["adamw"][1], "DTYPES": dtypes(dtype, "WGXY", "E")}
        )
    for name, place in (("sgd momentum", "gradient"), ("adamw", "direction"), ("lion", "direction")):
        rule, meta = made[name]
        kind = f"{name.split()[0]} queue"
        scaled = {
            **meta, "STEP": None, "COEFFICIENTS": formula.compiled(rule.coefficients), "WIDTH": meta["WIDTH"] + 2,
            "FORMULA": formula.compiled(ELR.formula), "PLACE": place, "NUMBERS": 2,
            "GATED": False, "SKIP": False, "RESCALE": False, "WRITE": True,
            "BLOCK": constants.GPU.block, "PASSES": constants.GPU.queue_passes, "AT_ONCE": constants.GPU.at_once,
            "SLOTS": constants.GPU.queue_slots, "RADIUS": None, "RETRACTION": None, "UPDATE": None,
        }  # fmt: skip
        absent = dict.fromkeys(("grad_scale", "found_inf", "known_factors", "row_sums", "seed"))
        yield Variant(f"{name}, ELR", kind, queue.queue_kernel, {**scaled, **absent})
        spheres = {
            "FORMULA": formula.compiled(Hyperball.formula), "PLACE": "direction", "NUMBERS": 0, "RADIUS": 11,
            "RETRACTION": formula.compiled(sphere.retraction), "UPDATE": formula.compiled(sphere.update_sq_sum),
        }  # fmt: skip
        yield Variant(f"{name}, Hyperball", kind, queue.queue_kernel, {**scaled, **absent, **spheres})
        everything = {"STEP": tl.float32, "GATED": True, "SKIP": True, "RESCALE": name == "sgd momentum"}
        unused = {"known_factors": None, "row_sums": None, "seed": None, **own}
        yield Variant(f"{name}, all", f"{kind}, gated", queue.queue_kernel, {**scaled, **everything, **unused})
        if (name, dtype) == ("adamw", tl.float32):
            balanced = {**scaled, "FORMULA": None, "PLACE": "gradient", "NUMBERS": 0, "GATED": True}
            balanced |= {key: None for key in absent if key != "row_sums"}
            yield Variant(f"{name}, balanced", f"{kind}, gated", queue.queue_kernel, balanced)
            yield Variant(
                f"{name}, ELR, ema", kind, queue.queue_kernel, {**scaled, **absent, "DTYPES": dtypes(dtype, "WGXYE")}
            )
        if dtype != tl.float32:
            plain = {"STEP": tl.float32, "FORMULA": None, "PLACE": "gradient", "NUMBERS": 0, "ON_DEVICE": True, **own}
            del absent["seed"]
            yield Variant(f"{name}, noise", f"{kind}, gated", queue.queue_kernel, {**scaled, **absent, **plain})
    meta = {"DTYPES": (dtype, dtype), "TOTALS": False, "grad_scale": None, "BLOCK": constants.GPU.block}
    meta |= {
        "PASSES": constants.GPU.statistics_passes, "AT_ONCE": constants.GPU.at_once,
        "SLOTS": constants.GPU.statistics_slots,
    }  # fmt: skip
    yield Variant("statistics", "statistics", statistics.statistics_kernel, meta)
    yield Variant("totals", "totals", statistics.statistics_kernel, {**meta, "DTYPES": (None, dtype), "TOTALS": True})
