"""Targets and measured values: met, missed with its figure, or not measured."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from bench.parameter_sets import NETWORKS

SMALL, LARGE, TINY = ("ResNet-50", "ViT-S/16"), ("ViT-L/16", "decoder 1.3B", "one of 2^28"), ("2,000 tiny",)
REAL = (*NETWORKS, "decoder 1.3B")
ON_CPU = (*SMALL, "a layer of a 1.3 B decoder")
MANY, FEW = ("161 tensors", "2000 tensors"), ("16 tensors",)


class Target(NamedTuple):
    """A bound of the ratio of our value to another; the worst ratio counts.

    Attributes:
        what: the bounded quantity.
        limit: "≥ 0.92" or "≤ 0.92".
        quantity: a quantity of `values`.
        cases: sets of parameters, or numbers of tensors: the beginnings of the names of cases.
        steps: steps of ours.
        other: the compared step; {step} is the name of ours, {rule} its first word.
        inverse: bounds the ratio of the other value to ours.
    """

    what: str
    limit: str
    quantity: str
    cases: tuple[str, ...]
    steps: tuple[str, ...]
    other: str
    inverse: bool = False


class Judged(NamedTuple):
    """A target and its result."""

    what: str
    limit: str
    found: str
    verdict: str


MULTIPLIERS, PLAIN = ("sgd multipliers", "adamw multipliers"), ("sgd plain", "adamw plain")
SCALED_ADAMW, STATISTICS = ("adamw LAMB", "adamw ELR"), ("statistics",)
FUSED, OURS, LOOP = "{rule} plain, torch fused", "{rule} plain, ours", "{rule} plain, torch for-loop"
SAME = "{step}, foreach"
TARGETS = [
    Target("100 M parameters and more, multipliers: share of copy bandwidth", "≥ 0.92",
           "bandwidth", LARGE, MULTIPLIERS, "copy"),
    Target("100 M parameters and more, multipliers: GPU time / torch fused", "≤ 0.95",
           "cold", LARGE, MULTIPLIERS, FUSED),
    Target("ResNet-50, ViT-S/16, multipliers: whole step by wall clock / torch fused", "≤ 0.80",
           "wall", SMALL, MULTIPLIERS, FUSED),
    Target("ResNet-50, ViT-S/16, multipliers: graph replay / torch fused", "≤ 0.90",
           "replay", SMALL, MULTIPLIERS, FUSED),
    Target("SGD with ELR, LARS, LARC, NG: GPU time / our plain step", "≤ 1.10",
           "cold", REAL, ("sgd ELR", "sgd LARS", "sgd LARC", "sgd NG"), OURS),
    Target("SGD with ELR, LARS: times faster than the foreach composition, wall clock", "≥ 3.00",
           "wall", REAL, ("sgd ELR", "sgd LARS"), SAME, inverse=True),
    Target("SGD with LARS: times faster than timm's Lars, wall clock", "≥ 10.00",
           "wall", REAL, ("sgd LARS",), "{step}, timm", inverse=True),
    Target("AdamW with LAMB, ELR: GPU time / our plain step", "≤ 1.25", "cold", REAL, SCALED_ADAMW, OURS),
    Target("AdamW with LAMB: times faster than apex, wall clock", "≥ 2.00",
           "wall", REAL, ("adamw LAMB",), "{step}, apex", inverse=True),
    Target("statistics: GPU time / reading the inputs at copy bandwidth", "≤ 1.05",
           "bandwidth", REAL, STATISTICS, "copy", inverse=True),
    Target("statistics: times faster than four _foreach_norm, GPU time", "≥ 4.00",
           "cold", REAL, STATISTICS, SAME, inverse=True),
    Target("2,000 tiny tensors: times faster than torch fused, wall clock", "≥ 3.00",
           "wall", TINY, MULTIPLIERS, FUSED, inverse=True),
    Target("CPU, SGD and AdamW / torch fused", "≤ 1.00", "CPU", ON_CPU, PLAIN, FUSED),
    Target("CPU, SGD with ELR, LARS, NG / our plain step", "≤ 1.40",
           "CPU", ON_CPU, ("sgd ELR", "sgd LARS", "sgd NG"), OURS),
    Target("CPU, AdamW with LAMB, ELR / our plain step", "≤ 1.90", "CPU", ON_CPU, SCALED_ADAMW, OURS),
    Target("CPU, statistics / the _foreach_norm calls for the same numbers", "≤ 0.70",
           "CPU", ON_CPU, STATISTICS, SAME),
    Target("CPU, 16 tiny tensors / torch's loop", "≤ 1.00", "CPU", ("16 tiny",), PLAIN, LOOP),
    Target("host time of SGD, 161 and 2,000 tensors / torch fused", "≤ 0.75", "host", MANY, ("SGD",), "{rule}, fused"),
    Target("host time of AdamW, 161 and 2,000 tensors / torch fused", "≤ 0.35",
           "host", MANY, ("AdamW",), "{rule}, fused"),
    Target("host time of SGD with ELR, 161 and 2,000 tensors / torch fused", "≤ 0.95",
           "host", MANY, ("SGD ELR",), "{rule}, fused"),
    Target("host time of AdamW with ELR, 161 and 2,000 tensors / torch fused", "≤ 0.45",
           "host", MANY, ("AdamW ELR",), "{rule}, fused"),
    Target("host time of SGD, 16 tensors / torch fused", "≤ 1.50", "host", FEW, ("SGD",), "{rule}, fused"),
    Target("host time of AdamW, 16 tensors / torch fused", "≤ 0.75", "host", FEW, ("AdamW",), "{rule}, fused"),
]  # fmt: skip


def values(results: dict[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """All measured values: quantity, case, step, and seconds or bytes a second."""
    gpu = results.get("gpu") or {"rows": ()}
    for row in gpu["rows"]:
        case = f"{row['set']} {row['dtype']}"
        step = "statistics" if row["rule"] == "statistics" else f"{row['rule']} {row['method']}"
        for quantity in {"cold", "wall", "replay"} & row.keys():
            yield quantity, case, f"{step}, {row['who']}", row[quantity]
        if row.get("bytes_counted"):
            yield "bandwidth", case, f"{step}, {row['who']}", row["bytes_per_second"]
            yield "bandwidth", case, "copy", max(gpu["copy_bytes_per_second"])
    for row in results.get("host") or ():
        if row["gradients"] == "new":
            for who, step in (("ours", ", ours"), ("ELR", " ELR, ours"), ("fused", ", fused")):
                yield "host", f"{row['tensors']} tensors", row["optimizer"] + step, row[who]
    for row in results.get("cpu") or ():
        threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
        yield "CPU", f"{row['set']}, {threads}", row["step"], row["seconds"]


def ratios(target: Target, results: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Ratios of a target, labelled; none where one of both steps was not measured."""
    cases: dict[str, dict[str, float]] = {}
    for quantity, case, step, value in values(results):
        if quantity == target.quantity and case.startswith(target.cases):
            cases.setdefault(case, {})[step] = value
    for case, found in cases.items():
        for step in target.steps:
            other = target.other.format(step=step, rule=step.split()[0])
            if f"{step}, ours" in found and other in found:
                ratio = found[f"{step}, ours"] / found[other]
                yield f"{step}, {case}", 1 / ratio if target.inverse else ratio


def judge(results: dict[str, Any]) -> list[Judged]:
    """Every target, by the worst of its values."""
    judged = []
    for target in TARGETS:
        found, verdict = "", "not measured"
        if labelled := list(ratios(target, results)):
            least, bound = target.limit[0] == "≥", float(target.limit[2:])
            label, worst = (min if least else max)(labelled, key=lambda pair: pair[1])
            met = worst >= bound if least else worst <= bound
            found, verdict = f"{worst:.2f} ({label})", "met" if met else "missed"
        judged.append(Judged(target.what, target.limit, found, verdict))
    return judged
