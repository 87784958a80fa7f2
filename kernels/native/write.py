"""Writes C for a kernel: a function that runs one program, on one thread.

Numbers become variables. Operations on the elements of tensors become loops over lanes, as many operations in a loop as
can be: they wait in `_Run`s until something needs their results, such as a branch, an atomic operation or a reduction.
Results that no later loop needs are variables of their loop; others are arrays. Some tensors are never stored: one
value for all lanes (`_Uniform`), a value and the number of the lane (`_Affine`), or the lanes before an end (`_Mask`).

This relies on what holds for our kernels, and is not proven here:

- No lane of a loop reads what another lane of this loop writes. Loops are compiled with this promise.
- No number is loaded from where a tensor was stored since the last branch, barrier or atomic operation.
- The first lane's offset and the number of the lane add up without an overflow.

Sums are added up in halves: lane i and lane i + n/2, and so on. The sign of a maximum of two zeros is not defined.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fused_lwlr.kernels.native.c import C_TYPES, ORDERS, PRELUDE, c_type, expression, literal
from fused_lwlr.kernels.native.read import Block, Function, Operation, Type, UnsupportedError, Value

AHEAD, SHORT = 4096, 1024
"""Bytes ahead of which loops of few lanes fetch memory. The queue goes through a tile in short loops. Where one of them
reads one column alone, as for norms, the hardware does not keep up: SGD with ELR took 16.3 ms without, 12.7 with it."""


class _Uniform(NamedTuple):
    """One value for all lanes, and every number."""

    text: str


class _Affine(NamedTuple):
    """This value and the number of the lane."""

    first: str


class _Mask(NamedTuple):
    """The lanes before `end`, or all, if the condition `where` holds."""

    where: str | None
    end: str | None


class _Array(NamedTuple):
    """An array."""

    name: str


class _Reshaped(NamedTuple):
    """Another tensor, cut into rows."""

    source: Value


_Form = _Uniform | _Affine | _Mask | _Array | _Reshaped


@dataclass(eq=False)
class _Run:
    """Operations that wait to be written as one loop.

    Attributes:
        size: the number of lanes.
        arrays: results that are needed later, and the arrays that they are written to.
        starts: where loads and stores of lanes in order start, and whether that is elsewhere if they are forbidden.
    """

    size: int
    operations: list[Operation] = field(default_factory=list)
    arrays: dict[Value, str] = field(default_factory=dict)
    starts: dict[Operation, tuple[str, bool]] = field(default_factory=dict)


class _Writer:
    def __init__(self, function: Function):
        self.lines: list[str] = []
        self._depth = 1
        self._names = 0
        self._forms: dict[Value, _Form] = {}
        self._runs: list[_Run] = []
        self._run_of: dict[Value, int] = {}
        self._homes: dict[Value, str] = {}
        """The arrays that results of loops are to be written to."""
        self.most_lanes = 1
        self._function = function

    def write(self) -> None:
        """Writes the body of the function."""
        for name, value in zip(self._function.arguments, self._function.body.arguments, strict=True):
            self._forms[value] = _Uniform(self._variable(value.type, f"a->{name}"))
        self._block(self._function.body)

    # text

    def _line(self, text: str) -> None:
        self.lines.append("    " * self._depth + text)

    def _open(self, text: str) -> None:
        self._line(text)
        self._depth += 1

    def _close(self, text: str = "}") -> None:
        self._depth -= 1
        self._line(text)

    def _name(self) -> str:
        self._names += 1
        return f"v{self._names}"

    def _variable(self, kind: Type, text: str) -> str:
        """Writes a variable with this value, and returns its name."""
        name = self._name()
        self._line(f"{c_type(kind)}const {name} = {text};")
        return name

    def _array(self, kind: Type) -> str:
        name = self._name()
        self.most_lanes = max(self.most_lanes, kind.shape[0])
        self._line(f"{c_type(kind._replace(shape=()))}{name}[{kind.shape[0]}] ALIGNED;")
        return name

    # values

    def _number(self, value: Value) -> str:
        """Returns the text of a number, or of a tensor that is the same in all lanes."""
        form = self._forms[value]
        if not isinstance(form, _Uniform):
            raise UnsupportedError(f"a tensor of {value.type.element} where a number is expected")
        return form.text

    def _lane(self, value: Value, lane: str, before: dict[str, bool]) -> str:
        """Returns the text of a value in a lane. `before` says of ends of masks whether the lane is before them."""
        form = self._forms[value]
        if isinstance(form, _Uniform):
            return form.text
        if isinstance(form, _Affine):
            if value.type.element[0] == "*":
                return f"({form.first} + {lane})"
            return f"({C_TYPES[value.type.element]})({form.first} + {lane})"
        if isinstance(form, _Array):
            return f"{form.name}[{lane}]"
        if isinstance(form, _Mask):
            inside = None if form.end is None else _inside(form.end, before)
            return "(" + " & ".join(part for part in (form.where, inside) if part is not None) + ")"
        raise UnsupportedError("a tensor of two dimensions in a loop")

    # operations

    def _block(self, block: Block) -> None:
        for operation in block.operations:
            self._operation(operation)
        self._flush()

    def _operation(self, op: Operation) -> None:
        name = op.name
        tensors = [value for value in (*op.operands, *op.results) if value.type.shape]
        if name == "scf.if":
            self._flush()
            self._if(op)
        elif name == "scf.while":
            self._flush()
            self._while(op)
        elif name in ("scf.yield", "scf.condition", "tt.reduce.return", "tt.return") or name == "barrier":
            self._flush()
        elif name == "tt.atomic_rmw":
            self._flush()
            self._atomic(op)
        elif name == "tt.reduce" and op.text == "0":
            self._flush()
            self._reduce(op)
        elif name == "tt.store" and not tensors:
            self._flush()
            pointer, value, *mask = map(self._number, op.operands)
            self._line(f"{f'if ({mask[0]}) ' if mask else ''}*{pointer} = {value};")
        elif name == "tt.load" and not tensors:
            self._forms[op.results[0]] = _Uniform(self._variable(op.results[0].type, _loaded(*self._numbers(op))))
        elif name == "tt.reshape":
            (source,), (result,) = op.operands, op.results
            if len(source.type.shape) != 1 or len(result.type.shape) != 2:
                raise UnsupportedError(f"tt.reshape of {source.type.shape} to {result.type.shape}")
            form = self._forms.get(source)
            self._forms[result] = form if isinstance(form, _Uniform) else _Reshaped(source)
        elif not self._known(op):
            self._wait(op)

    def _numbers(self, op: Operation) -> list[str]:
        return list(map(self._number, op.operands))

    def _known(self, op: Operation) -> bool:
        """Finds the form of a result that need not be computed for each lane."""
        name, operands = op.name, op.operands
        if len(op.results) != 1 or name in ("tt.load", "tt.reduce"):
            return False
        (result,) = op.results
        forms = [self._forms.get(value) for value in operands]
        form: _Form | None = None
        if name == "arith.constant":
            form = _Uniform(literal(op.text, result.type.element))
        elif name == "tt.splat":
            form = forms[0]
        elif name == "tt.make_range":
            start, size = _range(op.text)
            if size != result.type.shape[0]:
                raise UnsupportedError(f"tt.make_range {op.text}")
            form = _Affine(str(start))
        elif all(isinstance(each, _Uniform) for each in forms):
            number = result.type._replace(shape=())
            form = _Uniform(self._variable(number, expression(op, self._numbers(op))))
        elif name in ("arith.addi", "arith.subi", "tt.addptr") and len(forms) == 2:
            form = self._sum(op, forms)
        elif name == "arith.extsi" and isinstance(forms[0], _Affine):
            form = forms[0]
        elif name == "arith.cmpi" and op.text.startswith("slt"):
            if isinstance(forms[0], _Affine) and isinstance(forms[1], _Uniform):
                first, end, size = forms[0].first, forms[1].text, result.type.shape[0]
                distance = f"(int64_t){end} - (int64_t){first}"
                name = self._variable(Type("i64"), f"{distance} < 0 ? 0 : {distance} > {size} ? {size} : {distance}")
                form = _Mask(None, name)
        elif name == "arith.andi" and all(isinstance(each, _Mask | _Uniform) for each in forms):
            masks = [each if isinstance(each, _Mask) else _Mask(each.text, None) for each in forms]  # type: ignore[union-attr]
            conditions = [mask.where for mask in masks if mask.where is not None]
            ends = {mask.end for mask in masks if mask.end is not None}
            if len(ends) <= 1:
                where = self._variable(Type("i1"), " & ".join(conditions)) if conditions else None
                form = _Mask(where, ends.pop() if ends else None)
        if form is not None:
            self._forms[result] = form
        return form is not None

    def _sum(self, op: Operation, forms: Sequence[_Form | None]) -> _Form | None:
        """Returns the form of a sum of one value for all lanes and one that has the number of the lane in it."""
        a, b = forms
        number = op.results[0].type._replace(shape=())
        if isinstance(a, _Affine) and isinstance(b, _Uniform):
            return _Affine(self._variable(number, expression(op, [a.first, b.text])))
        if isinstance(a, _Uniform) and isinstance(b, _Affine) and op.name != "arith.subi":
            return _Affine(self._variable(number, expression(op, [a.text, b.first])))
        return None

    # loops over lanes

    def _wait(self, op: Operation) -> None:
        """Puts an operation into the first run that it can be in."""
        value = op.results[0] if op.results else op.operands[1]
        if len(value.type.shape) != 1:
            raise UnsupportedError(f"{op.name} of {value.type.shape}")
        if op.name not in ("tt.load", "tt.store", "tt.reduce"):
            expression(op, ["0"] * len(op.operands))
        size, at = value.type.shape[0], 0
        for operand in op.operands:
            form = self._forms.get(operand)
            source = form.source if isinstance(form, _Reshaped) else operand
            if source in self._run_of:
                run = self._run_of[source]
                at = max(at, run + (source is not operand or self._runs[run].size != size))
        for index, before in enumerate(self._runs):
            names = {each.name for each in before.operations}
            if ("tt.store" in names and op.name in ("tt.load", "tt.store")) or (
                "tt.load" in names and op.name == "tt.store"
            ):
                at = max(at, index)
        while at < len(self._runs) and self._runs[at].size != size:
            at += 1
        if at == len(self._runs):
            self._runs.append(_Run(size))
        self._runs[at].operations.append(op)
        self._run_of.update(dict.fromkeys(op.results, at))

    def _flush(self) -> None:
        """Writes the operations that wait."""
        runs, self._runs = self._runs, []
        self._run_of.clear()
        for run in runs:
            self._loop(run)

    def _loop(self, run: _Run) -> None:
        """Writes a run. If it has a mask that ends somewhere, that is one loop before the end and one after it."""
        for op in run.operations:
            for result in op.results:
                if not set(run.operations).issuperset(result.users):
                    run.arrays[result] = self._homes.get(result) or self._array(result.type)
        self.most_lanes = max(self.most_lanes, run.size)
        self._open("{")
        for op in run.operations:
            if op.name in ("tt.load", "tt.store"):
                self._start(run, op)
        masks = [self._forms.get(value) for op in run.operations for value in op.operands if value.type.element == "i1"]
        ends = [mask.end for mask in masks if isinstance(mask, _Mask) and mask.end is not None]
        if ends:
            self._lanes(run, "0", ends[0], {ends[0]: True})
            if run.arrays:
                self._lanes(run, ends[0], str(run.size), {ends[0]: False})
        else:
            self._lanes(run, "0", str(run.size), {})
        self._close()
        self._forms.update({value: _Array(name) for value, name in run.arrays.items()})

    def _start(self, run: _Run, op: Operation) -> None:
        """Writes where a load or a store starts, if its lanes are in order.

        Where a condition does not hold, zeros are loaded, and what is stored is not used: lanes need not ask.
        """
        pointer, form = op.operands[0], self._forms.get(op.operands[0])
        if not isinstance(form, _Affine):
            return
        loads, kind = op.name == "tt.load", c_type(pointer.type._replace(shape=()))
        mask = self._mask(op.operands[1 if loads else 2 :])
        others = op.operands[2:] if loads else []
        elsewhere = mask is not None and all(self._forms.get(other) == _zero(other.type) for other in others)
        text, name = form.first, self._name()
        if elsewhere and mask.where is not None:  # type: ignore[union-attr]
            text = f"{mask.where} ? {text} : ({kind}){'zeros' if loads else 'unused'}"  # type: ignore[union-attr]
        self._line(f"{'const ' if loads else ''}{kind}{name} = {text};")
        run.starts[op] = name, elsewhere
        if loads and run.size <= SHORT:
            line = f"for (int64_t i = 0; i < {run.size}; i += 64 / sizeof *{name})"
            self._line(f"{line} __builtin_prefetch((const char *)({name} + i) + {AHEAD});")

    def _mask(self, values: Sequence[Value]) -> _Mask | None:
        """Returns the mask of a load or store, if it has one that is the same for all lanes before its end."""
        form = self._forms.get(values[0]) if values else None
        return _Mask(form.text, None) if isinstance(form, _Uniform) else form if isinstance(form, _Mask) else None

    def _lanes(self, run: _Run, start: str, stop: str, before: dict[str, bool]) -> None:
        """Writes one loop."""
        outer = dict(self._forms)
        self._line("LANES")
        self._open(f"for (int64_t i = {start}; i < {stop}; i++) {{")
        for op in run.operations:
            if op.name == "tt.store":
                self._store(run, op, before)
                continue
            (result,) = op.results
            if op.name == "tt.load":
                text = self._load(run, op, before)
            elif op.name == "tt.reduce":
                text = self._fold(op)
            else:
                text = expression(op, [self._lane(value, "i", before) for value in op.operands])
            name = self._variable(result.type._replace(shape=()), text)
            self._forms[result] = _Uniform(name)
            if result in run.arrays:
                self._line(f"{run.arrays[result]}[i] = {name};")
        self._close()
        self._forms = outer

    def _load(self, run: _Run, op: Operation, before: dict[str, bool]) -> str:
        place, condition = self._address(run, op, op.operands[1:], before)
        if condition == "1":
            return place
        other = self._lane(op.operands[2], "i", before) if op.operands[2:] else "0"
        return other if condition == "0" else f"{condition} ? {place} : {other}"

    def _store(self, run: _Run, op: Operation, before: dict[str, bool]) -> None:
        place, condition = self._address(run, op, op.operands[2:], before)
        if condition != "0":
            asks = "" if condition == "1" else f"if ({condition}) "
            self._line(f"{asks}{place} = {self._lane(op.operands[1], 'i', before)};")

    def _address(self, run: _Run, op: Operation, mask: Sequence[Value], before: dict[str, bool]) -> tuple[str, str]:
        """Returns what a lane loads or stores to, and the condition under which it does."""
        start, elsewhere = run.starts.get(op, (None, False))
        place = f"*({self._lane(op.operands[0], 'i', before)})" if start is None else f"{start}[i]"
        if not mask:
            return place, "1"
        form = self._mask(mask) if elsewhere else None
        if form is None:
            return place, self._lane(mask[0], "i", before)
        return place, "1" if form.end is None else _inside(form.end, before)

    def _fold(self, op: Operation) -> str:
        """Writes the reduction of a row of a tensor of two dimensions, and returns the name of the result."""
        (reshaped,) = op.operands
        form = self._forms.get(reshaped)
        if op.text != "1" or not isinstance(form, _Reshaped | _Uniform):
            raise UnsupportedError("tt.reduce of other tensors than reshaped ones")
        source, width = form.source if isinstance(form, _Reshaped) else reshaped, reshaped.type.shape[1]
        parts = [self._lane(source, f"({width} * i + {k})", {}) for k in range(width)]
        total = parts[0]
        for part in parts[1:]:
            (total,) = self._combine(op.blocks[0], [total], [part])
        return total

    def _combine(self, block: Block, a: Sequence[str], b: Sequence[str]) -> list[str]:
        """Writes the combination of two elements of every operand of a reduction, and returns its results."""
        for argument, text in zip(block.arguments, (*a, *b), strict=True):
            self._forms[argument] = _Uniform(text)
        *operations, last = block.operations
        for op in operations:
            if not self._known(op):
                raise UnsupportedError(f"{op.name} in tt.reduce")
        return self._numbers(last)

    def _reduce(self, op: Operation) -> None:
        """Writes the reduction of tensors to numbers, in halves."""
        sources, shape = op.operands, op.operands[0].type.shape
        (size,), half = shape if len(shape) == 1 else (0,), shape[0] // 2
        if not size or size & (size - 1):
            raise UnsupportedError(f"tt.reduce of {shape}")
        if size == 1:
            for source, result in zip(sources, op.results, strict=True):
                self._forms[result] = _Uniform(self._variable(result.type, self._lane(source, "0", {})))
            return
        names = [self._array(source.type._replace(shape=(half,))) for source in sources]

        def combine(lanes: int | str, a: Sequence[str], b: Sequence[str]) -> None:
            self._line("LANES")
            self._open(f"for (int64_t i = 0; i < {lanes}; i++) {{")
            for name, text in zip(names, self._combine(op.blocks[0], a, b), strict=True):
                self._line(f"{name}[i] = {text};")
            self._close()

        pairs = [[self._lane(source, lane, {}) for source in sources] for lane in ("i", f"(i + {half})")]
        combine(half, *pairs)
        self._open(f"for (int64_t half = {half // 2}; half > 0; half /= 2) {{")
        combine("half", [f"{name}[i]" for name in names], [f"{name}[i + half]" for name in names])
        self._close()
        for name, result in zip(names, op.results, strict=True):
            self._forms[result] = _Uniform(self._variable(result.type, f"{name}[0]"))

    def _atomic(self, op: Operation) -> None:
        kind, order, _ = (part.strip() for part in op.text.split(",")[:3])
        pointer, value, mask = self._numbers(op)
        if order not in ORDERS or op.results[0].type.element not in ("i32", "i64"):
            raise UnsupportedError(f"tt.atomic_rmw {op.text}")
        if kind == "add":
            text = f"__atomic_fetch_add({pointer}, {value}, {ORDERS[order]})"
        elif kind == "exch":
            text = f"__atomic_exchange_n({pointer}, {value}, {ORDERS[order]})"
        elif kind == "max" and op.results[0].type.element == "i32":
            text = f"atomic_max({pointer}, {value})"
        else:
            raise UnsupportedError(f"tt.atomic_rmw {op.text}")
        self._forms[op.results[0]] = _Uniform(self._variable(op.results[0].type, f"{mask} ? {text} : 0"))

    # branches and loops

    def _if(self, op: Operation) -> None:
        names = []
        for result in op.results:
            if result.type.shape:
                name = self._homes.get(result) or self._array(result.type)
            else:
                name = self._name()
                self._line(f"{c_type(result.type)}{name};")
            names.append(name)
        self._open(f"if ({self._number(op.operands[0])}) {{")
        for block in op.blocks:
            if block is op.blocks[1]:
                if not block.operations:
                    continue
                self._close("} else {")
                self._depth += 1
            results = _last(block)
            self._place_results(results, names)
            self._block(block)
            for value, name in zip(results, names, strict=True):
                self._assign(value, name)
        self._close()
        for result, name in zip(op.results, names, strict=True):
            self._forms[result] = _Array(name) if result.type.shape else _Uniform(name)

    def _while(self, op: Operation) -> None:
        condition, body = op.blocks
        names = []
        for start, argument in zip(op.operands, condition.arguments, strict=True):
            if argument.type.shape:
                name = self._array(argument.type)
                self._assign(start, name)
                self._forms[argument] = _Array(name)
            else:
                name = self._name()
                self._line(f"{c_type(argument.type)}{name} = {self._number(start)};")
                self._forms[argument] = _Uniform(name)
            names.append(name)
        *operations, last = condition.operations
        passed = last.operands[1:]
        # a value that the condition computes is to be seen behind the loop too
        shown = {}
        for value in passed:
            if value not in condition.arguments and value not in shown and not value.type.shape:
                shown[value] = self._name()
                self._line(f"{c_type(value.type)}{shown[value]};")
        spins = all(each.name == "scf.yield" for each in body.operations)
        if spins:
            turns = self._name()
            self._line(f"int64_t {turns} = 0;")
        self._open("for (;;) {")
        for each in operations:
            self._operation(each)
        self._flush()
        for value, name in shown.items():
            self._line(f"{name} = {self._number(value)};")
        self._line(f"if (!{self._number(last.operands[0])}) break;")
        ends: list[_Form] = [_Uniform(shown[value]) if value in shown else self._forms[value] for value in passed]
        self._forms.update(zip(body.arguments, ends, strict=True))
        if spins:
            self._line(f"if (wait(&{turns})) return 1;")
        results = _last(body)
        self._place_results(results, names)
        self._block(body)
        moved = {}
        for value, name in zip(results, names, strict=True):
            form = self._forms[value]
            if not value.type.shape:
                moved[name] = self._variable(value.type, self._number(value))
            elif isinstance(form, _Array) and form.name in names and form.name != name:
                raise UnsupportedError("tensors of a loop that trade places")
            else:
                self._assign(value, name)
        for name, text in moved.items():
            self._line(f"{name} = {text};")
        self._close()
        self._forms.update(zip(op.results, ends, strict=True))

    def _assign(self, value: Value, name: str) -> None:
        """Writes a value to a variable or an array."""
        if not value.type.shape:
            self._line(f"{name} = {self._number(value)};")
        elif self._forms[value] != _Array(name):
            self._line("LANES")
            self._line(f"for (int64_t i = 0; i < {value.type.shape[0]}; i++) {name}[i] = {self._lane(value, 'i', {})};")

    def _place_results(self, results: Sequence[Value], names: Sequence[str]) -> None:
        """Lets results of a block be written to these arrays at once, if what is there is not needed any more.

        That is so if nothing reads it but the operations that make the result, lane by lane.
        """
        for value, name in zip(results, names, strict=True):
            if value.type.shape and value not in self._forms and len(value.users) == 1:
                here = [other for other, form in self._forms.items() if form == _Array(name)]
                readers = {op for other in here for op in other.users if not op.name.startswith("scf.")}
                if readers <= _makers(value):
                    self._homes[value] = name


def _makers(value: Value) -> set[Operation]:
    """Returns the operations that compute a value, in whatever branch."""
    op = value.source
    if op is None or op.name != "scf.if":
        return {op} if op is not None and op.name != "scf.while" else set()
    index = op.results.index(value)
    return set().union(*[_makers(_last(block)[index]) for block in op.blocks])


def _inside(end: str, before: dict[str, bool]) -> str:
    """Returns the condition that a lane is before the end of a mask."""
    return str(int(before[end])) if end in before else f"(i < {end})"


def _zero(kind: Type) -> _Uniform:
    return _Uniform(literal("0", kind.element))


def _last(block: Block) -> list[Value]:
    """Returns what the last operation of a block passes on."""
    if not block.operations or block.operations[-1].name != "scf.yield":
        return []
    return block.operations[-1].operands


def _range(text: str) -> tuple[int, int]:
    """Returns the start and the size of `tt.make_range`."""
    found = dict(part.split(" : ")[0].split(" = ") for part in text.strip("{}").split(", "))
    return int(found["start"]), int(found["end"]) - int(found["start"])


def _loaded(pointer: str, mask: str | None = None, other: str = "0") -> str:
    return f"*{pointer}" if mask is None else f"{mask} ? *{pointer} : {other}"


def write(function: Function, most_wait: int) -> str:
    """Returns the C source of a kernel.

    Args:
        most_wait: the seconds that a program waits for another at most; then the kernel ends with an error.
    """
    writer = _Writer(function)
    writer.write()
    members = "".join(
        f" {c_type(value.type)}{name};" for name, value in zip(function.arguments, function.body.arguments, strict=True)
    )
    body = "\n".join(writer.lines)
    return f"""\
#define MOST_LANES {writer.most_lanes}
#define WAIT {most_wait}
{PRELUDE}
struct arguments {{{members} }};
static int run_program(const struct arguments *a, int32_t program, int32_t programs) {{
{body}
    return 0;
}}
struct launch {{ struct arguments arguments; int32_t programs, next, failed; }};
/* each thread runs programs until there are none left */
static void take_programs(void *data) {{
    struct launch *launch = data;
    int32_t program;
    while ((program = __atomic_fetch_add(&launch->next, 1, __ATOMIC_RELAXED)) < launch->programs)
        if (run_program(&launch->arguments, program, launch->programs))
            __atomic_store_n(&launch->failed, 1, __ATOMIC_RELAXED);
}}
typedef void parallel(void (*)(void *), void *, unsigned, unsigned);
int run(const void *arguments, int32_t programs, int32_t threads, parallel *parallel) {{
    struct launch launch = {{ .programs = programs }};
    memcpy(&launch.arguments, arguments, sizeof launch.arguments);
    if (threads > 1 && programs > 1) parallel(take_programs, &launch, threads, 0);
    else take_programs(&launch);
    return launch.failed;
}}
"""
