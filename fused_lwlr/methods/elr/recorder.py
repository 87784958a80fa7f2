"""Records effective learning rates while any optimizer trains."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fused_lwlr.backends import Backend
from fused_lwlr.measure.layers import named_layers
from fused_lwlr.measure.statistics import StatisticsPass
from fused_lwlr.methods.checks import check_count, check_types
from fused_lwlr.methods.elr.history import ELRHistory
from fused_lwlr.optim import FusedOptimizer
from fused_lwlr.optim.layer_options import eta_of, slices_of
from fused_lwlr.patterns import Selection, Selector, split_name, weights
from fused_lwlr.shards import is_distributed


class _Record(NamedTuple):
    """The norms of gradients and weights before a step, [2, layers], the rates, and whether the step was skipped.

    `skipped` stays on the device: `found_inf` of a `torch.amp.GradScaler`, or None.
    """

    step: int
    norms: Tensor
    rates: list[float]
    skipped: Tensor | None


class ELRRecorder:
    """Records E = ‖∇W‖ / ‖W‖ of every layer in the steps of any `torch.optim.Optimizer`.

        recorder = fused_lwlr.ELRRecorder(model).watch(optimizer)
        ...
        recorder.history.plot("elr.png")

    Each recorded step costs one pass over gradients and weights. The results stay on the device until `history` is
    read. The recorder sees the gradients that `step()` receives: without the loss scale of a `GradScaler`, and before
    the optimizer clips or scales them.

    Args:
        source: a model, or named parameters. In a model, query, key and value of a fused projection are three layers.
        every: the number of steps between two records.
        select: the layers to record, as for a `Scaling`. By default all weights, without biases and normalization
            layers. The layers in the paper are `scale_invariant(...).names`.
        momentum: whether to record the norm of `state["momentum_buffer"]` after the step, if there is one, instead of
            the norm of the gradient. The learning rate multiplies this buffer, and `simulate.momentum` models it.
        backend: "auto", "triton" or "torch", as for the optimizers.

    Raises:
        ValueError: `every` is not an int, or below 1, `source` has no named tensors, or the selector matches no layer.
    """

    def __init__(
        self,
        source: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        every: int = 1,
        select: Selector = weights,
        momentum: bool = False,
        backend: Backend = "auto",
    ):
        check_count("every", every)
        if isinstance(source, nn.Module):
            check_types(source, name="source")
        selection = Selection(select, weights)
        layers = named_layers(source)
        self.layers = [
            layer
            for layer in layers
            if selection.selects(layer.name, layer.param)
            or (selection.patterns is None and selection.selects(split_name(layer.name)[0], layer.param))
        ]
        if not self.layers:
            raise ValueError(f"select={select!r} fits none of {len(layers)} layers")
        selection.check([layer.name for layer in layers], "layer of the model")
        self._every, self._momentum = every, momentum
        self._measure = StatisticsPass(self.layers, backend)
        self._seen = 0
        self._records: list[_Record] = []
        self._handles: list[Any] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> "ELRRecorder":
        """Starts to record the steps of an optimizer. Returns the recorder.

        Args:
            optimizer: the optimizer of the recorded layers, also as Accelerate's `prepare` wraps it.

        Raises:
            ValueError: the optimizer has none of the layers or steps during backward, the recorder watches an optimizer
                already, or `momentum=True` and a layer is sharded.
            TypeError: it is no optimizer.
        """
        if self._handles:
            raise ValueError(
                "this recorder watches an optimizer already, and counts its steps: call stop() first, or make a "
                "recorder for each optimizer"
            )
        # hooks are methods of the optimizer in Accelerate's wrapper
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        _check(optimizer)
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not any(id(layer.param) in held for layer in self.layers):
            raise ValueError("the optimizer steps none of the layers that are recorded: was it given another model?")
        if self._momentum and any(is_distributed(layer.param) for layer in self.layers):
            raise ValueError("momentum=True measures whole buffers: it is not for layers that are sharded")
        self._handles += [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        return self

    def stop(self) -> None:
        """Stops recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def history(self) -> ELRHistory:
        """The records so far, on the host."""
        records = [record for record in self._records if record.skipped is None or not record.skipped.item()]
        shape = (len(records), len(self.layers))
        norms = [record.norms.cpu() for record in records]
        grad, weight = torch.stack(norms, dim=1).numpy() if norms else np.empty((2, *shape))
        rates = np.array([record.rates for record in records]).reshape(shape)
        names = tuple(layer.name for layer in self.layers)
        return ELRHistory(names, tuple(record.step for record in records), grad, weight, rates)

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure") if len(args) < 2 else args[1]
        if closure is None:
            self._record(optimizer)
            return None

        def measured() -> Any:
            # the gradients of the step are made in here
            loss = closure()
            with torch.no_grad():
                self._record(optimizer)
            return loss

        return (args[0], measured, *args[2:]), {name: value for name, value in kwargs.items() if name != "closure"}

    def _record(self, optimizer: Any) -> None:
        _check(optimizer)
        if self._seen % self._every or all(layer.param.grad is None for layer in self.layers):
            return
        statistics = self._measure()
        values = statistics.values.new_full((2, len(self.layers)), np.nan)
        values[:, self._measure.index] = torch.stack([statistics.grad_norm, statistics.weight_norm])
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            values[0] /= scale.to(values)
        if self._records and self._records[-1].step == self._seen:
            # a closure that is called more than once in a step
            self._records.pop()
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = None if found_inf is None else found_inf.clone()
        self._records.append(_Record(self._seen, values, self._rates(optimizer), skipped))

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._momentum and self._records and self._records[-1].step == self._seen:
            norms = self._records[-1].norms
            # lr of the parameters whose buffers hold it
            groups = [group for group in optimizer.param_groups if group.get("lr_in_momentum")]
            lrs = {id(param): float(group["lr"]) for group in groups for param in group["params"]}
            for i, layer in enumerate(self.layers):
                buffer = optimizer.state.get(layer.param, {}).get("momentum_buffer")
                if buffer is not None and layer.param.grad is not None:
                    norm = torch.linalg.vector_norm(layer.of(buffer), dtype=torch.float64)
                    norms[0, i] = norm / lrs.get(id(layer.param), 1.0)
        self._seen += 1

    def _rates(self, optimizer: Any) -> list[float]:
        """Returns lr · η of each layer. NaN if the optimizer lacks it or steps its slices at different rates."""
        entries = {}
        if isinstance(optimizer, FusedOptimizer):
            # layers of a group may have been replaced since the last step
            optimizer.complete_groups()
        for group in optimizer.param_groups:
            for at, param in enumerate(group["params"]):
                entries[id(param)] = float(group["lr"]), slices_of(group, at)
        rates = []
        for layer in self.layers:
            lr, entry = entries.get(id(layer.param), (np.nan, ()))
            eta = eta_of(entry, layer.start, layer.stop)
            rates.append(np.nan if eta is None else lr * eta)
        return rates


def _check(optimizer: Any) -> None:
    if isinstance(optimizer, FusedOptimizer) and optimizer.options.in_backward:
        raise ValueError(
            "the optimizer steps during backward(), which frees gradients before the recorder measures them: call "
            "stop() of the recorder, or remove() of the handle of step_in_backward or offload_to_cpu; with scaling=, "
            "optimizer.layer_stats() has the norms"
        )
