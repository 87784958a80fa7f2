"""What the kernels compile to, without a GPU: registers, spills and the width of memory accesses.

    python bench/codegen.py [--json] [TARGET ...]

Compiles every kernel for every target and prints a table, or one JSON object a line. TRITON_INTERPRET
must not be set.
"""

import argparse
import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fused_lwlr import ELR

# the modules: the package exports functions of these names
adamw, sgd, statistics, queue, update, formula = (
    importlib.import_module(f"fused_lwlr.kernels.triton.{n}")
    for n in ("adamw", "sgd", "statistics", "queue", "update", "formula")
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
    "counters": "*i32",
    "partials": "*fp32",
    "prints": "*i32",
    "factors": "*fp32",
    "arrivals": "*i32",
    "out": "*fp64",
    "totals": "*fp64",
    "next_totals": "*fp64",
    "max_norm": "fp32",
    "grad_scale": "*fp32",
    "found_inf": "*fp32",
    "known_factors": "*fp64",
    "row_sums": "*fp64",
}


def kernels(dtype: Any) -> Iterator[tuple[str, Any, dict[str, Any], int]]:
    """Name, kernel, compile-time arguments and warps of every variant that is launched."""
    rules = {
        "sgd": (sgd, "", 16),
        "sgd momentum": (sgd, "X", 16),
        "adamw": (adamw, "XY", 20),
        "adamw amsgrad": (adamw, "XYZ", 20),
    }
    variants = {}
    for name, (rule, states, width) in rules.items():
        constants = {**dict.fromkeys("WGXYZM"), **dict.fromkeys("WG" + states, dtype)}
        constants |= {"RULE": rule._rule, "LIVE": False, "BLOCK": update.BLOCK, "WIDTH": width}
        variants[name] = (rule, constants)
        yield name, update.step_kernel, constants, update.WARPS
    if dtype != tl.float32:
        exact = {"M": tl.float32, "X": tl.float32, "Y": tl.float32}
        yield "adamw, master", update.step_kernel, {**variants["adamw"][1], **exact}, update.WARPS
    for name, place in (("sgd momentum", "gradient"), ("adamw", "direction")):
        rule, constants = variants[name]
        scaled = {
            **constants, "STEP": None, "COEFFICIENTS": rule._coefficients, "WIDTH": constants["WIDTH"] + 2,
            "FORMULA": formula.compiled(ELR.formula), "PLACE": place, "NUMBERS": 2,
            "GATED": False, "SKIP": False, "RESCALE": False, "WRITE": True,
            "PASSES": queue.PASSES, "SLOTS": queue.SLOTS,
        }  # fmt: skip
        absent = dict.fromkeys(("grad_scale", "found_inf", "known_factors", "row_sums", "seed"))
        yield f"{name}, ELR", queue.queue_kernel, {**scaled, **absent}, update.WARPS
        everything = {"STEP": tl.float32, "GATED": True, "SKIP": True, "RESCALE": name == "sgd momentum"}
        unused = {"known_factors": None, "row_sums": None, "seed": None}
        yield f"{name}, all", queue.queue_kernel, {**scaled, **everything, **unused}, update.WARPS
        if (name, dtype) == ("adamw", tl.float32):
            balanced = {**scaled, "FORMULA": None, "PLACE": "gradient", "NUMBERS": 0, "GATED": True}
            balanced |= {key: None for key in absent if key != "row_sums"}
            yield f"{name}, balanced", queue.queue_kernel, balanced, update.WARPS
        if dtype != tl.float32:
            plain = {"STEP": tl.float32, "FORMULA": None, "PLACE": "gradient", "NUMBERS": 0, "LIVE": True}
            del absent["seed"]
            yield f"{name}, noise", queue.queue_kernel, {**scaled, **absent, **plain}, update.WARPS
    constants = {"W": dtype, "G": dtype, "TOTALS": False, "grad_scale": None}
    constants |= {"BLOCK": statistics.BLOCK, "PASSES": statistics.PASSES, "SLOTS": statistics.SLOTS}
    yield "statistics", statistics.statistics_kernel, constants, statistics.WARPS
    yield "totals", statistics.statistics_kernel, {**constants, "W": None, "TOTALS": True}, statistics.WARPS


def report(kernel: Any, constants: dict[str, Any], warps: int, target: GPUTarget) -> dict[str, Any]:
    """Registers and spilled bytes per thread, and how many loads and stores of each width in bits."""
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in kernel.arg_names}
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={places[name]: value for name, value in constants.items()},
            attrs={places[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"},
        ),
        target=target,
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    return _amd(compiled.asm["amdgcn"]) if target.backend == "hip" else _nvidia(compiled.asm["cubin"])


def _nvidia(cubin: bytes) -> dict[str, Any]:
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        code, usage = (
            subprocess.run([cuobjdump, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled": int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1]),
        **{
            key: _widths(re.findall(rf"\b{op}\.E(?:\.\w+)*", code)) for key, op in (("loads", "LDG"), ("stores", "STG"))
        },
    }


def _amd(code: str) -> dict[str, Any]:
    return {
        "registers": int(re.search(r"\.vgpr_count:\s+(\d+)", code)[1]),
        "spilled": int(re.search(r"\.vgpr_spill_count:\s+(\d+)", code)[1]),
        **{key: _widths(re.findall(rf"\b(?:global|buffer)_{key[:-1]}_\w+", code)) for key in ("loads", "stores")},
    }


def _widths(mnemonics: list[str]) -> dict[int, int]:
    """Bits that each access moves -> how many there are."""
    counts: dict[int, int] = {}
    for mnemonic in mnemonics:
        wide = re.search(r"\.(128|64)\b|dwordx(\d)", mnemonic)
        narrow = re.search(r"[US](8|16)\b|(ushort|short)|(ubyte|sbyte|byte)", mnemonic)
        if wide:
            bits = int(wide[1]) if wide[1] else 32 * int(wide[2])
        elif narrow:
            bits = int(narrow[1]) if narrow[1] else 16 if narrow[2] else 8
        else:
            bits = 32
        counts[bits] = counts.get(bits, 0) + 1
    return dict(sorted(counts.items()))


def main() -> None:
    """Compile everything and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all when none is given")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"unknown target {', '.join(sorted(unknown))}: choose from {', '.join(TARGETS)}")
    if not options.json:
        print(f"triton {triton.__version__}")
        print(
            f"{'kernel':17} {'dtype':5} {'target':7} {'registers':>9} {'spilled':>7}  loads / stores, as count x bits"
        )
    for dtype, tl_dtype in DTYPES.items():
        for name, kernel, constants, warps in kernels(tl_dtype):
            for target in options.targets or TARGETS:
                r = report(kernel, constants, warps, TARGETS[target])
                if options.json:
                    facts = {
                        "kernel": name,
                        "dtype": dtype,
                        "target": target,
                        "block": constants["BLOCK"],
                        "warps": warps,
                    }
                    print(json.dumps({**facts, **r}), flush=True)
                    continue
                widths = " / ".join(
                    ", ".join(f"{n}x{bits}" for bits, n in r[key].items()) for key in ("loads", "stores")
                )
                print(f"{name:17} {dtype:5} {target:7} {r['registers']:9} {r['spilled']:7}  {widths}")


if __name__ == "__main__":
    main()
