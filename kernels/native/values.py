"""Represents values of a kernel in C: scalars are variables, and tensors have one of several forms.

An index into a tensor is called a lane. Tensors with a simple structure are never stored: one value for all lanes
(`Uniform`), a value plus the lane (`Affine`), or the lanes before an end (`Mask`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fused_lwlr.kernels.native.c import c_type, expression, literal
from fused_lwlr.kernels.native.ttir import Operation, Type, UnsupportedError, Value


class Uniform(NamedTuple):
    """One value for all lanes, or a scalar."""

    text: str


class Affine(NamedTuple):
    """The sum of this value and the lane."""

    first: str


class Mask(NamedTuple):
    """True in the lanes before `end`, or in all lanes, if `condition` is true or None."""

    condition: str | None
    end: str | None


class Array(NamedTuple):
    """A C array with an element for each lane."""

    name: str


Form = Uniform | Affine | Mask | Array


class Values:
    """The C code written so far, and the form of each value."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.forms: dict[Value, Form] = {}
        self.most_lanes = 1
        self._depth = 1
        self._names = 0

    def line(self, text: str) -> None:
        """Writes a line."""
        self.lines.append("    " * self._depth + text)

    def open(self, text: str) -> None:
        """Writes a line, and indents the lines after it."""
        self.line(text)
        self._depth += 1

    def close(self) -> None:
        """Ends the indented lines with a brace."""
        self._depth -= 1
        self.line("}")

    def name(self) -> str:
        """Returns a new name."""
        self._names += 1
        return f"v{self._names}"

    def variable(self, element: str, text: str = "") -> str:
        """Writes a variable, with a value unless `text` is empty, and returns its name."""
        name = self.name()
        value = f" = {text}" if text else ""
        self.line(f"{c_type(element)}{name}{value};")
        return name

    def array(self, kind: Type) -> str:
        """Writes an array for a tensor, and returns its name."""
        name = self.name()
        self.line(f"{c_type(kind.element)}{name}[{kind.shape[0]}] ALIGNED;")
        return name

    def define(self, value: Value, text: str) -> None:
        """Writes a variable for a scalar, or for one lane of a tensor."""
        self.forms[value] = Uniform(self.variable(value.type.element, text))

    def scalar(self, value: Value) -> str:
        """Returns the expression of a scalar, or of a tensor with one value for all lanes."""
        form = self.forms[value]
        if not isinstance(form, Uniform):
            raise UnsupportedError(f"a tensor of {value.type.element} where a scalar is expected")
        return form.text

    def scalars(self, values: Sequence[Value]) -> list[str]:
        """Returns the expressions of scalars."""
        return [self.scalar(value) for value in values]

    def element(self, value: Value, lane: str, before: Mapping[str, bool]) -> str:
        """Returns the expression of one element of a tensor. `before`: end of a mask -> whether the lane is below."""
        form = self.forms[value]
        if isinstance(form, Uniform):
            return form.text
        if isinstance(form, Array):
            return f"{form.name}[{lane}]"
        if isinstance(form, Affine):
            return f"({c_type(value.type.element)})({form.first} + {lane})"
        inside = None if form.end is None else is_before(form.end, before)
        return "(" + " & ".join(part for part in (form.condition, inside) if part is not None) + ")"

    def simplify(self, op: Operation) -> bool:
        """Finds the form of a result that does not need a loop over lanes. Returns False if the result needs one."""
        if len(op.results) != 1 or op.name in ("tt.load", "tt.reduce"):
            return False
        (result,) = op.results
        forms = [self.forms.get(value) for value in op.operands]
        form: Form | None = None
        if op.name == "arith.constant":
            form = Uniform(literal(op.text, result.type.element))
        elif op.name == "tt.splat" or (op.name == "arith.extsi" and isinstance(forms[0], Affine)):
            form = forms[0]
        elif op.name == "tt.make_range":
            form = _range(op.text, result.type.shape[0])
        elif all(isinstance(each, Uniform) for each in forms):
            form = Uniform(self.variable(result.type.element, expression(op, self.scalars(op.operands))))
        elif op.name in ("arith.addi", "arith.subi", "tt.addptr"):
            form = self._sum(op, *forms)
        elif op.name == "arith.cmpi" and op.text.startswith("slt"):
            form = self._lanes_below(result.type.shape[0], *forms)
        elif op.name == "arith.andi":
            form = self._both(forms)
        if form is not None:
            self.forms[result] = form
        return form is not None

    def _sum(self, op: Operation, a: Form | None, b: Form | None) -> Form | None:
        """Returns the form of the sum of an `Affine` tensor and a `Uniform` one."""
        if isinstance(a, Affine) and isinstance(b, Uniform):
            texts = [a.first, b.text]
        elif isinstance(a, Uniform) and isinstance(b, Affine) and op.name != "arith.subi":
            texts = [a.text, b.first]
        else:
            return None
        return Affine(self.variable(op.results[0].type.element, expression(op, texts)))

    def _lanes_below(self, size: int, a: Form | None, b: Form | None) -> Form | None:
        """Returns the form of a < b, where a increases with the lane."""
        if not isinstance(a, Affine) or not isinstance(b, Uniform):
            return None
        distance = f"(int64_t){b.text} - (int64_t){a.first}"
        return Mask(None, self.variable("i64", f"{distance} < 0 ? 0 : {distance} > {size} ? {size} : {distance}"))

    def _both(self, forms: Sequence[Form | None]) -> Form | None:
        """Returns the form of the conjunction of masks, if at most one end limits them."""
        masks = [mask for mask in map(as_mask, forms) if mask is not None]
        ends = {mask.end for mask in masks if mask.end is not None}
        if len(masks) < len(forms) or len(ends) > 1:
            return None
        conditions = [mask.condition for mask in masks if mask.condition is not None]
        condition = self.variable("i1", " & ".join(conditions)) if conditions else None
        return Mask(condition, ends.pop() if ends else None)


def as_mask(form: Form | None) -> Mask | None:
    """Returns a form as a mask, if it is one condition for all lanes, or for the lanes before an end."""
    if isinstance(form, Uniform):
        return Mask(form.text, None)
    return form if isinstance(form, Mask) else None


def is_before(end: str, before: Mapping[str, bool]) -> str:
    """Returns the condition that a lane is before the end of a mask."""
    return str(int(before[end])) if end in before else f"(i < {end})"


def _range(text: str, size: int) -> Affine:
    """Returns the form of `tt.make_range`, which has attributes such as {end = 128 : i32, start = 0 : i32}."""
    attributes = dict(part.split(" : ")[0].split(" = ") for part in text.strip("{}").split(", "))
    start = int(attributes["start"])
    if int(attributes["end"]) - start != size:
        raise UnsupportedError(f"tt.make_range {text}")
    return Affine(str(start))
