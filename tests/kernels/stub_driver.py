"""Triton's own host code for NVIDIA's GPUs, down to a driver that has no GPU: `libcuda.c`."""

import ctypes
import struct
from typing import NamedTuple

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

KPARAM_INFO = 0x17
"""Attribute of a function in a cubin that describes one parameter; 4 is the format of attributes with a size."""
FORMATS = {"i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
DTYPES = {"i64": torch.int64, "i32": torch.int32, "fp32": torch.float32, "fp64": torch.float64}


class Parameter(NamedTuple):
    """A parameter of a compiled function.

    Attributes:
        offset, size: bytes.
    """

    offset: int
    size: int


def layout_of(cubin: bytes, name: str) -> list[Parameter]:
    """The parameters of a function, in order, from the section of an ELF file that describes it."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)]
    strings = sections[names][4]
    wanted, found = f".nv.info.{name}".encode() + b"\0", {}
    for label, _, _, _, begin, size in sections:
        at, end = begin, begin + size
        if not cubin.startswith(wanted, strings + label):
            continue
        while at < end:
            kind, attribute, length = struct.unpack_from("<BBH", cubin, at)
            if (kind, attribute) == (4, KPARAM_INFO):
                _, ordinal, offset, flags = struct.unpack_from("<IHHI", cubin, at + 4)
                found[ordinal] = Parameter(offset, flags >> 18)
            at += 4 + (length if kind == 4 else 0)
    return [found[i] for i in range(len(found))]


class Utils(CudaUtils):
    """Triton's functions in C, with a list of loaded functions and of launches."""

    def __init__(self):
        super().__init__()
        self.functions, self.launched = {}, []
        self._load = self.load_binary
        self.load_binary = self.remember
        self._callback = ctypes.CFUNCTYPE(
            None, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
        )(self.seen)
        ctypes.CDLL("libcuda.so.1").on_launch(self._callback)

    def remember(self, name, kernel, shared, device):
        loaded = self._load(name, kernel, shared, device)
        self.functions[loaded[1]] = name, layout_of(kernel, name)
        return loaded

    def seen(self, programs, threads, function, parameters):
        """Reads each parameter, with its size in the cubin."""
        name, layout = self.functions[function]
        values = [ctypes.string_at(parameters[i], size) for i, (_, size) in enumerate(layout)]
        self.launched.append((name, programs, threads, values))


class Launcher(CudaLauncher):
    """Triton's launcher, with a check of the parameters that the device gets."""

    def __init__(self, source, metadata):
        super().__init__(source, metadata)
        self.source, self.metadata = source, metadata

    def __call__(self, *call):
        super().__call__(*call)
        name, programs, threads, values = UTILS.launched.pop()
        assert UTILS.launched == []
        expected = []
        for i, (kind, arg) in enumerate(zip(self.source.signature.values(), call[9:], strict=True)):
            if kind == "constexpr":
                assert self.source.constants[(i,)] == arg, (i, arg)
            elif kind.startswith("*"):
                assert arg.dtype == DTYPES[kind[1:]], (kind, arg)
                assert arg.data_ptr() % dict(self.source.attrs.get((i,), ())).get("tt.divisibility", 1) == 0
                expected.append(struct.pack("<q", arg.data_ptr()))
            else:
                assert isinstance(arg, float if kind.startswith("fp") else int), (kind, arg)
                expected.append(struct.pack("<" + FORMATS[kind], arg))
        # addresses of scratch memory for the kernel and for a profiler: both are 0
        assert values == [*expected, bytes(8), bytes(8)]
        offset = 0
        for parameter, value in zip(UTILS.functions[call[4]][1], values, strict=True):
            offset = -(-offset // len(value)) * len(value)
            assert parameter == (offset, len(value))
            offset += len(value)
        print(name, programs, threads // 32, self.metadata.enable_fp_fusion, self.metadata.maxnreg)


class Driver:
    """A driver of an H100."""

    launcher_cls = Launcher

    def __init__(self):
        global UTILS
        self.utils = UTILS = Utils()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0
