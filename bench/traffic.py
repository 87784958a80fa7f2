"""Bytes and launches of a step, counted from the items of its launches, and the smallest possible numbers.

    python -m bench.traffic [FILE]

counts them, and writes the table.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fused_lwlr
from bench.bytes_moved import recorded
from bench.contestants import Named, our_statistics
from bench.gate import parameters
from fused_lwlr import (
    ELR,
    LAMB,
    LARC,
    LARS,
    BalancedLR,
    ClipByLayer,
    Hyperball,
    NormalizedGradient,
    NormalizedGradientAdaptive,
    RadialBrake,
    ScaleInvariant,
    UpdateFloor,
)  # fmt: skip

FILE = Path(__file__).parent / "results" / "traffic.md"
SHAPES = [(3, 5), (4,)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MOMENTUM = {"momentum": 0.9}
AVERAGE = {"ema": 0.999}
EXACT = {"master_weights": True, "state_dtype": torch.float32}
GRADIENT = [ELR(0.1), LARS(), LARC(), NormalizedGradient(), NormalizedGradientAdaptive(), ClipByLayer(0.5)]
"""Scalings by norms of the gradient, with SGD; with AdamW, ELR uses norms of the direction."""


class Row(NamedTuple):
    """Bytes for each parameter that one kind of step moves.

    Attributes:
        memory: bytes that are read or written, without the next ones.
        again: bytes that update items read once more, after the norm items of the same launch.
    """

    rule: str
    options: dict[str, Any]
    dtype: str
    memory: float
    again: float
    launches: int

    @property
    def label(self) -> str:
        """Options in the form of the table."""
        said = []
        for name, value in self.options.items():
            shown = "..." if name in ("layers", "rescale_weights") else str(value).removeprefix("torch.")
            said.append(type(value).__name__ if name == "scaling" else f"{name}={shown}")
        return ", ".join([{"sgd": "SGD", "adamw": "AdamW", "statistics": "layer_statistics"}[self.rule], *said])


def _rows() -> list[Row]:
    rows = [Row("sgd", {}, dtype, 3 * size, 0, 1) for dtype, size in (("fp32", 4), ("bf16", 2))]
    for dtype, size in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        rows += [
            Row("sgd", MOMENTUM, dtype, 5 * size, 0, 1),
            Row("sgd", {**MOMENTUM, "scaling": ELR(0.1)}, dtype, 5 * size, size, 1),
            Row("adamw", {}, dtype, 7 * size, 0, 1),
            Row("adamw", {"scaling": LAMB()}, dtype, 7 * size, 4 * size, 1),
        ]
    rows += [Row("sgd", {**MOMENTUM, "scaling": scaling}, "fp32", 20, 4, 1) for scaling in GRADIENT[1:]]
    rows += [
        Row("sgd", {**MOMENTUM, "nesterov": True}, "fp32", 20, 0, 1),
        Row("sgd", {**MOMENTUM, "layers": {"layer0.weight": 0.5}}, "fp32", 20, 0, 1),
        Row("sgd", {**MOMENTUM, "scaling": LAMB()}, "fp32", 20, 12, 1),
        Row("sgd", {**MOMENTUM, "scaling": Hyperball()}, "fp32", 20, 12, 1),
        Row("sgd", {**MOMENTUM, "scaling": RadialBrake()}, "fp32", 20, 12, 1),
        Row("sgd", {**MOMENTUM, "scaling": UpdateFloor(0.35)}, "fp32", 20, 12, 1),
        Row("sgd", {**MOMENTUM, "clip_global_norm": 1.0}, "fp32", 24, 0, 2),
        Row("sgd", {**MOMENTUM, "nonfinite": "skip"}, "fp32", 24, 0, 2),
        Row("sgd", {**MOMENTUM, "scaling": LARS(), "clip_global_norm": 1.0}, "fp32", 24, 4, 2),
        Row("sgd", {**MOMENTUM, "rescale_weights": ...}, "fp32", 24, 0, 2),
        Row("sgd", {**MOMENTUM, "rescale_weights": ..., "scaling": ELR(0.1)}, "fp32", 24, 4, 2),
        Row("sgd", {**MOMENTUM, "scaling": BalancedLR()}, "fp32", 24, 0, 2),
        Row("sgd", {**MOMENTUM, "capturable": True}, "fp32", 20, 0, 1),
        Row("sgd", {**MOMENTUM, "master_weights": True}, "bf16", 18, 0, 1),
        Row("sgd", {**MOMENTUM, "stochastic_rounding": True}, "bf16", 10, 0, 1),
        Row("sgd", {**MOMENTUM, "state_dtype": torch.float32}, "bf16", 14, 0, 1),
        Row("adamw", {"amsgrad": True}, "fp32", 36, 0, 1),
        Row("adamw", {"layers": {"layer0.weight": 0.5}}, "fp32", 28, 0, 1),
        Row("adamw", {"scaling": ELR(0.1)}, "fp32", 28, 16, 1),
    ]
    rows += [Row("adamw", {"scaling": scaling}, "fp32", 28, 4, 1) for scaling in GRADIENT[1:]]
    rows += [
        Row("adamw", {"clip_global_norm": 1.0}, "fp32", 32, 0, 2),
        Row("adamw", {"nonfinite": "skip"}, "fp32", 32, 0, 2),
        Row("adamw", {"scaling": LAMB(), "clip_global_norm": 1.0}, "fp32", 32, 16, 2),
        Row("adamw", {"scaling": Hyperball()}, "fp32", 28, 16, 1),
        Row("adamw", {"scaling": RadialBrake()}, "fp32", 28, 16, 1),
        Row("adamw", {"scaling": UpdateFloor(0.35)}, "fp32", 28, 16, 1),
        Row("adamw", {"scaling": Hyperball(), "clip_global_norm": 1.0}, "fp32", 32, 16, 2),
        Row("adamw", {"scaling": BalancedLR()}, "fp32", 32, 0, 2),
        Row("adamw", {"capturable": True}, "fp32", 28, 0, 1),
        Row("adamw", EXACT, "bf16", 30, 0, 1),
        Row("adamw", {**EXACT, "scaling": LAMB()}, "bf16", 30, 16, 1),
        Row("adamw", {**EXACT, "scaling": Hyperball()}, "bf16", 30, 16, 1),
        Row("adamw", {"stochastic_rounding": True}, "bf16", 14, 0, 1),
        Row("sgd", {**MOMENTUM, **AVERAGE}, "fp32", 28, 0, 1),
        Row("adamw", AVERAGE, "fp32", 36, 0, 1),
        Row("adamw", {**AVERAGE, "scaling": LAMB()}, "fp32", 36, 16, 1),
        Row("adamw", {**AVERAGE, "clip_global_norm": 1.0}, "fp32", 40, 0, 2),
        Row("adamw", AVERAGE, "bf16", 22, 0, 1),
        Row("adamw", {**EXACT, **AVERAGE}, "bf16", 38, 0, 1),
        Row("statistics", {}, "fp32", 8, 0, 1),
        Row("statistics", {}, "bf16", 4, 0, 1),
    ]
    return rows


ROWS = _rows()


def count(row: Row, device: torch.device) -> tuple[tuple[float, float, int], float]:
    """(memory, again, launches) of a step after the first one, and its floor, in bytes for each parameter.

    The floor: every column that the step needs is read once, and all but the gradient are written once; half-precision
    parameters with exact weights only need to be written.
    """
    torch.manual_seed(0)
    named = parameters(SHAPES, DTYPES[row.dtype], device)
    numel = sum(param.numel() for _, param in named)
    optimizer = _made(row, named)
    optimizer.step()
    with recorded() as counted:
        optimizer.step()
    found = counted["bytes"] / numel, counted["again"] / numel, counted["launches"]
    size = DTYPES[row.dtype].itemsize
    if row.rule == "statistics":
        return found, 2 * size
    # single numbers of each tensor are left out
    single = ("step", "radius")
    state = [
        s for entry in optimizer.state.values() for name, s in entry.items() if name not in single and s is not None
    ]
    kept = sum(tensor.numel() * tensor.element_size() for tensor in state) / numel
    exact = any("master_weight" in entry for entry in optimizer.state.values())
    return found, (1 if exact else 2) * size + size + 2 * kept


def _made(row: Row, named: Named) -> Any:
    if row.rule == "statistics":
        return our_statistics(named, "triton")
    cls = {"sgd": fused_lwlr.SGD, "adamw": fused_lwlr.AdamW}[row.rule]
    options = dict(row.options)
    if "rescale_weights" in options:
        owner = torch.nn.ParameterDict({"weight": named[0][1]})
        options["rescale_weights"] = ScaleInvariant(("layer0.weight",), ((owner, "weight"),), (), (), {}, {})
    return cls(named, lr=0.1, backend="triton", **options)


def table(rows: Iterable[tuple[Row, float]]) -> str:
    """Markdown of rows with their floors."""
    lines = [
        "Bytes for each parameter, counted from the items of a step that is not the first. Written by",
        "`python -m bench.traffic`, and asserted row by row by `tests/benchmarks/test_traffic.py`. The floor is every",
        "column read once, and all but the gradient written once. 'Memory' leaves out bytes that updates read again:",
        "a cache may serve them. On an H200 it hardly does: a step of LAMB reads 1.87 times the bytes of one read.",
        "",
        "| step | dtype | memory | floor | ratio | read again | launches |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, floor in rows:
        lines.append(line(row, floor))
    return "\n".join(lines) + "\n"


def line(row: Row, floor: float) -> str:
    """One row of the table."""
    again = f"{row.again:g}" if row.again else ""
    return (
        f"| {row.label} | {row.dtype} | {row.memory:g} | {floor:g} | {row.memory / floor:.2f} | {again} | "
        f"{row.launches} |"
    )


def measured(device: torch.device) -> Iterator[tuple[Row, float]]:
    """Every row as it was counted, with its floor."""
    for row in ROWS:
        (memory, again, launches), floor = count(row, device)
        yield row._replace(memory=round(memory, 3), again=round(again, 3), launches=launches), floor


def main() -> None:
    """Count, and write the table."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    path.write_text(table(measured(torch.device("cuda" if torch.cuda.is_available() else "cpu"))))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
