"""Compiles Triton kernels for the CPU of this machine, and runs them on the threads of torch."""

import ctypes
import inspect
import os
import platform
import re
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import ASTSource

from fused_lwlr.kernels.native.c_library import CompileError, compiler, load_library
from fused_lwlr.kernels.native.control import c_code
from fused_lwlr.kernels.native.ttir import UnsupportedError, parse
from fused_lwlr.kernels.tensors import IMPORTING_PROCESS

FLAGS = (
    "-std=gnu11", "-w",
    "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native",
    # each operation is rounded, as on a GPU
    "-ffp-contract=off",
    # square roots and conditional expressions can be vectorized
    "-fno-math-errno", "-fno-trapping-math",
)  # fmt: skip
OPTIMIZE = {"gcc": ("-O1", "-ftree-vectorize", "-fvect-cost-model=dynamic"), "clang": ("-O2",)}
"""The kernels are as fast as with -O3, and compile in less than half of the time."""
WAIT = 60
"""CPU time in seconds after which a program that waits for another ends with an error."""
TYPES: dict[Any, str | None] = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int32: "*i32", torch.int64: "*i64", float: "fp32", int: "i32", type(None): None,
}  # fmt: skip


def compile_kernel(kernel: Any, arguments: Sequence[Any], meta: dict[str, Any]) -> Callable[..., None]:
    """Compiles a kernel for arguments of these types: tensors, numbers and None, in the order of its parameters.

    Returns:
        A function that runs the kernel. Its arguments are the number of programs, the arguments of the kernel, and
        whether one thread runs all programs; without this, the threads of torch run them.

    Raises:
        UnsupportedError: an operation of the kernel has no translation.
        CompileError: a C compiler or OpenMP is missing, or the compiler failed.
    """
    types = tuple([TYPES[value.dtype if isinstance(value, Tensor) else type(value)] for value in arguments])
    try:
        function = _function(kernel, types, tuple([meta.get(name) for name in kernel.arg_names]))
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{kernel.__name__} cannot be compiled for this CPU, because triton {triton.__version__} writes {error}: "
            "pass backend='torch'"
        ) from None
    formats = {"fp32": "f", "i32": "i", None: ""}
    # "P" is a pointer; "0P" pads the end, as C does
    layout = struct.Struct("@" + "".join([formats.get(each, "P") for each in types]) + "0P")
    is_pointer = [each is not None and each[0] == "*" for each in types]
    parallel = _parallel()

    def run(programs: int, arguments: Sequence[Any], one_thread: bool) -> None:
        # a child process does not have the threads of OpenMP, and would wait for them
        threads = 1 if one_thread or os.getpid() != IMPORTING_PROCESS else torch.get_num_threads()
        pairs = zip(arguments, is_pointer, strict=True)
        values = [value.data_ptr() if pointer else value for value, pointer in pairs if value is not None]
        # ctypes releases the global interpreter lock during this call
        if function(layout.pack(*values), programs, threads, parallel):
            raise RuntimeError(f"{kernel.__name__}: a thread waited {WAIT} s for another")

    return run


@cache
def _function(kernel: Any, types: tuple[str | None, ...], meta: tuple[Any, ...]) -> Callable[..., int]:
    """Returns the C function of a kernel, for types of run-time arguments and values of compile-time arguments."""
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    signature |= {name: kind for name, kind in zip(kernel.arg_names, types, strict=False) if kind is not None}
    constants = {(i,): meta[i] for i, name in enumerate(kernel.arg_names) if signature[name] == "constexpr"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    key = f"{source.hash()} {WAIT} {_key()}"
    library = load_library(source.name, lambda: c_code(parse(ttir(source)), WAIT), _flags(), key)
    run: Callable[..., int] = library.run
    run.argtypes = [ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p]  # type: ignore[attr-defined]
    return run


def problem(kernel: Any, types: tuple[str | None, ...], meta: dict[str, Any]) -> str | None:
    """Returns why a kernel cannot be compiled for arguments of these types, or None if it can.

    Any exception is a reason, because compilers, OpenMP and the TTIR of a kernel differ between machines and versions.
    """
    try:
        _parallel()
        _function(kernel, types, tuple([meta.get(name) for name in kernel.arg_names]))
    except Exception as error:
        return f"{error}" or type(error).__name__
    return None


@cache
def _parallel() -> int | None:
    """Returns the address of the OpenMP function that runs a function on several threads.

    The function is in the library that torch has loaded, so that kernels use the same threads.

    Raises:
        CompileError: torch has not loaded such a library.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError) as error:
        raise CompileError("this build of torch has no OpenMP that kernels can use (GOMP_parallel)") from error


@cache
def _flags() -> list[str]:
    """Returns the options of the C compiler."""
    return [*OPTIMIZE["clang" if "clang" in compiler()[1] else "gcc"], *FLAGS]


@cache
def _key() -> str:
    """Returns the source of this translator, Triton's version and the features of this CPU."""
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
    cpu = Path("/proc/cpuinfo")
    features = re.search(r"^(?:flags|Features)\s*:.*", cpu.read_text(), re.MULTILINE) if cpu.exists() else None
    machine = f"{platform.machine()} {features[0] if features else platform.processor()}"
    return "\n".join((*sources, triton.__version__, machine))


def ttir(source: ASTSource) -> str:
    """Returns the TTIR of a kernel, after Triton has simplified it."""
    # imported here, so that GPUs do not need these internals of Triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget, Language
    from triton.compiler.compiler import make_backend

    # TTIR does not depend on the target
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    options = backend.parse_options({"enable_fp_fusion": False})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    arguments = options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    # triton 3.4 has no parameter for the target
    targets = (target,) if "target" in inspect.signature(source.make_ir).parameters else ()
    module = stages["ttir"](source.make_ir(*targets, *arguments), {})
    return f"{module}"
