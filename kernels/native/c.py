"""C code of types, constants and single operations."""

import struct
from collections.abc import Sequence

from fused_lwlr.kernels.native.ttir import Operation, UnsupportedError

C_TYPES = {
    "i1": "_Bool", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t",
    "f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double",
}  # fmt: skip
INTEGERS = ("i8", "i16", "i32", "i64")
FLOATS = ("f32", "f64")
ORDERS = ("relaxed", "acquire", "release", "acq_rel")
# {type} is the C type of the first operand, {f} the suffix of functions of this type
TEMPLATES = {
    "arith.addf": "{0} + {1}", "arith.subf": "{0} - {1}", "arith.mulf": "{0} * {1}", "arith.divf": "{0} / {1}",
    "tt.precise_divf": "{0} / {1}", "arith.negf": "-{0}", "math.absf": "__builtin_fabs{f}({0})",
    "math.sqrt": "__builtin_sqrt{f}({0})", "tt.precise_sqrt": "__builtin_sqrt{f}({0})",
    "arith.maximumf": "{0} != {0} || {0} >= {1} ? {0} : {1}", "arith.maxnumf": "{1} != {1} || {0} >= {1} ? {0} : {1}",
    "arith.addi": "({type})((u{type}){0} + (u{type}){1})", "arith.subi": "({type})((u{type}){0} - (u{type}){1})",
    "arith.muli": "({type})((u{type}){0} * (u{type}){1})", "arith.divsi": "{0} / {1}", "arith.remsi": "{0} % {1}",
    "arith.andi": "{0} & {1}", "arith.ori": "{0} | {1}", "arith.xori": "{0} ^ {1}",
    "arith.shrsi": "{0} >> {1}", "arith.shrui": "({type})((u{type}){0} >> {1})",
    "arith.minsi": "{0} < {1} ? {0} : {1}",
    "arith.select": "{0} ? {1} : {2}", "tt.addptr": "{0} + {1}",
    "tt.get_program_id x": "program", "tt.get_num_programs x": "programs",
    "arith.cmpi eq": "{0} == {1}", "arith.cmpi ne": "{0} != {1}",
    "arith.cmpi slt": "{0} < {1}", "arith.cmpi sle": "{0} <= {1}",
    "arith.cmpi sgt": "{0} > {1}",
    "arith.cmpf oeq": "{0} == {1}", "arith.cmpf une": "{0} != {1}",
    "arith.cmpf olt": "{0} < {1}", "arith.cmpf ole": "{0} <= {1}",
    "arith.cmpf ogt": "{0} > {1}", "arith.cmpf oge": "{0} >= {1}",
    "arith.cmpf ult": "!({0} >= {1})", "arith.cmpf ule": "!({0} > {1})",
    "arith.cmpf ugt": "!({0} <= {1})", "arith.cmpf uge": "!({0} < {1})",
}  # fmt: skip
CASTS = ("arith.extsi", "arith.trunci", "arith.extui", "arith.fptosi", "arith.sitofp", "tt.int_to_ptr", "tt.bitcast")

PRELUDE = """\
#include <stdint.h>
#include <string.h>
#include <sched.h>
#include <time.h>
typedef uint16_t bf16, f16;
#ifdef __clang__
#define LANES _Pragma("clang loop vectorize(assume_safety)")
#else
#define LANES _Pragma("GCC ivdep")
#endif
#define ALIGNED __attribute__((aligned(64)))
#define BITS(NAME, FROM, TO) \\
    static inline TO NAME(FROM x) { TO y; memcpy(&y, &x, sizeof y); return y; }
BITS(bits_f32_i32, float, int32_t) BITS(bits_i32_f32, int32_t, float)
BITS(bits_f64_i64, double, int64_t) BITS(bits_i64_f64, int64_t, double)
/* Rounding is to nearest, ties to even, and NaN stays NaN. Compilers vectorize these functions, but not _Float16. */
static inline float of_bf16(bf16 x) { return bits_i32_f32((int32_t)((uint32_t)x << 16)); }
static inline bf16 to_bf16(float x) {
    uint32_t bits = (uint32_t)bits_f32_i32(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)(x != x ? 0x7fc0 : rounded);
}
static inline float of_f16(f16 x) {
    int32_t magnitude = (x & 0x7fff) << 13, sign = (int32_t)((uint32_t)(x & 0x8000) << 16);
    /* a subnormal number as the last bits of 1/2: no float32 here is denormal, which the CPU may flush to zero */
    int32_t small = bits_f32_i32(bits_i32_f32(0x3f000000 + (magnitude >> 13)) - 0.5f);
    int32_t finite = magnitude < 0x00800000 ? small : magnitude + (112 << 23);
    return bits_i32_f32(sign | (magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite));
}
static inline f16 to_f16(float x) {
    int32_t bits = bits_f32_i32(x), magnitude = bits & 0x7fffffff, sign = (int32_t)((uint32_t)bits >> 16) & 0x8000;
    int32_t normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    /* the last bit of numbers from 1/2 to 1 is the smallest positive float16 */
    int32_t small = bits_f32_i32(bits_i32_f32(magnitude) + 0.5f) - 0x3f000000;
    int32_t finite = magnitude < 0x38800000 ? small : normal;
    return (f16)(sign | (x != x ? 0x7e00 : magnitude >= 0x477ff000 ? 0x7c00 : finite));
}
/* A program that waits for another calls this in each turn. It returns 1 after WAIT seconds of CPU time. */
static int wait(int64_t *turns) {
    static __thread struct timespec start;
    struct timespec now;
    if ((++*turns & 63) == 0) sched_yield();
    if ((*turns & 0xfff) == 0) {
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
        if (*turns == 0x1000) start = now;
        return now.tv_sec - start.tv_sec > WAIT;
    }
    return 0;
}
static const char zeros[8 * MOST_LANES] ALIGNED;
static __thread char unused[8 * MOST_LANES] ALIGNED;
"""


