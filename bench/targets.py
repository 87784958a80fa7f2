"""Targets and measured values: met, missed with its figure, or not measured."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

WHERE: dict[str, Callable[[dict[str, Any]], bool]] = {
    "large": lambda row: row["numel"] >= 100_000_000,
    "real": lambda row: not row["set"].startswith(("2,000", "one of")),
    "network": lambda row: row["set"] in ("ResNet-50", "ViT-S/16"),
    "tiny": lambda row: row["set"].startswith("2,000"),
}
"""Cases that a target is for."""
ONE_LAUNCH = ("ELR", "LARS", "LARC", "NG")
Found = Iterator[tuple[str, float]]


class Target(NamedTuple):
    """One bound.

    Attributes:
        what: the bounded quantity.
        limit: the bound.
        least: whether `limit` is a lower bound.
        values: results -> labelled values; the worst one counts.
    """

    what: str
    limit: float
    least: bool
    values: Callable[[dict[str, Any]], Found]


class Judged(NamedTuple):
    """A target and its result."""

    what: str
    limit: str
    found: str
    verdict: str


def _gpu(results: dict[str, Any]) -> list[dict[str, Any]]:
    gpu = results.get("gpu") or {}
    return [row for row in gpu.get("rows", ()) if "skipped" not in row]


def _ratios(
    rules: Sequence[str], methods: Sequence[str], to: tuple[str, str], key: str, where: str, *, times: bool = False
) -> Callable[[dict[str, Any]], Found]:
    """Ratios of our steps to another step (its method, "" for the same, and its name), where both were timed.

    With `times`, of the other step to ours.
    """

    def values(results: dict[str, Any]) -> Found:
        timed = {tuple(row[of] for of in ("set", "dtype", "rule", "method", "who")): row for row in _gpu(results)}
        for rule, method in itertools.product(rules, methods):
            for (name, dtype, *step), row in timed.items():
                other = timed.get((name, dtype, rule, to[0] or method, to[1]), {})
                if step == [rule, method, "ours"] and WHERE[where](row) and key in row and key in other:
                    ratio = row[key] / other[key]
                    yield f"{name} {dtype} {method}", 1 / ratio if times else ratio

    return values


def _of_copy(results: dict[str, Any]) -> Found:
    for row in _gpu(results):
        counted = row["bytes_per_second"] is not None
        if row["method"] == "multipliers" and row["who"] == "ours" and WHERE["large"](row) and counted:
            yield (
                f"{row['set']} {row['dtype']} {row['rule']}",
                row["bytes_per_second"] / max(results["gpu"]["copy_bytes_per_second"]),
            )


def _statistics(results: dict[str, Any]) -> Found:
    for row in _gpu(results):
        counted = row["bytes_per_parameter"] is not None
        if (row["rule"], row["who"]) == ("statistics", "ours") and WHERE["real"](row) and counted:
            read = row["bytes_per_parameter"] * row["numel"] / max(results["gpu"]["copy_bytes_per_second"])
            yield f"{row['set']} {row['dtype']}", row["cold"] / read


def _host(optimizer: str, counts: tuple[int, ...], who: str = "ours") -> Callable[[dict[str, Any]], Found]:
    def values(results: dict[str, Any]) -> Found:
        for row in results.get("host") or ():
            if (row["optimizer"], row["gradients"]) == (optimizer, "new") and row["tensors"] in counts:
                yield f"{row['tensors']} tensors", row[who] / row["fused"]

    return values


def _cpu(*pairs: tuple[str, str], tiny: bool = False) -> Callable[[dict[str, Any]], Found]:
    """Ratios of a step on the CPU to another, in each set and with each number of threads."""

    def values(results: dict[str, Any]) -> Found:
        rows = results.get("cpu") or ()
        seconds = {(row["set"], row["threads"], row["step"]): row["seconds"] for row in rows}
        for name, threads in dict.fromkeys((row["set"], row["threads"]) for row in rows):
            for step, other in pairs:
                if (name == "16 tiny") == tiny:
                    of_other = seconds[name, threads, step] / seconds[name, threads, other]
                    yield f"{step}, {name}, {threads} threads", of_other

    return values


FUSED = ("plain", "torch fused")
RULES = ("sgd", "adamw")
TARGETS = [
    Target("100 M parameters and more, multipliers: share of copy bandwidth", 0.92, True, _of_copy),
    Target("100 M parameters and more, multipliers: GPU time / torch fused", 0.95, False,
           _ratios(RULES, ["multipliers"], FUSED, "cold", "large")),
    Target("ResNet-50, ViT-S/16, multipliers: whole step by wall clock / torch fused", 0.80, False,
           _ratios(RULES, ["multipliers"], FUSED, "wall", "network")),
    Target("ResNet-50, ViT-S/16, multipliers: graph replay / torch fused", 0.90, False,
           _ratios(RULES, ["multipliers"], FUSED, "replay", "network")),
    Target("SGD with ELR, LARS, LARC, NG: GPU time / our plain step", 1.10, False,
           _ratios(["sgd"], ONE_LAUNCH, ("plain", "ours"), "cold", "real")),
    Target("SGD with ELR, LARS: times faster than the foreach composition, wall clock", 3.0, True,
           _ratios(["sgd"], ["ELR", "LARS"], ("", "foreach"), "wall", "real", times=True)),
    Target("SGD with LARS: times faster than timm's Lars, wall clock", 10.0, True,
           _ratios(["sgd"], ["LARS"], ("", "timm"), "wall", "real", times=True)),
    Target("AdamW with LAMB, ELR: GPU time / our plain step", 1.25, False,
           _ratios(["adamw"], ["LAMB", "ELR"], ("plain", "ours"), "cold", "real")),
    Target("AdamW with LAMB: times faster than apex, wall clock", 2.0, True,
           _ratios(["adamw"], ["LAMB"], ("", "apex"), "wall", "real", times=True)),
    Target("statistics: GPU time / reading the inputs at copy bandwidth", 1.05, False, _statistics),
    Target("statistics: times faster than four _foreach_norm, GPU time", 4.0, True,
           _ratios(["statistics"], ["statistics"], ("", "foreach"), "cold", "real", times=True)),
    Target("2,000 tiny tensors: times faster than torch fused, wall clock", 3.0, True,
           _ratios(RULES, ["multipliers"], FUSED, "wall", "tiny", times=True)),
    Target("CPU, SGD and AdamW / torch fused", 1.00, False,
           _cpu(*((f"{r} plain, ours", f"{r} plain, torch fused") for r in RULES))),
    Target("CPU, SGD with ELR, LARS, NG / our plain step", 1.40, False,
           _cpu(*((f"sgd {m}, ours", "sgd plain, ours") for m in ("ELR", "LARS", "NG")))),
    Target("CPU, AdamW with LAMB, ELR / our plain step", 1.90, False,
           _cpu(*((f"adamw {m}, ours", "adamw plain, ours") for m in ("LAMB", "ELR")))),
    Target("CPU, statistics / the _foreach_norm calls for the same numbers", 0.70, False,
           _cpu(("statistics, ours", "statistics, foreach"))),
    Target("CPU, 16 tiny tensors / torch's loop", 1.00, False,
           _cpu(*((f"{r} plain, ours", f"{r} plain, torch for-loop") for r in RULES), tiny=True)),
    Target("host time of SGD, 161 and 2,000 tensors / torch fused", 0.75, False, _host("SGD", (161, 2000))),
    Target("host time of AdamW, 161 and 2,000 tensors / torch fused", 0.35, False, _host("AdamW", (161, 2000))),
    Target("host time of SGD with ELR, 161 and 2,000 tensors / torch fused", 0.95, False,
           _host("SGD", (161, 2000), "ELR")),
    Target("host time of AdamW with ELR, 161 and 2,000 tensors / torch fused", 0.45, False,
           _host("AdamW", (161, 2000), "ELR")),
    Target("host time of SGD, 16 tensors / torch fused", 1.50, False, _host("SGD", (16,))),
    Target("host time of AdamW, 16 tensors / torch fused", 0.75, False, _host("AdamW", (16,))),
]  # fmt: skip


def judge(results: dict[str, Any]) -> list[Judged]:
    """Every target, by the worst of its values."""
    judged = []
    for target in TARGETS:
        values = list(target.values(results))
        limit = f"{'≥' if target.least else '≤'} {target.limit:.2f}"
        if not values:
            judged.append(Judged(target.what, limit, "", "not measured"))
            continue
        label, worst = (min if target.least else max)(values, key=lambda pair: pair[1])
        met = worst >= target.limit if target.least else worst <= target.limit
        judged.append(Judged(target.what, limit, f"{worst:.2f} ({label})", "met" if met else "missed"))
    return judged
