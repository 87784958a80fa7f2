"""Compiles kernels for a GPU that need not be there, and reads their machine code."""

import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fused_lwlr.kernels import constants

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
WIDTHS = {r"\.128\b|dwordx4": 128, r"dwordx3": 96, r"\.64\b|dwordx2": 64, r"[US]16\b|short": 16, r"[US]8\b|byte": 8}
"""Pattern of the instruction -> bits of its access. All other instructions have 32."""
MNEMONICS = {"loads": "LDG", "stores": "STG"}


class Variant(NamedTuple):
    """A kernel with its compile-time arguments.

    Attributes:
        least_resident: programs that a multiprocessor of NVIDIA GPUs must have the registers for, see
            `constants.least_resident`; None leaves the number of registers to the compiler.
    """

    name: str
    least_resident: int | None
    kernel: Any
    constants: dict[str, Any]


def reports(variants: Iterable[Variant], target: GPUTarget, types: dict[str, str]) -> list[dict[str, Any]]:
    """Properties of the compiled code of some kernels.

    Args:
        types: of the arguments at run time, int32 unless listed; pointers are multiples of 16.

    Returns:
        For each kernel, registers: of a thread. spilled: bytes of a thread's memory. resident: programs that fit on a
        multiprocessor by their registers. loads, stores: bits of an access -> number of such accesses of global
        memory. divisions: 64-bit integer divisions and remainders. Also on NVIDIA GPUs, phases: loads of 128 bits
        that are in flight when the first of them is used, for one batch of loads after the other. instructions: from
        the first to the last access of 128 bits. barriers: of a program's threads.
    """
    warps = constants.THREADS // target.warp_size
    compiled = [_compiled(variant, target, warps, types) for variant in variants]
    read, stage = (_amd, "amdgcn") if target.backend == "hip" else (_nvidia, "cubin")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(read, [asm[stage] for asm in compiled]))
    for facts, asm in zip(found, compiled, strict=True):
        facts["warps"], facts["divisions"] = warps, _divisions(asm["llir"])
        facts["resident"] = residents(facts["registers"], warps, target.backend)
    return found


def _compiled(variant: Variant, target: GPUTarget, warps: int, types: dict[str, str]) -> Any:
    """The stages of a kernel by their names."""
    _, least, kernel, meta = variant
    capped = {"maxnreg": constants.max_registers(least)} if least and target.backend != "hip" else {}
    signature = {name: "constexpr" if name in meta else types.get(name, "i32") for name in kernel.arg_names}
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    constexprs = {places[name]: value for name, value in meta.items()}
    attrs = {places[name]: [["tt.divisibility", 16]] for name, kind in signature.items() if kind[0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": warps, "enable_fp_fusion": False, **capped}
    return triton.compile(source, target=target, options=options).asm


def _divisions(code: str) -> int:
    """64-bit divisions and remainders, except by a power of two, which are shifts.

    Counted in LLVM's language: the machine has no such instruction, and a compiler writes a call or a hundred
    instructions for each.
    """
    divisors = re.findall(r"\b[us](?:div|rem)(?: exact)? i64 [^,\n]+, (%?[\w.]+)", code)
    return sum(not (divisor.isdigit() and int(divisor).bit_count() == 1) for divisor in divisors)


def residents(registers: int, warps: int, backend: str) -> int:
    """Programs that a multiprocessor holds at once, by their registers alone.

    65,536 registers and 64 warps of 32 threads, registers of a thread in eights; on gfx942 four units, each with 512
    registers for each of 64 lanes and 8 warps (CUDA C++ Programming Guide, Compute Capabilities; AMD CDNA 3 ISA).
    """
    rounded = -(-registers // 8) * 8
    if backend == "hip":
        return 4 * min(8, 512 // rounded) // warps
    return min(64, 65536 // (32 * rounded)) // warps


def _nvidia(cubin: bytes) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [str(CUOBJDUMP), "-res-usage", "-sass", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # after the address of each instruction
    code = "\n".join(re.findall(r"^\s*/\*[0-9a-f]+\*/(.*;)", listing, re.MULTILINE))
    wide = [i for i, line in enumerate(code.splitlines()) if re.search(r"(LDG|STG)\.E\.\S*128", line)]
    return {
        "registers": _number(r"REG:(\d+)", listing),
        "spilled": _number(r"STACK:(\d+)", listing) + _number(r"LOCAL:(\d+)", listing),
        **{key: _widths(re.findall(rf"\b{name}\.E(?:\.\w+)*", code)) for key, name in MNEMONICS.items()},
        "phases": phases(code), "barriers": code.count("BAR.SYNC"),
        "instructions": wide[-1] - wide[0] + 1 if wide else 0,
    }  # fmt: skip


def phases(listing: str) -> list[int]:
    """Loads of 128 bits that are in flight when one of them is first used, in the order of an NVIDIA listing."""
    found, waiting, count = [], set[int](), 0
    for line in listing.splitlines():
        instruction = re.match(r"(?:@!?U?P\w+ )?(\S+) (.*?);", line.strip())
        if instruction is None:
            continue
        name, operands = instruction[1], instruction[2].split(",")
        # the first operand is written, except in stores and atomics, where it is an address
        read = operands if name.startswith(("ST", "ATOM", "RED")) else operands[1:]
        used = {
            int(first) + i
            for first, pair in re.findall(r"\bR(\d+)\b(\.64)?", ",".join(read))
            for i in range(2 if pair else 1)
        }
        if used & waiting:
            found.append(count)
            waiting, count = set(), 0
        if name.startswith("LDG.E") and ".128" in name:
            target = int(re.findall(r"\bR(\d+)", operands[0])[0])
            waiting |= set(range(target, target + 4))
            count += 1
    return [*found, count] if count else found


def _amd(code: str) -> dict[str, Any]:
    # scalars that are moved to lanes of a vector register go to no memory
    return {
        "registers": _number(r"\.vgpr_count:\s+(\d+)", code),
        "spilled": _number(r"\.private_segment_fixed_size:\s+(\d+)", code),
        **{key: _widths(re.findall(rf"\b(?:global|buffer)_{key[:-1]}_\w+", code)) for key in MNEMONICS},
    }


def _number(pattern: str, code: str) -> int:
    found = re.search(pattern, code)
    if found is None:
        raise ValueError(f"no {pattern!r} in the compiler's output: its format has changed")
    return int(found[1])


def _widths(mnemonics: list[str]) -> dict[int, int]:
    """Bits of an access -> number of such accesses."""
    found = ([bits for pattern, bits in WIDTHS.items() if re.search(pattern, mnemonic)] for mnemonic in mnemonics)
    return dict(sorted(Counter((bits or [32])[0] for bits in found).items()))
