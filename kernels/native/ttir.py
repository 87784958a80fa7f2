"""Parses TTIR, the first intermediate language of Triton, into operations, values and blocks.

Triton translates the source of a kernel to TTIR before it assigns work to threads. TTIR has operations on scalars and
tensors, loads and stores through tensors of pointers, `scf.if` and `scf.while`. The parser raises
`UnsupportedError` for all other syntax.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class UnsupportedError(Exception):
    """The kernel has an operation, a type or syntax without a translation."""


class Type(NamedTuple):
    """The type of a value.

    Attributes:
        element: such as f32, i1 or bf16. A pointer has * in front of the type that it points to.
        shape: () for a scalar.
    """

    element: str
    shape: tuple[int, ...] = ()


@dataclass(eq=False)
class Value:
    """A result of an operation or an argument of a block.

    Attributes:
        defining_op: the operation whose result it is, or None for an argument.
        users: the operations that have this value as an operand.
    """

    type: Type
    defining_op: "Operation | None" = None
    users: list["Operation"] = field(default_factory=list)


@dataclass(eq=False)
class Block:
    """A list of operations, and the arguments of the block."""

    arguments: list[Value]
    operations: list["Operation"] = field(default_factory=list)

    @property
    def results(self) -> list[Value]:
        """The operands of `scf.yield` at the end."""
        last = self.operations[-1:]
        return last[0].operands if last and last[0].name == "scf.yield" else []


@dataclass(eq=False)
class Operation:
    """An operation.

    Attributes:
        name: such as arith.addf.
        text: the text between the name and the types.
        blocks: the two branches of `scf.if`, condition and body of `scf.while`, or the combination of `tt.reduce`.
    """

    name: str
    text: str
    operands: list[Value]
    blocks: list[Block] = field(default_factory=list)
    results: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        for operand in self.operands:
            operand.users.append(self)


VALUE = r"%[\w.$-]+(?:#\d+)?"
# %x:2 = "tt.reduce"(…: the name of the results, their number, the name of the operation, and the rest
HEAD = re.compile(r'(?:(%[\w.$-]+)(?::(\d+))? = )?"?([a-z_]+\.[\w.]+)"?(.*)$')
# %x: tensor<128x!tt.ptr<f32>>
ARGUMENT = re.compile(rf"({VALUE}): ((?:[^,(){{}}<>]|<(?:[^<>]|<[^<>]*>)*>)+)")
LOCATION = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
# = 128, = dense<0.0> : tensor<128xf32>, = #tt.…<…>
ATTRIBUTE_VALUE = re.compile(r"= *(?:#tt\.[\w.]+<[^<>]*>|dense<[^<>]*>(?: : \S+)?|\w+)|#tt\.[\w.]+<[^<>]*>")
IGNORED = re.compile(
    # hints about caches, addresses and overflows do not change results
    r"cachePolicy|cache_modifier|cacheModifier|evictionPolicy|eviction_policy|tt\.divisibility|overflow<"
)
TYPES = ("i1", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64")
WITHOUT_RESULT = ("scf.yield", "scf.condition", "tt.store", "tt.return", "tt.reduce.return")


def parse(text: str) -> Block:
    """Parses a module with one kernel. Returns its body, whose arguments are the kernel's.

    Raises:
        UnsupportedError: the text has syntax or types that the parser does not support.
    """
    lines = [re.sub(r" loc\(.*\)$", "", line).strip() for line in text.splitlines()]
    return _Parser(iter([line for line in lines if line and not line.startswith(("#loc", "module", "//"))])).function()


def parse_type(text: str) -> Type:
    """Parses a type, such as tensor<128xf32>."""
    text = text.strip()
    if match := re.fullmatch(r"tensor<([\dx]+)x(.+)>", text):
        return Type(parse_type(match[2]).element, tuple(map(int, match[1].split("x"))))
    if match := re.fullmatch(r"!tt\.ptr<(.+)>", text):
        return Type("*" + parse_type(match[1]).element)
    if text not in TYPES:
        raise UnsupportedError(f"type {text}")
    return Type(text)


def _types(text: str) -> list[Type]:
    """Parses a list of types, such as (i32, tensor<128xf32>)."""
    return [parse_type(part) for part in re.split(r", (?![^<]*>)", text.strip().strip("()")) if part]


class _Parser:
    def __init__(self, lines: Iterator[str]):
        self._lines = lines
        self._values: dict[str, Value] = {}

    def function(self) -> Block:
        line = next(self._lines)
        match = re.match(r"tt\.func public @[\w.]+\((.*)\) attributes", line)
        if match is None:
            raise UnsupportedError(f"a function that starts with {line[:60]!r}")
        return self._block(self._arguments(re.sub(r" \{[^{}]*\}", "", match[1])))

    def _define(self, name: str, kind: Type) -> Value:
        value = self._values[name] = Value(kind)
        return value

    def _arguments(self, line: str) -> list[Value]:
        """Parses the arguments of a block."""
        without_locations = re.sub(LOCATION, "", line)
        return [self._define(name, parse_type(kind)) for name, kind in ARGUMENT.findall(without_locations)]

    def _block(self, arguments: list[Value], end: str = "}") -> Block:
        """Parses a block that must end with this line."""
        block, last = self._open_block(arguments)
        if last != end:
            raise UnsupportedError(last)
        return block

    def _open_block(self, arguments: list[Value]) -> tuple[Block, str]:
        """Parses a block, and returns the line that closes it too."""
        block, outer = Block(arguments), dict(self._values)
        for line in self._lines:
            if line.startswith("}"):
                # the next block may define the same names
                self._values = outer
                return block, line
            if line.startswith("^bb0("):
                block.arguments = self._arguments(line)
            else:
                block.operations.append(self._operation(line))
        raise UnsupportedError("a block without an end")

    def _operation(self, line: str) -> Operation:
        match = HEAD.match(line)
        if match is None:
            raise UnsupportedError(line)
        result, count, name, rest = match.groups()
        with_blocks = {"scf.while": self._while, "scf.if": self._if, "tt.reduce": self._reduce}
        if name not in with_blocks and rest.endswith("{"):
            raise UnsupportedError(name)
        operation, types = with_blocks[name](rest) if name in with_blocks else self._simple(name, rest)
        names = [] if result is None else [result]
        if count is not None:
            names = [f"{result}#{i}" for i in range(int(count))]
        if len(names) != len(types):
            raise UnsupportedError(line)
        operation.results = [self._define(*pair) for pair in zip(names, types, strict=True)]
        for value in operation.results:
            value.defining_op = operation
        return operation

    def _operands(self, text: str) -> list[Value]:
        return [self._values[name] for name in re.findall(VALUE, text)]

    def _simple(self, name: str, rest: str) -> tuple[Operation, list[Type]]:
        """Parses an operation without blocks."""
        if name in ("gpu.barrier", "ttg.barrier", "ttg.local_barrier"):
            return Operation("barrier", rest, []), []
        # the last colon, because attributes such as {end = 128 : i32} have colons too
        text, colon, kind = rest.rpartition(" : ")
        if not colon:
            text, kind = rest, ""
        attributes = re.sub(VALUE, "", text)
        if name in ("tt.load", "tt.store") and re.search(r"\w", IGNORED.sub("", ATTRIBUTE_VALUE.sub("", attributes))):
            raise UnsupportedError(f"{name} with {attributes.strip(' ,')}")
        types = [] if name in WITHOUT_RESULT else [_result_type(name, kind)]
        return Operation(name, text.strip(), self._operands(text)), types

    def _while(self, rest: str) -> tuple[Operation, list[Type]]:
        match = _matched(r" (?:\((.*?)\) )?: (.*?) -> (.*) \{$", "scf.while", rest)
        # the loop-carried values: their names in the loop, and their initial values
        carried = re.findall(rf"({VALUE}) = ({VALUE})", match[1] or "")
        starts = [self._values[start] for _, start in carried]
        arguments = [self._define(name, kind) for (name, _), kind in zip(carried, _types(match[2]), strict=True)]
        condition = self._block(arguments, "} do {")
        return Operation("scf.while", "", starts, [condition, self._block([])]), _types(match[3])

    def _if(self, rest: str) -> tuple[Operation, list[Type]]:
        match = _matched(rf" ({VALUE}) (?:-> (.*) )?\{{$", "scf.if", rest)
        condition = self._values[match[1]]
        first, last = self._open_block([])
        second = self._block([]) if last == "} else {" else Block([])
        if last not in ("}", "} else {"):
            raise UnsupportedError(last)
        return Operation("scf.if", "", [condition], [first, second]), _types(match[2] or "")

    def _reduce(self, rest: str) -> tuple[Operation, list[Type]]:
        match = _matched(rf"\(({VALUE}(?:, {VALUE})*)\) <\{{axis = (\d+) : i32\}}> \(\{{$", "tt.reduce", rest)
        operands = self._operands(match[1])
        combination, last = self._open_block([])
        return Operation("tt.reduce", match[2], operands, [combination]), _types(last.rpartition(" -> ")[2])


def _result_type(name: str, kind: str) -> Type:
    """Returns the type of the result of an operation, which has these types in its text."""
    if name == "arith.constant":
        return parse_type(kind or "i1")
    if " -> " in kind:
        return parse_type(kind.rpartition(" -> ")[2])
    if re.search(r" to (?![^<]*>)", kind):
        return parse_type(kind.rpartition(" to ")[2])
    listed = _types(kind)
    if name in ("arith.cmpi", "arith.cmpf"):
        return listed[0]._replace(element="i1")
    if name == "tt.load":
        return listed[0]._replace(element=listed[0].element[1:])
    return listed[-1] if name == "arith.select" else listed[0]


def _matched(pattern: str, name: str, rest: str) -> "re.Match[str]":
    match = re.match(pattern, rest)
    if match is None:
        raise UnsupportedError(f"{name}{rest}")
    return match
