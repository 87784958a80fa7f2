"""Adapts Triton's interpreter for the tests: GPU rounding, reported integer overflows, and a sixth of the time.

Objects that the interpreter rebuilds for every operation or call without need are cached; nothing else changes.
"""

import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def adapt() -> None:
    """Change the interpreter, for the rest of the process: before a kernel runs."""
    round_to_nearest()
    tell_overflows()
    reduce_in_halves()
    replace_language_once()
    look_up_types_once()
    share_types()
    share_shapes()


def round_to_nearest() -> None:
    """Round float32 to bfloat16 like every GPU; the interpreter truncates by default."""
    cast = InterpreterBuilder.cast_impl

    def rounding(self, source, dtype):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        bits = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.int16).numpy()
        return TensorHandle(bits.view("uint16"), dtype.scalar)

    InterpreterBuilder.cast_impl = rounding


def reduce_in_halves() -> None:
    """Reduce by a function of ours in halves, like compilers; by default the interpreter adds one element at a time."""

    def reduce(self, inputs):
        lanes = [tensor.handle.data for tensor in inputs]
        assert self.axis == 0
        assert {data.ndim for data in lanes} == {1}
        while len(lanes[0]) > 1:
            half = len(lanes[0]) // 2
            halves = [data[part] for part in (slice(half), slice(half, None)) for data in lanes]
            dtypes = [tensor.dtype for tensor in inputs] * 2
            found = self.combine_fn.fn(
                *(self.to_tensor(data, dtype) for data, dtype in zip(halves, dtypes, strict=True))
            )
            lanes = [tensor.handle.data for tensor in found]
        return [self.to_tensor(data.item(), tensor.dtype) for data, tensor in zip(lanes, inputs, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce


def tell_overflows() -> None:
    """Report overflows of integers below 64 bits: the interpreter detects them but does not report them."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(self, lhs, rhs, operation):
        dtype, name = lhs.type.scalar, operation.__name__
        if dtype.int_bitwidth < 64:
            exact = operations[name](lhs.handle.data.astype(np.int64), rhs.handle.data.astype(np.int64))
            fits = dtype.get_int_min_value() <= exact.min() and exact.max() <= dtype.get_int_max_value()
            assert fits, f"{dtype} overflow in {name}"

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def replace_language_once() -> None:
    """Replace functions of the language once, instead of in every call of every function."""
    # all replacements for a function that uses these two
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)


def look_up_types_once() -> None:
    """Cache numpy's dtypes, which the interpreter looks up in a new table each time."""
    look_up, known = interpreter._get_np_dtype, {}

    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = np_dtype


def share_types() -> None:
    """Cache types of blocks, and the result type of two others; equal types are mostly the same object."""
    equal, known = tl.dtype.__eq__, {}

    def block_type(dtype, shape):
        key = dtype.name, *shape
        if key not in known:
            known[key] = tl.block_type(dtype, shape)
        return known[key]

    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    tl.block_type.with_element_ty = lambda self, dtype: block_type(dtype, self.shape)
    InterpreterBuilder.get_block_ty = lambda self, dtype, shape: block_type(dtype, shape)
    TritonSemantic.computation_type_impl = cache(TritonSemantic.computation_type_impl)


def share_shapes() -> None:
    """Cache a tensor's shape and number of elements as constants; tensors of equal shape are not broadcast."""

    @cache
    def constants(shape):
        return tl.core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = constants(tuple(type.shape) if type.is_block() else ())

    tl.tensor.__init__ = init

    broadcast = TritonSemantic.broadcast_impl_value
    TritonSemantic.broadcast_impl_value = lambda self, lhs, rhs: (
        (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)
    )
