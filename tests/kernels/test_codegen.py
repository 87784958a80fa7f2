"""Machine code, compiled without a GPU: properties that the launch constants assume, for every kernel and target."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton import knobs

from bench import codegen
from bench.machine_code import Variant, reports
from bench.rows import table
from bench.variants import TARGETS, variants
from fused_lwlr.kernels import constants

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSION = ".".join(triton.__version__.split(".")[:2])
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
# blocks that are loaded at once: of gradients for their norms, of weights for a sum that is not carried
ONCE = constants.GPU.at_once
# and one block if fewer remain
SUMMED = ONCE + 1
# columns of a block that the main path loads and stores; for a queue: of the norms, of the weights if the norms do not
# read them, and of the updates
COLUMNS = {
    "sgd": (2, 1),
    "sgd momentum": (3, 2),
    "adamw": (4, 3),
    "adamw amsgrad": (5, 4),
    "sgd momentum, ELR": (SUMMED + SUMMED + 3, 2),
    "sgd momentum, all": (SUMMED + SUMMED + 3, 2),
    "lion": (3, 2),
    "adamw cautious": (4, 3),
    "lion cautious": (3, 2),
    "adamw, ELR": (4 + 4, 3),
    "adamw, all": (4 + 4, 3),
    "lion, ELR": (3 + 3, 2),
    "lion, all": (3 + 3, 2),
    "sgd momentum, Hyperball": (3 + 3, 2),
    "adamw, Hyperball": (4 + 4, 3),
    "lion, Hyperball": (3 + 3, 2),
    "statistics": (2 * (ONCE // 2 + 1), 0),
    "statistics of gradients": (SUMMED, 0),
}
FULL_ONLY = {
    "adamw, balanced": (4, 3),
    "adamw, ELR, ema": (4 + 5, 4),
}
HALF_ONLY = {
    "sgd momentum, noise": (3, 2),
    "adamw, noise": (4, 3),
    "lion, noise": (3, 2),
    # and two moments and the master weight, which are float32
    "adamw, master": (2, 1),
}
BRAIN_ONLY = {
    # and the average, which is float32
    "adamw, ema": (4, 3),
}
WIDE = {"adamw, master": 3, "adamw, ema": 1}
# loads of a block that are issued together before the first result is used, on sm_90 and sm_100
AT_ONCE = {
    "sgd": 2, "sgd momentum": 3, "adamw": 4, "adamw amsgrad": 5, "lion": 3,
    "adamw cautious": 4, "lion cautious": 3,
    "statistics": 2 * (ONCE // 2), "statistics of gradients": ONCE,
}  # fmt: skip
QUEUED = ("ELR", "Hyperball", "all", "noise", "balanced")
MOST_SPILLED = 136
"""Bytes that a thread of the queue may spill: to load scalars again costs less time than fewer programs would."""
MOST_INSTRUCTIONS = {("adamw", "bf16"): 355}
"""Length from the first to the last access: 60 % of the code with correctly rounded quotients and roots, on sm_90."""
MORE = {"fp32": FULL_ONLY, "bf16": {**HALF_ONLY, **BRAIN_ONLY}, "fp16": HALF_ONLY}
# the most columns, the most registers, the largest scalars, the most loads at once, and the most types
LARGEST = ["adamw amsgrad", "sgd momentum, all", "adamw, all", "statistics"]
LARGEST_OF = {
    "fp32": LARGEST,
    "bf16": [*LARGEST, "adamw, noise", "adamw, master"],
    "fp16": [LARGEST[1], "adamw, noise"],
}
# each version of Triton compiles all variants, or the largest
ALL, SOME = True, os.environ.get("EVERY_KERNEL") == "1"
COMPILED = {
    "3.9": {
        ("sm_90", "fp32"): ALL, ("sm_90", "bf16"): ALL,
        # both half precisions have the same accesses
        ("sm_90", "fp16"): SOME,
        **{(target, dtype): SOME for target in ("sm_80", "sm_100", "gfx942") for dtype in ("fp32", "bf16")},
    },
    # torch for GPUs brings this version
    "3.7": {("sm_90", "fp32"): SOME, ("sm_90", "bf16"): ALL},
    "3.6": {("sm_90", "fp32"): SOME, ("sm_90", "bf16"): SOME},
}  # fmt: skip
looked_at = pytest.mark.skipif(
    VERSION not in COMPILED or knobs.runtime.interpret,
    reason=f"what triton {VERSION} compiles to was not looked at, or kernels are interpreted",
)


def problems(found):
    """Yields the defects in the code of one kernel."""
    kernel, dtype, target = found["kernel"], found["dtype"], found["target"]
    vectors, wide = (found["block"] * size // (constants.THREADS * 16) for size in (ITEMSIZE[dtype], 4))
    more = WIDE.get(kernel, 0) * wide
    for key, columns in zip(("loads", "stores"), {**COLUMNS, **MORE[dtype]}[kernel], strict=True):
        expected, actual = columns * vectors + more, found[key].get(128, 0)
        # on AMD numbers of a table that lie next to one another are moved together too
        if actual < expected or (actual > expected and target != "gfx942"):
            yield f"{actual} {key} of 128 bits, not {expected}"
    if found["spilled"] > (MOST_SPILLED if any(map(kernel.count, QUEUED)) else 0):
        yield f"{found['spilled']} bytes spilled"
    least = found["least_resident"]
    if found["resident"] < least:
        yield f"{found['registers']} registers: {found['resident']} programs on a multiprocessor, not {least}"
    if target in ("sm_90", "sm_100"):
        together = AT_ONCE.get(kernel, 0) * vectors
        if found["phases"][0] < together:
            yield f"loads of 128 bits in phases {found['phases']}: {together} should be under way together"
        most = MOST_INSTRUCTIONS.get((kernel, dtype), found["instructions"])
        if target == "sm_90" and found["instructions"] > most:
            yield f"{found['instructions']} instructions, not {most} at most"
    if found["divisions"]:
        yield f"{found['divisions']} divisions of 64 bits"


@looked_at
@pytest.mark.parametrize(("target", "dtype"), COMPILED.get(VERSION, {}))
@pytest.mark.long
def test_machine_code(target, dtype, monkeypatch):
    """128-bit accesses where a tile is full, nothing spilled, few registers, no long division."""
    names = (*COLUMNS, *MORE[dtype]) if COMPILED[VERSION][target, dtype] else LARGEST_OF[dtype]
    monkeypatch.setattr(codegen, "variants", lambda of: [each for each in variants(of) if each.name in names])
    found = list(codegen.facts([(target, dtype)]))
    assert sorted(f["kernel"] for f in found) == sorted(names)
    print("\n".join(table(codegen.HEAD, map(codegen.cells, found))))
    assert [(f["kernel"], problem) for f in found for problem in problems(f)] == []


@triton.jit
def bad(data, count, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(data + 3 * offs)
    y = tl.load(data + 5 * offs)
    # BLOCK²/128 values a thread, all of them needed after the largest is known
    products = x[:, None] * y[None, :]
    largest = tl.max(tl.max(products, axis=0), axis=0)
    totals = tl.sum(tl.exp(products - largest), axis=0)
    tl.store(data + 3 * offs, totals * (count // tl.load(data).to(tl.int64)).to(tl.float32))


@looked_at
@pytest.mark.long
def test_bad_code_is_found():
    """Finds narrow accesses, a long division and many live values in a bad kernel."""
    # the last with 64 registers, fewer than it has live values
    compiled = [("sm_90", None), ("gfx942", None), ("sm_90", 8)]
    types = {"data": "*fp32", "count": "i64"}
    found = [reports([Variant("bad", least, bad, {"BLOCK": 128})], TARGETS[name], types)[0] for name, least in compiled]
    for r in found:
        assert 128 not in r["loads"]
        assert 128 not in r["stores"]
        assert r["divisions"] == 1
    assert [r["resident"] <= 4 for r in found] == [True, True, False]
    assert [r["spilled"] > 0 for r in found] == [False, False, True]
    assert found[2]["registers"] <= 64


LAUNCHES = [
    *[f"step_kernel 4 4 False {registers}" for registers in (48, 48, 80, 80)],
    "statistics_kernel 2 4 False 80",
    # the number of programs that a device runs at once: 1 on a CPU
    *[f"queue_kernel 1 4 False {registers}" for registers in (64, 80)],
    # all options: found factors, norms alone, known factors
    "statistics_kernel 2 4 False 80",
    *["queue_kernel 1 4 False 80"] * 3,
    # spheres, whose factors are found or known
    *["queue_kernel 1 4 False 64"] * 2,
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    """The folder of a CUDA driver without a GPU."""
    folder = tmp_path_factory.mktemp("stub")
    source, library = HERE / "libcuda.c", folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)], check=True)
    return str(folder)


@pytest.mark.long
def test_launches_pass_what_kernels_take(stub, tmp_path):
    """From a table through Triton's launcher in C to the driver, where parameters have the layout of the cubin."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    environment |= {"TRITON_LIBCUDA_PATH": stub, "LD_LIBRARY_PATH": stub}
    command = [sys.executable, HERE / "launch_without_gpu.py"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == LAUNCHES
