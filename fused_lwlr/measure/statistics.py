"""Statistics of every layer's gradient and weight, from one pass over memory."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fused_lwlr import backends
from fused_lwlr.kernels import STATISTICS, Row, Table, reference
from fused_lwlr.kernels.tensors import joined, untraced
from fused_lwlr.measure.layers import Layer, named_layers
from fused_lwlr.memory import all_addressable, is_freed
from fused_lwlr.shards import ShardReducer, is_distributed, local, local_row, shard_reducer_of
from fused_lwlr.step_statistics import Columns


@dataclass(frozen=True)
class LayerStatistics(Columns):
    """Statistics of the gradient g and the weight w of each layer. They stay on the device until they are read.

    Attributes:
        names: the names of the layers.
        numel: the number of elements of each layer.
        values: float64 of shape [layers, 6]. The columns are Σ|g|, Σg², the number of non-finite elements of g,
            Σw², max|g| and Σg·w. In all of them a complex number counts as two real ones.
    """

    names: tuple[str, ...]
    numel: tuple[int, ...]
    values: Tensor

    columns = STATISTICS

    @property
    def abs_max(self) -> Tensor:
        """max|g| of each layer, float64 [layers]."""
        return self._column("abs_max")

    @property
    def dot(self) -> Tensor:
        """⟨g, w⟩ of each layer, float64 [layers]."""
        return self._column("dot")

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Returns layer name -> statistic -> number, with one transfer from the device."""
        rows = self._rows("abs_sum", "grad_norm", "abs_max", "weight_norm", "dot", "nonfinite")
        return {name: {"numel": numel, **row} for name, numel, row in zip(self.names, self.numel, rows, strict=True)}

    def __str__(self) -> str:
        return "\n".join(self._table(self.to_dict(), "numel", "Σ|g|", "‖g‖", "max|g|", "‖w‖", "⟨g,w⟩", "non-finite"))


class StatisticsPass:
    """Runs the statistics kernel over some layers. It keeps its tables while the tensors stay where they are."""

    def __init__(self, layers: list[Layer], backend: backends.Backend):
        self._layers = layers
        self._backend = backend
        self._absent: list[bool] | None = None
        self._tables: list[_CachedTable] = []
        self._reducer: ShardReducer | None = None
        self.index: Tensor
        """The indices of the layers that the last call measured, on the device of the values."""

    def __call__(self) -> LayerStatistics:
        """Measures the layers that have a gradient, on the device of the first one, and sets `index` to them.

        There is one launch for each device and combination of dtypes, and two all-reduces for sharded layers.

        Raises:
            ValueError: no layer has a gradient, a gradient is sparse, or memory was freed.
        """
        absent = [layer.param.grad is None for layer in self._layers]
        if absent != self._absent or not all(cached.accept_gradients() for cached in self._tables):
            self._build()
            self._absent = absent
        results: list[Tensor] = []
        for cached in self._tables:
            results.append(cached.backend.statistics(cached.table))
            cached.table.release_gradients()
        values = joined(results)
        if len(results) > 1:
            values = values[self._order]
        if self._reducer is not None:
            values = _completed(values, self._reducer)
        return LayerStatistics(self._names, self._numel, values)

    def _build(self) -> None:
        kinds: dict[tuple[torch.device, torch.dtype, torch.dtype, bool], list[int]] = {}
        for i, layer in enumerate(self._layers):
            grad = layer.param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise ValueError(f"the gradient of {layer.name!r} is {grad.layout}: pass sparse=False to its layer")
            for tensor, what in ((grad, f"the gradient of {layer.name!r}"), (layer.param, repr(layer.name))):
                if is_freed(local(tensor)):
                    raise ValueError(f"the storage of {what} was freed, so it has no values: restore it before")
            addressable = all_addressable((local(layer.param), local(grad)))
            kinds.setdefault((layer.param.device, layer.param.dtype, grad.dtype, addressable), []).append(i)
        if not kinds:
            raise ValueError("no parameter has a gradient: call loss.backward() first")
        self._tables = [
            _CachedTable(
                [self._layers[i] for i in members],
                self._pick(device, dtypes, addressable=addressable),
                addressable=addressable,
            )
            for (device, *dtypes, addressable), members in kinds.items()
        ]
        # here and not in every call, since indexing with a list uploads it and waits
        indices = torch.tensor([i for members in kinds.values() for i in members], device="cpu")
        ordered, order = indices.sort()
        device = self._tables[0].table.columns["param"][0].device
        layers = [self._layers[i] for i in ordered.tolist()]
        self._names, self._numel = (tuple(getattr(layer, name) for layer in layers) for name in ("name", "numel"))
        self.index, self._order = ordered.to(device), order.to(device)
        held = [(layer.param, local_row(Row(0, layer.start, layer.stop), layer.param)) for layer in layers]
        self._reducer = shard_reducer_of(held, device)

    def _pick(self, device: torch.device, dtypes: Sequence[Any], *, addressable: bool) -> ModuleType:
        """Returns the module for parameters and gradients of these dtypes: the reference if one of them needs it."""
        found = [backends.pick(self._backend, device, dtype, addressable=addressable) for dtype in dtypes]
        return reference if reference in found else found[0]


