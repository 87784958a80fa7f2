"""What single types, constants and operations of TTIR are in C."""

import struct
from collections.abc import Sequence

from fused_lwlr.kernels.native.read import Operation, Type, UnsupportedError

C_TYPES = {
    "i1": "_Bool", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t",
    "f16": "f16", "bf16": "bf16", "f32": "float", "f64": "double",
}  # fmt: skip
FLOATS = ("f32", "f64")
ORDERS = {
    "relaxed": "__ATOMIC_RELAXED", "acquire": "__ATOMIC_ACQUIRE", "release": "__ATOMIC_RELEASE",
    "acq_rel": "__ATOMIC_ACQ_REL",
}  # fmt: skip
SIGNED = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
UNSIGNED = {"ult": "<", "ule": "<=", "ugt": ">", "uge": ">="}
ORDERED = {"oeq": "==", "olt": "<", "ole": "<=", "ogt": ">", "oge": ">=", "une": "!="}
NEGATED = {"ult": ">=", "ule": ">", "ugt": "<=", "uge": "<"}
WRAPPING = {"arith.addi": "+", "arith.subi": "-", "arith.muli": "*"}
PLAIN = {
    "arith.addf": "+", "arith.subf": "-", "arith.mulf": "*", "arith.divf": "/", "tt.precise_divf": "/",
    "arith.divsi": "/", "arith.remsi": "%", "arith.andi": "&", "arith.ori": "|", "arith.xori": "^", "arith.shrsi": ">>",
}  # fmt: skip
CHOICES = {
    "arith.minsi": "{0} < {1} ? {0} : {1}", "arith.maxsi": "{0} > {1} ? {0} : {1}",
    "arith.maximumf": "{0} != {0} || {0} >= {1} ? {0} : {1}", "arith.maxnumf": "{1} != {1} || {0} >= {1} ? {0} : {1}",
    "arith.select": "{0} ? {1} : {2}",
}  # fmt: skip
CASTS = ("arith.extsi", "arith.trunci", "arith.extui", "arith.fptosi", "arith.sitofp", "tt.int_to_ptr")

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
/* to the nearest, and to the even one of two; NaN stays NaN. Compilers vectorize these, conversions of _Float16 not */
static inline float of_bf16(bf16 x) { return bits_i32_f32((int32_t)((uint32_t)x << 16)); }
static inline bf16 to_bf16(float x) {
    uint32_t bits = (uint32_t)bits_f32_i32(x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bf16)(x != x ? 0x7fc0 : rounded);
}
static inline float of_f16(f16 x) {
    int32_t magnitude = (x & 0x7fff) << 13, sign = (int32_t)((uint32_t)(x & 0x8000) << 16);
    /* a subnormal number is added to 1/2, whose last digit is worth as much: it works if torch flushes denormals */
    int32_t small = bits_f32_i32(bits_i32_f32(0x3f000000 + (magnitude >> 13)) - 0.5f);
    int32_t finite = magnitude < 0x00800000 ? small : magnitude + (112 << 23);
    return bits_i32_f32(sign | (magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite));
}
static inline f16 to_f16(float x) {
    int32_t bits = bits_f32_i32(x), magnitude = bits & 0x7fffffff, sign = (int32_t)((uint32_t)bits >> 16) & 0x8000;
    int32_t normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    /* the last digit of numbers from 1/2 to 1 is the smallest number */
    int32_t small = bits_f32_i32(bits_i32_f32(magnitude) + 0.5f) - 0x3f000000;
    int32_t finite = magnitude < 0x38800000 ? small : normal;
    return (f16)(sign | (x != x ? 0x7e00 : magnitude >= 0x477ff000 ? 0x7c00 : finite));
}
static inline int32_t atomic_max(int32_t *p, int32_t x) {
    int32_t old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (old < x && !__atomic_compare_exchange_n(p, &old, x, 1, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
    return old;
}
/* what a program does while it waits for another; true after WAIT seconds of computing time */
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


def c_type(kind: Type) -> str:
    """Returns the type in C, with a space or * behind it."""
    if kind.shape:
        raise UnsupportedError("a tensor where a number is expected")
    if kind.element[0] == "*":
        return f"{C_TYPES[kind.element[1:]]} *"
    return f"{C_TYPES[kind.element]} "


def literal(text: str, element: str) -> str:
    """Returns a constant in C."""
    text = text.removeprefix("dense<").removesuffix(">")
    if element == "i1":
        return str(int(text in ("true", "1", "-1")))
    if element[0] == "i":
        number = int(text)
        # there are no negative literals in C: this is a sum
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
    """Returns what an operation computes of numbers.

    Raises:
        UnsupportedError: the operation is not known.
    """
    name, a = op.name, operands[0] if operands else ""
    kinds = [value.type.element for value in op.operands]
    result = op.results[0].type.element
    floating = (name.endswith("f") and name not in ("arith.extf", "arith.truncf", "arith.cmpf")) or name == "math.sqrt"
    if floating and result not in FLOATS:
        raise UnsupportedError(f"{name} of {result}")
    if name in WRAPPING:
        kind = C_TYPES[result]
        return f"({kind})((u{kind}){a} {WRAPPING[name]} (u{kind}){operands[1]})"
    if name in PLAIN:
        return f"{a} {PLAIN[name]} {operands[1]}"
    if name in CHOICES:
        return CHOICES[name].format(*operands)
    if name in CASTS:
        if result[0] == "*":
            return f"({C_TYPES[result[1:]]} *){a}"
        if name == "arith.extsi" and kinds[0] == "i1":
            return f"-({C_TYPES[result]}){a}"
        if result == "i1":
            return f"({a} & 1)"
        return f"({C_TYPES[result]}){a}"
    if name == "arith.extf":
        return f"({C_TYPES[result]})" + (a if kinds[0] == "f32" else f"of_{kinds[0]}({a})")
    if name == "arith.truncf":
        if result in FLOATS:
            return f"({C_TYPES[result]}){a}"
        if kinds[0] == "f32":
            return f"to_{result}({a})"
    if name == "arith.shrui":
        kind = C_TYPES[result]
        return f"({kind})((u{kind}){a} >> {operands[1]})"
    if name == "arith.negf":
        return f"-{a}"
    if name == "math.absf":
        return f"__builtin_fabs{'f' if result == 'f32' else ''}({a})"
    if name in ("math.sqrt", "tt.precise_sqrt"):
        return f"__builtin_sqrt{'f' if result == 'f32' else ''}({a})"
    if name == "tt.bitcast":
        if kinds[0] == result:
            return a
        if result[0] == "*":
            return f"({C_TYPES[result[1:]]} *){a}"
        return f"bits_{kinds[0]}_{result}({a})"
    if name == "tt.addptr":
        return f"{a} + {operands[1]}"
    if name == "tt.get_program_id" and op.text == "x":
        return "program"
    if name == "tt.get_num_programs" and op.text == "x":
        return "programs"
    if name == "arith.cmpi":
        order = op.text.split(",")[0]
        if order in SIGNED:
            return f"{a} {SIGNED[order]} {operands[1]}"
        if order in UNSIGNED and kinds[0][0] == "i":
            kind = C_TYPES[kinds[0]]
            return f"(u{kind}){a} {UNSIGNED[order]} (u{kind}){operands[1]}"
    if name == "arith.cmpf" and kinds[0] in FLOATS:
        order = op.text.split(",")[0]
        if order in ORDERED:
            return f"{a} {ORDERED[order]} {operands[1]}"
        if order in NEGATED:
            return f"!({a} {NEGATED[order]} {operands[1]})"
    raise UnsupportedError(f"{name} {op.text}".strip())
