"""Bytes and launches of a step, counted from the items of its launches, and the smallest possible numbers.

    python -m bench.traffic

counts them, and writes `results/traffic.md`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

import fused_lwlr
from bench import rows
from bench.bytes_moved import counted_bytes, without_kernels
from bench.clock import here
from bench.contestants import our_statistics
from bench.parameter_sets import parameters
from fused_lwlr import ScaleInvariant, scaling

FILE = rows.RESULTS / "traffic.md"
SHAPES = [(3, 5), (4,)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RULES = {"sgd": "SGD", "adamw": "AdamW", "statistics": "layer_statistics"}


def scaled(*scalings: Any, **more: Any) -> list[dict[str, Any]]:
    """Options with each of some scalings."""
    return [{"scaling": one, **more} for one in scalings]


EXACT = {"master_weights": True, "state_dtype": torch.float32}
AVERAGE, CLIP = {"ema": 0.999}, {"clip_global_norm": 1.0}
BOTH = [
    *scaled(scaling.LARS(), scaling.LARC(), scaling.NormalizedGradient(), scaling.NormalizedGradientAdaptive()),
    *scaled(scaling.ClipByLayer(0.5)),
    *scaled(scaling.Hyperball(), scaling.RadialBrake(), scaling.UpdateFloor(0.35), scaling.BalancedLR()),
    {"layers": {"layer0.weight": 0.5}}, CLIP, {"nonfinite": "skip"}, {"capturable": True}, AVERAGE,
]  # fmt: skip
OPTIONS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("sgd", "fp32"): [
        *scaled(scaling.LAMB()), *BOTH, *scaled(scaling.LARS(), **CLIP), {"nesterov": True},
        {"rescale_weights": ...}, {"rescale_weights": ..., "scaling": scaling.ELR(0.1)},
    ],
    ("adamw", "fp32"): [
        *scaled(scaling.ELR(0.1)), *BOTH, *scaled(scaling.LAMB(), scaling.Hyperball(), **CLIP), {"amsgrad": True},
        {**AVERAGE, "scaling": scaling.LAMB()}, {**AVERAGE, **CLIP},
    ],
    ("sgd", "bf16"): [{"stochastic_rounding": True}, {"master_weights": True}, {"state_dtype": torch.float32}],
    ("adamw", "bf16"): [
        {"stochastic_rounding": True}, AVERAGE, EXACT, {**EXACT, **AVERAGE},
        {**EXACT, "scaling": scaling.LAMB()}, {**EXACT, "scaling": scaling.Hyperball()},
    ],
}  # fmt: skip
"""Rule and dtype -> options of a step. The table also has each rule without options and with one scaling."""
HEAD = ("step", "dtype", "memory", "floor", "ratio", "read again", "launches")
ABOUT = """\
Bytes for each parameter, counted from the items of a step that is not the first. Written by
`python -m bench.traffic`, and compared row by row by `tests/benchmarks/test_traffic.py`. The floor is every
column read once, and all but the gradient written once. 'Memory' leaves out bytes that updates read again:
a cache may serve them. On an H200 it hardly does: a step of LAMB reads 1.87 times the bytes of one read.
"""


class Row(NamedTuple):
    """One kind of step."""

    rule: str
    options: dict[str, Any]
    dtype: str

    @property
    def label(self) -> str:
        """Options in the form of the table."""
        said = []
        for name, value in self.options.items():
            shown = "..." if name in ("layers", "rescale_weights") else str(value).removeprefix("torch.")
            said.append(type(value).__name__ if name == "scaling" else f"{name}={shown}")
        return ", ".join([RULES[self.rule], *said])


def _rows() -> Iterator[Row]:
    yield from (Row(rule, {}, dtype) for rule in ("statistics", "sgd") for dtype in ("fp32", "bf16"))
    for rule, first, one in (("sgd", {"momentum": 0.9}, scaling.ELR(0.1)), ("adamw", {}, scaling.LAMB())):
        for dtype in DTYPES:
            for more in ({}, *scaled(one), *OPTIONS.get((rule, dtype), ())):
                yield Row(rule, {**first, **more}, dtype)


ROWS = list(_rows())


def count(row: Row, device: torch.device) -> tuple[float, float, float, int]:
    """(memory, floor, again, launches) of a step after the first one, in bytes for each parameter.

    The floor: every column that the step needs is read once, and all but the gradient are written once; half-precision
    parameters with master weights only need to be written.
    """
    torch.manual_seed(0)
    named = parameters(SHAPES, DTYPES[row.dtype], device)
    numel = sum(param.numel() for _, param in named)
    options = dict(row.options)
    if "rescale_weights" in options:
        owner = torch.nn.ParameterDict({"weight": named[0][1]})
        options["rescale_weights"] = ScaleInvariant(("layer0.weight",), ((owner, "weight"),), (), (), {}, {})
    cls: Any = {"sgd": fused_lwlr.SGD, "adamw": fused_lwlr.AdamW}.get(row.rule)
    optimizer = cls(named, lr=0.1, backend="triton", **options) if cls else our_statistics(named, "triton")
    with without_kernels():
        optimizer.step()
        with counted_bytes() as counted:
            optimizer.step()
    size = DTYPES[row.dtype].itemsize
    floor: float = 2 * size
    if cls:
        entries = optimizer.state.values()
        # single numbers of each tensor are left out
        kept = [s for e in entries for name, s in e.items() if name not in ("step", "radius") and s is not None]
        exact = any("master_weight" in entry for entry in entries)
        floor = (2 if exact else 3) * size + 2 * sum(s.numel() * s.element_size() for s in kept) / numel
    return counted["bytes"] / numel, floor, counted["again"] / numel, counted["launches"]


def cells(row: Row, device: torch.device) -> list[str]:
    """One row of the table."""
    memory, floor, again, launches = count(row, device)
    once, again_said = f"{round(memory, 3):g}", f"{round(again, 3):g}" if again else ""
    return [row.label, row.dtype, once, f"{floor:g}", f"{memory / floor:.2f}", again_said, str(launches)]


def main() -> None:
    """Count, and write the table."""
    rows.command(__doc__).parse_args()
    text = "\n".join((ABOUT, *rows.table(HEAD, (cells(row, here()) for row in ROWS)), ""))
    FILE.write_text(text, encoding="utf-8")
    print(f"wrote {FILE}")


if __name__ == "__main__":
    main()