class _CachedTable:
    """A table of layers that have gradients, of one device and combination of dtypes."""

    def __init__(self, layers: Sequence[Layer], backend: ModuleType, *, addressable: bool):
        self._params = list({id(layer.param): layer.param for layer in layers}.values())
        index = {id(param): i for i, param in enumerate(self._params)}
        rows = [local_row(Row(index[id(layer.param)], layer.start, layer.stop), layer.param) for layer in layers]
        self.backend, self._addressable = backend, addressable
        params = list(map(local, self._params))
        self.table = Table({"param": params, "grad": self._grads()}, rows)
        if addressable:
            self.table.accept_gradients(self.table.columns["grad"], params)

    def accept_gradients(self) -> bool:
        """Updates the table to the present gradients. Returns False if the table does not fit."""
        if not self._addressable:
            # tensors that kernels cannot reach may change unnoticed
            return False
        return self.table.accept_gradients(self._grads(), list(map(local, self._params)))

    def _grads(self) -> list[Tensor | None]:
        return [local(_gradient_like(param)) for param in self._params]


def _gradient_like(param: Any) -> Any:
    """Returns the gradient of a parameter, placed as the parameter is; None for None.

    Under `SequenceParallel`, gradients of normalizations are partial sums: this adds them up. `.grad` does not change.
    """
    grad = param.grad
    if not (is_distributed(param) and hasattr(grad, "placements")) or grad.placements == param.placements:
        return grad
    return grad.redistribute(placements=param.placements)


def _completed(values: Tensor, reducer: ShardReducer) -> Tensor:
    """Returns the statistics of whole layers, from the statistics of this process's shards."""
    largest = STATISTICS.index("abs_max")
    result = reducer.reduce(values)
    # a maximum over processes may skip NaN, a sum does not
    total = result[:, STATISTICS.index("abs_sum")]
    maximum = reducer.reduce(values[:, [largest]].nan_to_num(math.inf, posinf=math.inf), largest=True)[:, 0]
    result[:, largest] = torch.where(total.isnan(), total, maximum)
    return result


@untraced
def layer_statistics(
    source: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, backend: backends.Backend = "auto"
) -> LayerStatistics:
    """Returns Σ|g|, ‖g‖, max|g|, ‖w‖, ⟨g, w⟩ and the number of non-finite g of every layer, in one pass over memory.

    Args:
        source: a model, or named tensors as pairs or a mapping. g is the `.grad` of a tensor; tensors without a
            gradient are left out. In a model, query, key and value of a fused projection are three layers.
        backend: "auto", "triton" or "torch", as for the optimizers.

    Returns:
        The statistics, float64, on the device of the first layer.

    Raises:
        ValueError: no tensor has a gradient, a gradient is sparse, or memory was freed.
    """
    return StatisticsPass(named_layers(source), backend)()
