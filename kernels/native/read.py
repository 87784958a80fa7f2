"""Reads the text of TTIR, Triton's first intermediate language, into a small tree.

TTIR is what Triton makes of the source of a kernel before it decides anything about threads: operations on numbers and
on tensors of one shape, loads and stores through tensors of pointers, `scf.if` and `scf.while`. What this module does
not know raises `UnsupportedError`; nothing is guessed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class UnsupportedError(Exception):
    """The kernel needs something that cannot be translated."""


class Type(NamedTuple):
    """The type of a value.

    Attributes:
        element: such as f32, i1 or bf16, with * in front for a pointer to that.
        shape: of a tensor, () for a number.
    """

    element: str
    shape: tuple[int, ...] = ()


@dataclass(eq=False)
class Value:
    """A result of an operation or an argument of a block.

    Attributes:
        source: the operation; None for an argument.
        users: the operations that have it as an operand.
    """

    type: Type
    source: "Operation | None" = None
    users: list["Operation"] = field(default_factory=list)


@dataclass(eq=False)
class Block:
    """Operations in order, with the arguments that they start from."""

    arguments: list[Value]
    operations: list["Operation"] = field(default_factory=list)


@dataclass(eq=False)
class Operation:
    """An operation.

    Attributes:
        name: such as arith.addf.
        text: what was written between its name and its types.
        blocks: then and else of `scf.if`, condition and body of `scf.while`, combination of `tt.reduce`.
    """

    name: str
    text: str
    operands: list[Value]
    results: list[Value]
    blocks: list[Block] = field(default_factory=list)


class Function(NamedTuple):
    """A kernel: its name, the names of its arguments, and its body."""

    name: str
    arguments: list[str]
    body: Block


VALUE = r"%[\w.$-]+(?:#\d+)?"
HEAD = re.compile(r'(?:(%[\w.$-]+)(?::(\d+))? = )?"?([a-z_]+\.[\w.]+)"?(.*)$')
ARGUMENT = re.compile(rf"({VALUE}): ((?:[^,(){{}}<>]|<(?:[^<>]|<[^<>]*>)*>)+)")
ATTRIBUTES = re.compile(
    # how caches are used, and what is known of addresses and overflows, changes no result
    r"cachePolicy|cache_modifier|cacheModifier|evictionPolicy|eviction_policy|tt\.divisibility|overflow<"
)


def read(text: str) -> Function:
    """Reads a module that holds one kernel."""
    lines = [re.sub(r" loc\(.*\)$", "", line).strip() for line in text.splitlines()]
    reader = _Reader(iter([line for line in lines if line and not line.startswith(("#loc", "module", "//"))]))
    return reader.function()


def type_of(text: str) -> Type:
    """Returns the type that is written so."""
    text = text.strip()
    if match := re.fullmatch(r"tensor<([\dx]+)x(.+)>", text):
        return Type(type_of(match[2]).element, tuple(map(int, match[1].split("x"))))
    if match := re.fullmatch(r"!tt\.ptr<(.+)>", text):
        return Type("*" + type_of(match[1]).element)
    if text not in ("i1", "i8", "i16", "i32", "i64", "f16", "bf16", "f32", "f64"):
        raise UnsupportedError(f"type {text}")
    return Type(text)


def _types(text: str) -> list[Type]:
    """Returns the types of a list such as (i32, tensor<128xf32>)."""
    return [type_of(part) for part in re.split(r", (?![^<]*>)", text.strip().strip("()")) if part]


class _Reader:
    def __init__(self, lines: Iterator[str]):
        self._lines = lines
        self._values: dict[str, Value] = {}

    def function(self) -> Function:
        line = next(self._lines)
        match = re.match(r"tt\.func public @([\w.]+)\((.*)\) attributes", line)
        if match is None:
            raise UnsupportedError(f"a function that starts with {line[:60]!r}")
        found = _arguments(re.sub(r" \{[^{}]*\}", "", match[2]))
        arguments = [self._define(name, type_of(kind)) for name, kind in found]
        body, last = self._block(arguments)
        if last != "}":
            raise UnsupportedError(last)
        return Function(match[1], [name[1:] for name, _ in found], body)

    def _define(self, name: str, kind: Type) -> Value:
        value = self._values[name] = Value(kind)
        return value

    def _value(self, name: str) -> Value:
        return self._values[name]

    def _block(self, arguments: list[Value]) -> tuple[Block, str]:
        """Reads to the line that closes a block, which it returns too."""
        block, outer = Block(arguments), dict(self._values)
        for line in self._lines:
            if line.startswith("}"):
                # names of one block may be given again in the next
                self._values = outer
                return block, line
            if line.startswith("^bb0("):
                block.arguments = [self._define(name, type_of(kind)) for name, kind in _arguments(line)]
            else:
                block.operations.append(self._operation(line))
        raise UnsupportedError("a block without an end")

    def _operation(self, line: str) -> Operation:
        match = HEAD.match(line)
        if match is None:
            raise UnsupportedError(line)
        result, count, name, rest = match.groups()
        if name == "scf.while":
            operation, types = self._while(rest)
        elif name == "scf.for":
            operation, types = self._for(rest)
        elif name == "scf.if":
            operation, types = self._if(rest)
        elif name == "tt.reduce":
            operation, types = self._reduce(rest)
        elif rest.endswith("{"):
            raise UnsupportedError(name)
        else:
            operation, types = self._simple(name, rest)
        names = [] if result is None else [result] if count is None else [f"{result}#{i}" for i in range(int(count))]
        if name == "scf.for":
            # what counts is a result of the loop that this becomes
            names = ["", *names]
        if len(names) != len(types):
            raise UnsupportedError(line)
        operation.results = [self._define(*pair) for pair in zip(names, types, strict=True)]
        return _connected(operation)

    def _operands(self, text: str) -> list[Value]:
        return [self._value(name) for name in re.findall(VALUE, text)]

    def _simple(self, name: str, rest: str) -> tuple[Operation, list[Type]]:
        # an attribute has colons of its own, as in {end = 128 : i32}
        text, colon, kind = rest.rpartition(" : ")
        if not colon:
            text, kind = rest, ""
        if name == "arith.constant":
            types = [type_of(kind or "i1")]
        elif name in ("scf.yield", "scf.condition", "tt.store", "tt.return", "tt.reduce.return"):
            types = []
        elif name in ("gpu.barrier", "ttg.barrier", "ttg.local_barrier"):
            return Operation("barrier", rest, [], []), []
        elif " -> " in kind:
            types = [type_of(kind.rpartition(" -> ")[2])]
        elif re.search(r" to (?![^<]*>)", kind):
            types = [type_of(kind.rpartition(" to ")[2])]
        else:
            listed = _types(kind)
            types = [listed[-1] if name == "arith.select" else listed[0]]
            if name in ("arith.cmpi", "arith.cmpf"):
                types = [types[0]._replace(element="i1")]
            elif name == "tt.load":
                types = [types[0]._replace(element=types[0].element[1:])]
        attributes = re.sub(VALUE, "", text)
        if name in ("tt.load", "tt.store") and re.search(r"\w", ATTRIBUTES.sub("", _without_values(attributes))):
            raise UnsupportedError(f"{name} with {attributes.strip(' ,')}")
        return Operation(name, text.strip(), self._operands(text), []), types

    def _while(self, rest: str) -> tuple[Operation, list[Type]]:
        match = re.match(r" (?:\((.*?)\) )?: (.*?) -> (.*) \{$", rest)
        if match is None:
            raise UnsupportedError(f"scf.while{rest}")
        pairs = re.findall(rf"({VALUE}) = ({VALUE})", match[1] or "")
        operation = Operation("scf.while", "", [self._value(start) for _, start in pairs], [])
        arguments = [self._define(name, kind) for (name, _), kind in zip(pairs, _types(match[2]), strict=True)]
        condition, last = self._block(arguments)
        if last != "} do {":
            raise UnsupportedError(last)
        body, last = self._block([])
        if last != "}":
            raise UnsupportedError(last)
        operation.blocks = [condition, body]
        return operation, _types(match[3])

    def _for(self, rest: str) -> tuple[Operation, list[Type]]:
        """Reads a loop that counts as one that asks before each turn."""
        match = re.match(
            rf" ({VALUE}) = ({VALUE}) to ({VALUE}) step ({VALUE}) (?:iter_args\((.*?)\) -> (\(.*?\)) )? ?: (i\d+) \{{$",
            rest,
        )
        if match is None:
            raise UnsupportedError(f"scf.for{rest}")
        name, (start, stop, step) = match[1], map(self._value, match.group(2, 3, 4))
        pairs, kind = re.findall(rf"({VALUE}) = ({VALUE})", match[5] or ""), type_of(match[7])
        types = [kind, *_types(match[6] or "")]
        asked = [Value(each) for each in types]
        names = [name, *(name for name, _ in pairs)]
        body, last = self._block([self._define(*pair) for pair in zip(names, types, strict=True)])
        if last != "}":
            raise UnsupportedError(last)
        goes_on = _connected(Operation("arith.cmpi", "slt, ", [asked[0], stop], [Value(Type("i1"))]))
        condition = _connected(Operation("scf.condition", "", [goes_on.results[0], *asked], []))
        counted = _connected(Operation("arith.addi", "", [body.arguments[0], step], [Value(kind)]))
        if not pairs:
            body.operations.append(Operation("scf.yield", "", [], []))
        passes_on = body.operations[-1]
        passes_on.operands.insert(0, counted.results[0])
        counted.results[0].users.append(passes_on)
        body.operations.insert(-1, counted)
        starts = [start, *(self._value(value) for _, value in pairs)]
        return Operation("scf.while", "", starts, [], [Block(asked, [goes_on, condition]), body]), types

    def _if(self, rest: str) -> tuple[Operation, list[Type]]:
        match = re.match(rf" ({VALUE}) (?:-> (.*) )?\{{$", rest)
        if match is None:
            raise UnsupportedError(f"scf.if{rest}")
        operation = Operation("scf.if", "", [self._value(match[1])], [])
        then, last = self._block([])
        otherwise = Block([])
        if last == "} else {":
            otherwise, last = self._block([])
        if last != "}":
            raise UnsupportedError(last)
        operation.blocks = [then, otherwise]
        return operation, _types(match[2] or "")

    def _reduce(self, rest: str) -> tuple[Operation, list[Type]]:
        match = re.match(rf"\(({VALUE}(?:, {VALUE})*)\) <\{{axis = (\d+) : i32\}}> \(\{{$", rest)
        if match is None:
            raise UnsupportedError(f"tt.reduce{rest}")
        operation = Operation("tt.reduce", match[2], self._operands(match[1]), [])
        combination, last = self._block([])
        operation.blocks = [combination]
        return operation, _types(last.rpartition(" -> ")[2])


def _connected(operation: Operation) -> Operation:
    """Lets the operands and results of an operation know it."""
    for operand in operation.operands:
        operand.users.append(operation)
    for value in operation.results:
        value.source = operation
    return operation


def _arguments(line: str) -> list[tuple[str, str]]:
    """Returns the names and types of the arguments of a block."""
    return ARGUMENT.findall(re.sub(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "", line))


def _without_values(text: str) -> str:
    """Returns the names of attributes of a load or store: what is left without what they are set to."""
    return re.sub(r"= *(?:#tt\.[\w.]+<[^<>]*>|dense<[^<>]*>(?: : \S+)?|\w+)|#tt\.[\w.]+<[^<>]*>", "", text)