def c_type(element: str) -> str:
    """Returns the C type of an element, with a space or * at the end."""
    return f"{C_TYPES[element[1:]]} *" if element[0] == "*" else f"{C_TYPES[element]} "


def literal(text: str, element: str) -> str:
    """Returns the C literal of a constant."""
    text = text.removeprefix("dense<").removesuffix(">")
    if element == "i1":
        return str(int(text in ("true", "1", "-1")))
    if element[0] == "i":
        number = int(text)
        # C has no literal for the least integer
        return f"({number + 1} - 1)" if number == -(2**63) else f"(({C_TYPES[element]}){number})"
    if text.startswith("0x"):
        pattern = {"f32": "f", "f64": "d", "f16": "e"}[element]
        bits = bytes.fromhex(text[2:].zfill(2 * struct.calcsize(pattern)))
        (value,) = struct.unpack(">" + pattern, bits)
    else:
        value = float(text)
    if element == "bf16":
        return f"((bf16){struct.unpack('<I', struct.pack('<f', value))[0] >> 16})"
    if element == "f16":
        return f"((f16){struct.unpack('<H', struct.pack('<e', value))[0]})"
    if value != value:
        return f'(({C_TYPES[element]})__builtin_nan(""))'
    if value in (float("inf"), -float("inf")):
        return f"(({C_TYPES[element]}){'-' if value < 0 else ''}__builtin_inf())"
    return f"(({C_TYPES[element]}){value.hex()})"


def expression(op: Operation, operands: Sequence[str]) -> str:
    """Returns the C expression of an operation on scalars.

    Raises:
        UnsupportedError: the operation is unknown.
    """
    element = op.operands[0].type.element if op.operands else ""
    template = TEMPLATES.get(op.name) or TEMPLATES.get(f"{op.name} {op.text.split(',')[0]}")
    if template is None:
        return _conversion(op, operands[0] if operands else "")
    of_integers = "{type}" in template
    of_floats = op.name.endswith("f") or op.name in ("math.sqrt", "tt.precise_sqrt")
    if (of_integers and element not in INTEGERS) or (of_floats and element not in FLOATS):
        raise UnsupportedError(f"{op.name} of {element}")
    return template.format(*operands, type=C_TYPES[element] if of_integers else "", f="f" if element == "f32" else "")


def _conversion(op: Operation, operand: str) -> str:
    """Returns the C expression of the conversion of a scalar to another type."""
    name, target = op.name, op.results[0].type.element
    source = op.operands[0].type.element if op.operands else ""
    if name in CASTS:
        if name == "tt.bitcast" and target[0] != "*":
            return operand if source == target else f"bits_{source}_{target}({operand})"
        if name == "arith.extsi" and source == "i1":
            return f"-({C_TYPES[target]}){operand}"
        if name == "arith.extui" and source != "i1":
            return f"({C_TYPES[target]})(u{C_TYPES[source]}){operand}"
        return f"({operand} & 1)" if target == "i1" else f"({c_type(target)}){operand}"
    if name == "arith.extf":
        return f"({C_TYPES[target]})" + (operand if source == "f32" else f"of_{source}({operand})")
    if name == "arith.truncf" and target in FLOATS:
        return f"({C_TYPES[target]}){operand}"
    if name == "arith.truncf" and source == "f32":
        return f"to_{target}({operand})"
    raise UnsupportedError(f"{name} {op.text}".strip())
