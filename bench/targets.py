"""Targets and measured values: met, missed with its figure, or not measured."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

WHERE: dict[str, Callable[[dict[str, Any]], bool]] = {
    "large": lambda row: row["numel"] >= 100_000_000,
    "real": lambda row: not row["set"].startswith(("2,000", "one of")),
    "network": lambda row: row["set"] in ("ResNet-50", "ViT-S/16"),
    "tiny": lambda row: row["set"].startswith("2,000"),
}
"""Cases that a target is for."""
Values = Callable[[dict[str, Any]], Iterator[tuple[str, float]]]
"""Results -> labelled values."""


class Target(NamedTuple):
    """One bound; the worst of the values counts.

    Attributes:
        what: the bounded quantity.
        limit: "≥ 0.92" or "≤ 0.92".
        values: results -> labelled values.
    """

    what: str
    limit: str
    values: Values


class Judged(NamedTuple):
    """A target and its result."""

    what: str
    limit: str
    found: str
    verdict: str


def _gpu(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in (results.get("gpu") or {}).get("rows", ()) if "skipped" not in row]


def _ratios(steps: str, other: str, key: str, where: str, *, times: bool = False) -> Values:
    """Ratios of our steps to another step, where both were timed.

    Args:
        steps: rule and method of our steps, as "sgd ELR, adamw ELR".
        other: the other step, as "plain, torch fused"; "timm" means the same method by timm.
        times: returns ratios of the other step to ours.
    """

    def values(results: dict[str, Any]) -> Iterator[tuple[str, float]]:
        timed = {tuple(row[of] for of in ("set", "dtype", "rule", "method", "who")): row for row in _gpu(results)}
        *plain, who = other.split(", ")
        for rule, method in (step.split() for step in steps.split(", ")):
            for (name, dtype, *step), row in timed.items():
                base = timed.get((name, dtype, rule, *(plain or [method]), who), {})
                if step == [rule, method, "ours"] and WHERE[where](row) and key in row and key in base:
                    ratio = row[key] / base[key]
                    yield f"{name} {dtype} {method}", 1 / ratio if times else ratio

    return values


def _of_copy(results: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for row in _gpu(results):
        counted = row["bytes_per_second"] is not None
        if row["method"] == "multipliers" and row["who"] == "ours" and WHERE["large"](row) and counted:
            share = row["bytes_per_second"] / max(results["gpu"]["copy_bytes_per_second"])
            yield f"{row['set']} {row['dtype']} {row['rule']}", share


def _statistics(results: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for row in _gpu(results):
        counted = row["bytes_per_parameter"] is not None
        if (row["rule"], row["who"]) == ("statistics", "ours") and WHERE["real"](row) and counted:
            read = row["bytes_per_parameter"] * row["numel"] / max(results["gpu"]["copy_bytes_per_second"])
            yield f"{row['set']} {row['dtype']}", row["cold"] / read


def _host(optimizer: str, counts: tuple[int, ...], who: str = "ours") -> Values:
    def values(results: dict[str, Any]) -> Iterator[tuple[str, float]]:
        for row in results.get("host") or ():
            if (row["optimizer"], row["gradients"]) == (optimizer, "new") and row["tensors"] in counts:
                yield f"{row['tensors']} tensors", row[who] / row["fused"]

    return values


def _cpu(steps: str, other: str, *, tiny: bool = False) -> Values:
    """Ratios of our steps on the CPU to another, in each set and with each number of threads."""

    def values(results: dict[str, Any]) -> Iterator[tuple[str, float]]:
        rows = results.get("cpu") or ()
        seconds = {(row["set"], row["threads"], row["step"]): row["seconds"] for row in rows}
        for name, threads in dict.fromkeys((row["set"], row["threads"]) for row in rows):
            for step in steps.split(", ") if (name == "16 tiny") == tiny else ():
                compared = f"{step}, ours", other.format(step.split()[0])
                ours, base = (seconds.get((name, threads, each)) for each in compared)
                # a contestant may not run on every machine
                if ours is not None and base is not None:
                    yield f"{step}, ours, {name}, {threads} threads", ours / base

    return values


FUSED = "plain, torch fused"
MULTIPLIERS = "sgd multipliers, adamw multipliers"
MANY = (161, 2000)
TARGETS = [
    Target("100 M parameters and more, multipliers: share of copy bandwidth", "≥ 0.92", _of_copy),
    Target("100 M parameters and more, multipliers: GPU time / torch fused", "≤ 0.95",
           _ratios(MULTIPLIERS, FUSED, "cold", "large")),
    Target("ResNet-50, ViT-S/16, multipliers: whole step by wall clock / torch fused", "≤ 0.80",
           _ratios(MULTIPLIERS, FUSED, "wall", "network")),
    Target("ResNet-50, ViT-S/16, multipliers: graph replay / torch fused", "≤ 0.90",
           _ratios(MULTIPLIERS, FUSED, "replay", "network")),
    Target("SGD with ELR, LARS, LARC, NG: GPU time / our plain step", "≤ 1.10",
           _ratios("sgd ELR, sgd LARS, sgd LARC, sgd NG", "plain, ours", "cold", "real")),
    Target("SGD with ELR, LARS: times faster than the foreach composition, wall clock", "≥ 3.00",
           _ratios("sgd ELR, sgd LARS", "foreach", "wall", "real", times=True)),
    Target("SGD with LARS: times faster than timm's Lars, wall clock", "≥ 10.00",
           _ratios("sgd LARS", "timm", "wall", "real", times=True)),
    Target("AdamW with LAMB, ELR: GPU time / our plain step", "≤ 1.25",
           _ratios("adamw LAMB, adamw ELR", "plain, ours", "cold", "real")),
    Target("AdamW with LAMB: times faster than apex, wall clock", "≥ 2.00",
           _ratios("adamw LAMB", "apex", "wall", "real", times=True)),
    Target("statistics: GPU time / reading the inputs at copy bandwidth", "≤ 1.05", _statistics),
    Target("statistics: times faster than four _foreach_norm, GPU time", "≥ 4.00",
           _ratios("statistics statistics", "foreach", "cold", "real", times=True)),
    Target("2,000 tiny tensors: times faster than torch fused, wall clock", "≥ 3.00",
           _ratios(MULTIPLIERS, FUSED, "wall", "tiny", times=True)),
    Target("CPU, SGD and AdamW / torch fused", "≤ 1.00", _cpu("sgd plain, adamw plain", "{} plain, torch fused")),
    Target("CPU, SGD with ELR, LARS, NG / our plain step", "≤ 1.40",
           _cpu("sgd ELR, sgd LARS, sgd NG", "{} plain, ours")),
    Target("CPU, AdamW with LAMB, ELR / our plain step", "≤ 1.90", _cpu("adamw LAMB, adamw ELR", "{} plain, ours")),
    Target("CPU, statistics / the _foreach_norm calls for the same numbers", "≤ 0.70",
           _cpu("statistics", "{}, foreach")),
    Target("CPU, 16 tiny tensors / torch's loop", "≤ 1.00",
           _cpu("sgd plain, adamw plain", "{} plain, torch for-loop", tiny=True)),
    Target("host time of SGD, 161 and 2,000 tensors / torch fused", "≤ 0.75", _host("SGD", MANY)),
    Target("host time of AdamW, 161 and 2,000 tensors / torch fused", "≤ 0.35", _host("AdamW", MANY)),
    Target("host time of SGD with ELR, 161 and 2,000 tensors / torch fused", "≤ 0.95", _host("SGD", MANY, "ELR")),
    Target("host time of AdamW with ELR, 161 and 2,000 tensors / torch fused", "≤ 0.45", _host("AdamW", MANY, "ELR")),
    Target("host time of SGD, 16 tensors / torch fused", "≤ 1.50", _host("SGD", (16,))),
    Target("host time of AdamW, 16 tensors / torch fused", "≤ 0.75", _host("AdamW", (16,))),
]  # fmt: skip


def judge(results: dict[str, Any]) -> list[Judged]:
    """Every target, by the worst of its values."""
    judged = []
    for what, limit, of in TARGETS:
        found, verdict = "", "not measured"
        if values := list(of(results)):
            least, bound = limit[0] == "≥", float(limit[2:])
            label, worst = (min if least else max)(values, key=lambda pair: pair[1])
            met = worst >= bound if least else worst <= bound
            found, verdict = f"{worst:.2f} ({label})", "met" if met else "missed"
        judged.append(Judged(what, limit, found, verdict))
    return judged
