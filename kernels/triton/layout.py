"""Where rows are in memory, and which tensors one flat loop may walk together."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from fused_lwlr.kernels.look import agree, describe_all
from fused_lwlr.kernels.table import Table, real

# bits of a row's traits, and the bit at which p of Ŵᵖ begins
SCALED, ANCHOR, KNOWN, POWER = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(3)

Strides = tuple[int, ...]


class Column(NamedTuple):
    """Where rows are in one column.

    Attributes:
        addresses: of each row; 0 where its tensor is absent or empty.
        offsets: of each row from where its tensor begins, in bytes; 0 as well there.
        sizes: of each row, in bytes; 0 where it is absent.
        scratch: by their number, what stands in for tensors that a kernel cannot walk as they are.
    """

    addresses: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    scratch: Mapping[int, Tensor]


class Layout:
    """Of the R rows of a table all that stays as it is, taken down once.

    A kernel walks a row in storage order, so all columns of a row must have the same strides and fill
    one run of memory. Where one does not, a scratch tensor stands in for it: filled before the launch,
    and copied back after it if the kernel writes that column.

    Attributes:
        tensor: which one each row is of, int64 [R].
        first: its first element there, in storage order, int64 [R].
        numel: its elements, int64 [R].
        traits: its bits, int64 [R].
        multiplier: of its learning rate, float64 [R].
        strides: for each tensor, those that all of its columns must have.
        whole: whether each row is one tensor, in their order.
    """

    def __init__(self, table: Table):
        params = [real(p) for p in table.columns["param"]]
        tensor, start, stop, multiplier, scaled, power, anchor = zip(*table.rows, strict=True)
        slices = [i for i, end in enumerate(stop) if end is not None]
        split = {tensor[i] for i in slices}
        self.strides = [p.stride() if p.is_contiguous() else walk(p, i in split) for i, p in enumerate(params)]
        _, traits = describe_all(table.columns["param"])
        lazy = any(t.is_neg() or t.is_conj() for t in table.columns["param"])
        # what columns are of which a look at each tensor would find none that kernels cannot walk as it is
        self._plain = None if lazy or self.strides != [*map(Tensor.stride, params)] else traits
        self.tensor = np.array(tensor, dtype=np.int64)
        self.whole = not slices and tensor == tuple(range(len(params)))
        self.first = np.zeros(len(tensor), dtype=np.int64)
        self.numel = np.array([*map(Tensor.numel, params)], dtype=np.int64)[self.tensor]
        for i in slices:
            # counted in storage order
            inner = params[tensor[i]].numel() // max(params[tensor[i]].shape[0], 1)
            self.first[i], self.numel[i] = start[i] * inner, (stop[i] - start[i]) * inner
        self.traits = SCALED.value * np.array(scaled) | ANCHOR.value * np.array(anchor)
        self.traits |= np.array(power) << POWER.value
        self.multiplier = np.array(multiplier, dtype=np.float64)
        self._rows: np.ndarray | None = None
        self._columns: dict[str, Column] = {}

    def pick(self, chosen: np.ndarray) -> "Layout":
        """Of the table of some of the tensors.

        Args:
            chosen: for each tensor whether it is one of them, bool.
        """
        picked: Layout = Layout.__new__(Layout)
        rows = chosen[self.tensor]
        picked.tensor = (np.cumsum(chosen) - 1)[self.tensor[rows]]
        picked.first, picked.numel, picked.traits = self.first[rows], self.numel[rows], self.traits[rows]
        picked.multiplier = self.multiplier[rows]
        picked.strides = [self.strides[i] for i in np.flatnonzero(chosen).tolist()]
        picked.whole = self.whole
        picked._plain = None
        picked._rows = rows
        picked._columns = {}
        return picked

    def column(self, table: Table, name: str) -> Column:
        """Where rows are in a column of the table that stays where it is."""
        if name not in self._columns:
            whole = None
            if table.origin is not None:
                whole = layout_of(table.origin[0]).column(table.origin[0], name)
            if whole is None or whole.scratch:
                self._columns[name] = self.lay_out(table, name, *describe_all(table.columns[name]))
            else:
                rows = self._rows
                self._columns[name] = Column(whole.addresses[rows], whole.offsets[rows], whole.sizes[rows], {})
        return self._columns[name]

    def lay_out(self, table: Table, name: str, where: bytes, traits: object) -> Column:
        """Where rows are in a column.

        Args:
            where, traits: of its tensors, as `describe_all` says.
        """
        tensors = table.columns[name]
        found: dict[int, Tensor | None] = {}
        if name != "step" and (self._plain is None or traits != self._plain):
            walked = enumerate(zip(tensors, self.strides, strict=True))
            # strides of a complex tensor are none of these, which are of its real numbers
            odd = [i for i, (t, strides) in walked if t is not None and (t.stride() != strides or t.is_neg())]
            found = {i: stand_in(tensors[i], self.strides[i]) for i in odd}
        scratch = {i: t for i, t in found.items() if t is not None}
        itemsize = next((real(t).element_size() for t in tensors if t is not None), 0)
        present = np.array([t is not None for t in tensors])[self.tensor]
        sizes = np.where(present, self.numel * itemsize, 0)
        # an absent tensor and an empty one have the address 0, which stays 0
        offsets = np.where(present & (name != "step"), self.first * itemsize, 0)
        return Column(self.addresses(where, offsets, scratch), offsets, sizes, scratch)

    def addresses(self, where: bytes, offsets: np.ndarray, scratch: Mapping[int, Tensor]) -> np.ndarray:
        """Of each row, from where tensors begin."""
        base = np.frombuffer(where, dtype=np.int64)
        if scratch:
            base = base.copy()
            for i, tensor in scratch.items():
                base[i] = tensor.data_ptr()
        return base if self.whole else base[self.tensor] + offsets


def layout_of(table: Table) -> Layout:
    """The layout of a table, made on the first call."""
    layout: Layout | None = table.images.get("layout")
    if layout is None:
        if table.origin is None:
            layout = Layout(table)
        else:
            origin, chosen = table.origin
            layout = layout_of(origin).pick(chosen)
        table.images["layout"] = layout
    return layout


def walk(param: Tensor, split: bool) -> Strides:
    """The strides that every column of a parameter must have to be walked as one run of memory.

    The parameter's own where its elements fill one run (and, if it is split along the first dimension,
    that dimension is the outermost), else those of a contiguous tensor.
    """
    order = sorted(
        (stride, size, dim)
        for dim, (size, stride) in enumerate(zip(param.shape, param.stride(), strict=True))
        if size > 1
    )
    expected = 1
    for stride, size, _ in order:
        if stride != expected:
            break
        expected *= size
    dense = expected == param.numel()
    outermost = not split or not order or order[-1][2] == 0 or param.shape[0] == 1
    return param.stride() if dense and outermost else _contiguous(param.shape)


def stand_in(tensor: Tensor, strides: Strides) -> Tensor | None:
    """None if a kernel can walk the tensor with these strides as it is, else an empty one that it can."""
    plain = not (tensor.is_conj() or tensor.is_neg())
    tensor = real(tensor)
    if (plain and agree(tensor, strides)) or tensor.numel() == 0:
        return None
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)


def _contiguous(shape: Sequence[int]) -> Strides:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides) if shape else ()
