"""Machine code, compiled without a GPU: nothing spilled, and only 128-bit accesses where a tile is full."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "codegen.py"
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
# columns that the main path loads and stores
COLUMNS = {"sgd": (2, 1), "sgd momentum": (3, 2), "adamw": (4, 3), "adamw amsgrad": (5, 4), "statistics": (2, 0)}


@pytest.fixture(scope="module")
def reports():
    # compiling and interpreting exclude each other within one process
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, SCRIPT, "--json", "sm_80", "sm_90"]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_every_variant_was_compiled(reports):
    assert len(reports) == len(COLUMNS) * len(ITEMSIZE) * 2


def test_nothing_spills(reports):
    assert [r for r in reports if r["spilled"]] == []


def test_full_tiles_move_128_bits_at_a_time(reports):
    for r in reports:
        vectors = r["block"] * ITEMSIZE[r["dtype"]] // (32 * r["warps"] * 16)
        loads, stores = COLUMNS[r["kernel"]]
        assert r["loads"]["128"] == loads * vectors, r
        assert r["stores"].get("128", 0) == stores * vectors, r
