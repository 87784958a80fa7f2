"""Compiles a kernel for a GPU that need not be there, and reads its machine code."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fused_lwlr.kernels import constants

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def report(
    kernel: Any, meta: dict[str, Any], types: dict[str, str], target: GPUTarget, threads: int = constants.THREADS
) -> dict[str, Any]:
    """What one kernel compiles to.

    Args:
        kernel: a Triton function.
        meta: its compile-time arguments.
        types: the types of its other arguments, int32 where not said; pointers are multiples of 16.
        target: what to compile for.
        threads: of a program.

    Returns:
        registers: of a thread. spilled: bytes of a thread's memory. resident: programs that a multiprocessor holds by
        their registers. loads, stores: bits of an access -> how many such accesses of global memory there are.
        divisions: 64-bit integer divisions and remainders.
    """
    signature = {name: "constexpr" if name in meta else types.get(name, "i32") for name in kernel.arg_names}
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    warps = threads // target.warp_size
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={places[name]: value for name, value in meta.items()},
            attrs={places[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"},
        ),
        target=target,
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    found = _amd(compiled.asm["amdgcn"]) if target.backend == "hip" else _nvidia(compiled.asm["cubin"])
    resident = residents(found["registers"], warps, target.backend)
    return {"warps": warps, **found, "resident": resident, "divisions": _divisions(compiled.asm["llir"])}


def _divisions(code: str) -> int:
    """64-bit divisions and remainders, other than by a power of two, which are shifts.

    Of LLVM's language: the machine has none, and a compiler writes a call or a hundred instructions for each.
    """
    divisors = re.findall(r"\b[us](?:div|rem)(?: exact)? i64 [^,\n]+, (%?[\w.]+)", code)
    return sum(not (divisor.isdigit() and int(divisor).bit_count() == 1) for divisor in divisors)


def residents(registers: int, warps: int, backend: str) -> int:
    """Programs that a multiprocessor holds at once, by their registers alone.

    65,536 registers and 64 warps of 32 threads, registers of a thread in eights; of gfx942 four units, each with 512
    registers for each of 64 lanes and 8 warps (CUDA C++ Programming Guide, Compute Capabilities; AMD CDNA 3 ISA).
    """
    rounded = -(-registers // 8) * 8
    if backend == "hip":
        return 4 * min(8, 512 // rounded) // warps
    return min(64, 65536 // (32 * rounded)) // warps


def _nvidia(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(BIN / "cuobjdump"), "-sass", "-res-usage", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": _number(r"REG:(\d+)", code),
        "spilled": _number(r"STACK:(\d+)", code) + _number(r"LOCAL:(\d+)", code),
        **{
            key: _widths(re.findall(rf"\b{op}\.E(?:\.\w+)*", code)) for key, op in (("loads", "LDG"), ("stores", "STG"))
        },
    }


def _amd(code: str) -> dict[str, Any]:
    # scalars that are moved to lanes of a vector register go to no memory
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", code),
        "spilled": _number(r"\.private_segment_fixed_size:\s+(\d+)", code),
        **{key: _widths(re.findall(rf"\b(?:global|buffer)_{key[:-1]}_\w+", code)) for key in ("loads", "stores")},
    }


def _number(pattern: str, code: str) -> int:
    found = re.search(pattern, code)
    if found is None:
        raise ValueError(f"no {pattern!r} in what the compiler says: its format has changed")
    return int(found[1])


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
