"""Writes loops over the lanes of tensors, with the largest possible number of operations in each loop.

Operations wait in loops until their results are needed, for example by a branch, an atomic operation or a reduction to
a scalar. A result that no later loop needs is a variable in its loop; the other results are arrays.

The loops rely on properties of our kernels, which are not proven here:

- No lane of a loop reads memory that another lane of this loop writes. The C compiler gets this promise.
- No scalar is loaded from memory of a tensor that was stored since the last branch, barrier or atomic operation.
- The sum of the first offset of a tensor and a lane does not overflow.

A reduction to a scalar adds the two halves of a tensor until one element is left. The sign of a maximum of two zeros is
undefined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fused_lwlr.kernels.native.c import c_type, expression, literal
from fused_lwlr.kernels.native.ttir import Block, Operation, UnsupportedError, Value
from fused_lwlr.kernels.native.values import Affine, Array, Mask, Uniform, Values, as_mask, is_before

AHEAD, SHORT = 4096, 1024
"""Loops with at most `SHORT` lanes prefetch memory `AHEAD` bytes ahead. The queue reads a tile in such loops, and the
hardware does not prefetch well where a loop reads a single column, as for norms: a step of SGD with ELR took 16.3 ms
without this prefetch and 12.7 ms with it."""


@dataclass(eq=False)
class Loop:
    """Operations that will be written as one loop.

    Attributes:
        arrays: the arrays of results that are needed after the loop.
        starts: for loads and stores of contiguous lanes: the address of lane 0.
        redirected: loads and stores that use a dummy array if the condition of their mask is false: lanes need no test.
    """

    size: int
    operations: list[Operation] = field(default_factory=list)
    arrays: dict[Value, str] = field(default_factory=dict)
    starts: dict[Operation, str] = field(default_factory=dict)
    redirected: set[Operation] = field(default_factory=set)


class Lanes(Values):
    """Collects operations on tensors into loops, and writes the loops."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: dict[Value, str] = {}
        """The existing arrays for results of loops."""
        self._loops: list[Loop] = []
        self._loop_of: dict[Value, int] = {}

    def schedule(self, op: Operation) -> None:
        """Adds an operation to the first possible loop."""
        value = op.results[0] if op.results else op.operands[1]
        if len(value.type.shape) != 1:
            raise UnsupportedError(f"{op.name} of {value.type.shape}")
        size = value.type.shape[0]
        # not before the loops of its operands, nor before an access to the same memory
        index = max([self._loop_of.get(operand, 0) for operand in op.operands], default=0)
        conflicts = {"tt.load": {"tt.store"}, "tt.store": {"tt.load", "tt.store"}}.get(op.name, set())
        for i, loop in enumerate(self._loops):
            if not conflicts.isdisjoint(each.name for each in loop.operations):
                index = max(index, i)
        while index < len(self._loops) and self._loops[index].size != size:
            index += 1
        if index == len(self._loops):
            self._loops.append(Loop(size))
        self._loops[index].operations.append(op)
        self._loop_of.update(dict.fromkeys(op.results, index))

    def flush(self) -> None:
        """Writes all loops."""
        loops, self._loops = self._loops, []
        self._loop_of.clear()
        for loop in loops:
            self._write(loop)

    def _write(self, loop: Loop) -> None:
        """Writes one loop, or with a mask one loop before the end of the mask and one after it."""
        for op in loop.operations:
            for result in op.results:
                if not set(loop.operations).issuperset(result.users):
                    loop.arrays[result] = self.targets.get(result) or self.array(result.type)
        self.most_lanes = max(self.most_lanes, loop.size)
        self.open("{")
        for op in loop.operations:
            if op.name in ("tt.load", "tt.store"):
                self._start(loop, op)
        masks = [self.forms.get(value) for op in loop.operations for value in op.operands if value.type.element == "i1"]
        ends = [mask.end for mask in masks if isinstance(mask, Mask) and mask.end is not None]
        if ends:
            end = ends[0]
            self._body(loop, "0", end, {end: True})
            stores = [self._mask(op.operands[2:]) for op in loop.operations if op.name == "tt.store"]
            if loop.arrays or any(mask is None or mask.end != end for mask in stores):
                self._body(loop, end, str(loop.size), {end: False})
        else:
            self._body(loop, "0", str(loop.size), {})
        self.close()
        self.forms.update({value: Array(name) for value, name in loop.arrays.items()})

    def _start(self, loop: Loop, op: Operation) -> None:
        """Writes the address of lane 0 of a load or a store, if the addresses of lanes are contiguous.

        If the condition of the mask is false, the address is an array of zeros or an unused array. The lanes do not
        need the condition then: with a test in each lane, a step of SGD took twice as long.
        """
        pointer = op.operands[0]
        form = self.forms.get(pointer)
        if not isinstance(form, Affine):
            return
        loads, kind = op.name == "tt.load", c_type(pointer.type.element)
        address = form.first
        mask = self._mask(op.operands[1 if loads else 2 :])
        # an array of zeros is right only for a load whose other lanes are 0
        others = op.operands[2:] if loads else []
        others_are_zero = all(self.forms.get(other) == Uniform(literal("0", other.type.element)) for other in others)
        if mask is not None and others_are_zero:
            loop.redirected.add(op)
            if mask.condition is not None:
                address = f"{mask.condition} ? {address} : ({kind}){'zeros' if loads else 'unused'}"
        name = loop.starts[op] = self.name()
        self.line(f"{'const ' if loads else ''}{kind}{name} = {address};")
        if loads and loop.size <= SHORT:
            line = f"for (int64_t i = 0; i < {loop.size}; i += 64 / sizeof *{name})"
            self.line(f"{line} __builtin_prefetch((const char *)({name} + i) + {AHEAD});")

    def _mask(self, values: Sequence[Value]) -> Mask | None:
        """Returns the mask of a load or store, if it has one with one condition for all lanes before its end."""
        return as_mask(self.forms.get(values[0])) if values else None

    def _body(self, loop: Loop, start: str, stop: str, before: Mapping[str, bool]) -> None:
        """Writes the operations of a loop for these lanes."""
        outer = dict(self.forms)
        self.for_lanes(stop, start)
        for op in loop.operations:
            if op.name == "tt.store":
                self._store(loop, op, before)
                continue
            (result,) = op.results
            if op.name == "tt.load":
                text = self._load(loop, op, before)
            else:
                text = expression(op, [self.element(value, "i", before) for value in op.operands])
            self.define(result, text)
            if result in loop.arrays:
                self.line(f"{loop.arrays[result]}[i] = {self.scalar(result)};")
        self.close()
        self.forms = outer

    def for_lanes(self, stop: int | str, start: str = "0") -> None:
        """Opens a loop over lanes, which must not depend on one another."""
        self.line("LANES")
        self.open(f"for (int64_t i = {start}; i < {stop}; i++) {{")

    def _load(self, loop: Loop, op: Operation, before: Mapping[str, bool]) -> str:
        place, condition = self._address(loop, op, op.operands[1:], before)
        if condition == "1":
            return place
        other = self.element(op.operands[2], "i", before) if op.operands[2:] else "0"
        return other if condition == "0" else f"{condition} ? {place} : {other}"

    def _store(self, loop: Loop, op: Operation, before: Mapping[str, bool]) -> None:
        place, condition = self._address(loop, op, op.operands[2:], before)
        if condition != "0":
            test = "" if condition == "1" else f"if ({condition}) "
            self.line(f"{test}{place} = {self.element(op.operands[1], 'i', before)};")

    def _address(self, loop: Loop, op: Operation, mask: Sequence[Value], before: Mapping[str, bool]) -> tuple[str, str]:
        """Returns the memory that a lane loads or stores, and the condition under which it does."""
        place = f"{loop.starts[op]}[i]" if op in loop.starts else f"*({self.element(op.operands[0], 'i', before)})"
        if not mask:
            return place, "1"
        form = self._mask(mask) if op in loop.redirected else None
        if form is None:
            return place, self.element(mask[0], "i", before)
        return place, "1" if form.end is None else is_before(form.end, before)

    def _combine(self, block: Block, a: Sequence[str], b: Sequence[str]) -> list[str]:
        """Writes the combination of two elements of each operand of a reduction, and returns its results."""
        for argument, text in zip(block.arguments, (*a, *b), strict=True):
            self.forms[argument] = Uniform(text)
        *operations, tt_reduce_return = block.operations
        for op in operations:
            if not self.simplify(op):
                raise UnsupportedError(f"{op.name} in tt.reduce")
        return self.scalars(tt_reduce_return.operands)

    def reduce(self, op: Operation) -> None:
        """Writes the reduction of tensors to scalars, in halves."""
        sources, shape = op.operands, op.operands[0].type.shape
        half = shape[0] // 2
        if len(shape) != 1 or half == 0 or shape[0] & (shape[0] - 1):
            raise UnsupportedError(f"tt.reduce of {shape}")
        names = [self.array(source.type._replace(shape=(half,))) for source in sources]

        def write_loop(lanes: int | str, a: Sequence[str], b: Sequence[str]) -> None:
            self.for_lanes(lanes)
            for name, text in zip(names, self._combine(op.blocks[0], a, b), strict=True):
                self.line(f"{name}[i] = {text};")
            self.close()

        first_half = [self.element(source, "i", {}) for source in sources]
        second_half = [self.element(source, f"(i + {half})", {}) for source in sources]
        write_loop(half, first_half, second_half)
        self.open(f"for (int64_t half = {half // 2}; half > 0; half /= 2) {{")
        write_loop("half", [f"{name}[i]" for name in names], [f"{name}[i + half]" for name in names])
        self.close()
        for name, result in zip(names, op.results, strict=True):
            self.define(result, f"{name}[0]")
