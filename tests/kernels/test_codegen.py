"""Machine code, compiled without a GPU: nothing spilled, and only 128-bit accesses where a tile is full."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "codegen.py"
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
# columns that the main path loads and stores: of a queue, those of norm items (of a direction they load the gradient
# for its own norm and for the direction's), of a sum of the weights where it is not carried, and of update items
COLUMNS = {
    "sgd": (2, 1),
    "sgd momentum": (3, 2),
    "adamw": (4, 3),
    "adamw amsgrad": (5, 4),
    "sgd momentum, ELR": (1 + 1 + 3, 2),
    "sgd momentum, all": (1 + 1 + 3, 2),
    "adamw, ELR": (4 + 1 + 4, 3),
    "adamw, all": (4 + 1 + 4, 3),
    "statistics": (2, 0),
    "totals": (1, 0),
}
FULL_ONLY = {"adamw, balanced": (1 + 1 + 4, 3)}
HALF_ONLY = {
    "sgd momentum, noise": (1 + 1 + 3, 2),
    "adamw, noise": (1 + 1 + 4, 3),
    # and two moments and the exact weight, which are float32
    "adamw, master": (2, 1),
}
WIDE = {"adamw, master": 3}


def lines(*command):
    """What a script prints; compiling and interpreting exclude each other within one process."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "0"}
    result = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def reports():
    return [json.loads(line) for line in lines(SCRIPT, "--json", "sm_80", "sm_90")]


def test_every_variant_was_compiled(reports):
    for dtype in ITEMSIZE:
        names = {*COLUMNS, *(HALF_ONLY if dtype != "fp32" else FULL_ONLY)}
        for target in ("sm_80", "sm_90"):
            assert {r["kernel"] for r in reports if (r["dtype"], r["target"]) == (dtype, target)} == names


def test_nothing_spills(reports):
    # for sm_80 ptxas keeps a few scalars of the queue in memory, to fit another block on a multiprocessor: 8 bytes
    # with triton 3.9, up to 24 with 3.6
    scalars = {
        name
        for name in (*COLUMNS, *HALF_ONLY, *FULL_ONLY)
        if name.endswith((", ELR", ", all", ", balanced", ", noise"))
    }
    assert [r for r in reports if r["spilled"] > 24 * (r["target"] == "sm_80" and r["kernel"] in scalars)] == []


def test_full_tiles_move_128_bits_at_a_time(reports):
    for r in reports:
        vectors, wide = (r["block"] * size // (32 * r["warps"] * 16) for size in (ITEMSIZE[r["dtype"]], 4))
        loads, stores = {**COLUMNS, **HALF_ONLY, **FULL_ONLY}[r["kernel"]]
        more = WIDE.get(r["kernel"], 0) * wide
        assert r["loads"]["128"] == loads * vectors + more, r
        assert r["stores"].get("128", 0) == stores * vectors + more, r


def test_launches_bind_and_compile():
    """From a table to a compiled kernel, through the arguments that a real launch passes."""
    assert lines(Path(__file__).with_name("launch_without_gpu.py")) == [
        "step_kernel 4 4 False",
        "step_kernel 4 4 False",
        "step_kernel 4 4 False",
        "step_kernel 4 4 False",
        "statistics_kernel 2 4 False",
        # as many programs as a device runs at once, of which a CPU runs one
        *["queue_kernel 1 4 False"] * 2,
        *["statistics_kernel 2 4 False", *["queue_kernel 1 4 False"] * 3] * 2,
    ]
