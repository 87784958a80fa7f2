"""The options that all optimizers share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from fused_lwlr.backends import Backend
from fused_lwlr.kernels import FactorFormula, Rule
from fused_lwlr.kernels.tensors import HALF
from fused_lwlr.optim.average import EMA, average_dtype
from fused_lwlr.optim.layer_options import Groups
from fused_lwlr.optim.option_table import Nonfinite, check_option, names_of, shown
from fused_lwlr.rescaling import ScaleInvariant
from fused_lwlr.scaling import Scaling

LayerMapping = Mapping[str, float | Mapping[str, Any]]
Layers = LayerMapping | Sequence[LayerMapping] | None
"""Name or pattern -> η or options, see `FusedOptimizer`."""
MASTER = "master_weight"
RADIUS = "radius"


class SharedOptions(TypedDict, total=False):
    """The options that every optimizer takes by keyword, see `FusedOptimizer`."""

    foreach: bool | None
    differentiable: bool
    fused: bool | None
    capturable: bool
    layers: Layers
    scaling: Scaling | None
    clip_global_norm: float | None
    nonfinite: Nonfinite
    ema: float | None
    cautious_decay: bool
    master_weights: bool
    stochastic_rounding: bool
    rounding_seed: int
    state_dtype: torch.dtype | None
    backend: Backend


def read_only(name: str, read: Callable[[Any], Any] | None = None) -> Any:
    """Returns a property of optimizers: an option that stays as constructed. `read` returns its value."""

    def refuse(optimizer: Any, value: Any) -> None:
        raise AttributeError(
            f"{name} cannot be changed after construction: make another {optimizer.options.class_name} with "
            f"{name}={shown(value)}, and load the state dict of this one"
        )

    return property(read or (lambda optimizer: getattr(optimizer.options, name)), refuse)


def of_param_groups(name: str, method: Callable[..., Any] | None) -> Any:
    """Returns a property of optimizers: an option of param groups, which refuses to be set, or a method of its name."""

    def missing(optimizer: Any) -> Any:
        raise AttributeError(f"{name} is an option of param groups: read it as optimizer.param_groups[0][{name!r}]")

    def refuse(optimizer: Any, value: Any) -> None:
        raise AttributeError(
            f"optimizer.{name}={shown(value)} has no effect: {name} is an option of param groups, so set it in each "
            "group of optimizer.param_groups"
        )

    return property(missing if method is None else method.__get__, refuse, doc=method.__doc__)


@dataclass(frozen=True)
class StepOptions:
    """Everything that a step depends on, except the param groups and the state.

    `FusedOptimizer` describes the options that users give; their defaults are here. `ema` and `capturable` are the
    values of new param groups.

    Attributes:
        class_name: the name of the class, for messages.
        lr_in_momentum: whether the momentum buffer of SGD holds the learning rate.
        rescale_weights: the layers whose weights are divided by the largest of their norms, or False.
        in_backward: whether parameters are stepped in buckets, see `step_in_backward` and `offload_to_cpu`.
        is_zero_partition: whether `ZeroRedundancyOptimizer` made the optimizer, for the partition of one process.
        uses_grad_scaler: whether a GradScaler may skip steps, so that the device counts them. The first step with a
            GradScaler sets it.

    Raises:
        ValueError: an option is invalid, or options exclude each other.
    """

    class_name: str
    rule: Rule
    backend: Backend = "auto"
    fused: bool | None = None
    capturable: bool = False
    ema: float | None = None
    scaling: Scaling | None = None
    clip_global_norm: float | None = None
    nonfinite: Nonfinite = "propagate"
    cautious_decay: bool = False
    master_weights: bool = False
    stochastic_rounding: bool = False
    rounding_seed: int = 0
    state_dtype: torch.dtype | None = None
    lr_in_momentum: bool = False
    rescale_weights: ScaleInvariant | Literal[False] = False
    in_backward: bool = False
    is_zero_partition: bool = False
    uses_grad_scaler: bool = False

    def __post_init__(self) -> None:
        for name in ("capturable", "ema", "fused", *names_of("shared")):
            check_option(name, getattr(self, name))
        self.check_fused(self.fused)
        self._check_combinations()
        if self.cautious_decay and self.rule.decay_mode != "cautious":
            object.__setattr__(self, "rule", replace(self.rule, decay_mode="cautious"))

    def _check_combinations(self) -> None:
        """Raises ValueError if options exclude each other."""
        scaling, formula = self.scaling, self.factor_formula
        if self.lr_in_momentum and self.capturable:
            raise ValueError(
                "lr_in_momentum=True and capturable=True exclude each other: lr is a number of each step, which a "
                "replay would not read"
            )
        if self.lr_in_momentum and formula is not None and (formula.target == "direction" or "lr" in formula.arguments):
            raise ValueError(
                f"scaling={scaling!r} does not go with lr_in_momentum=True: its factor may depend on lr, or on "
                "the direction, which holds lr; use LARS, ELR, NormalizedGradient, NormalizedGradientAdaptive, "
                "ClipByLayer or BalancedLR"
            )
        if self.cautious_decay and self.rule.decay_mode == "coupled":
            raise ValueError(
                f"cautious_decay=True is not for {self.class_name}, since {self.class_name} adds weight decay to the "
                "gradient and not to the step: use AdamW or Lion, or omit it"
            )
        if self.master_weights and self.stochastic_rounding:
            raise ValueError(
                "master_weights=True and stochastic_rounding=True exclude each other: with master weights there is "
                "nothing to make up for; choose one"
            )
        if scaling is not None and not (scaling.bias_correction or self.rule.corrects_bias):
            raise ValueError(
                f"scaling={scaling!r}: {self.class_name} has no moments whose bias could be corrected or not"
            )
        if scaling is not None and scaling.retraction is not None and self.rescale_weights is not False:
            raise ValueError(
                f"scaling={scaling!r} and rescale_weights= exclude each other: both change the norms of weights "
                "after the step; choose one"
            )
        if self.in_backward and self.totals_option:
            needs_gradients = self.clip_global_norm is not None or self.skips
            raise ValueError(
                f"{self.totals_option} does not go with steps during backward, since it needs "
                f"{'all gradients' if needs_gradients else 'the norms of all weights'} before the first parameter is "
                f"stepped: {'omit it' if self.clip_global_norm is None else 'use scaling=ClipByLayer(max_norm)'}"
            )
        if self.is_zero_partition and self.totals_option:
            raise ValueError(
                f"{self.totals_option} does not go with ZeroRedundancyOptimizer: it needs the gradients or "
                "weights of all processes, and each process has a part of them. Clip with "
                "torch.nn.utils.clip_grad_norm_ before step(), or shard the model with fully_shard"
            )

    def check_fused(self, fused: bool | None) -> None:
        """Raises ValueError if `fused` contradicts the backend. "auto" accepts either."""
        if fused is not None and self.backend != "auto" and fused != (self.backend == "triton"):
            raise ValueError(
                f"fused={fused} contradicts backend={self.backend!r}: choose by backend= and leave fused=None"
            )

    @cached_property
    def factor_formula(self) -> FactorFormula | None:
        """The formula of the scaling and its target."""
        return None if self.scaling is None else self.scaling.factor_formula(self.rule)

    @cached_property
    def skips(self) -> bool:
        """Whether a gradient that is not finite skips the step."""
        return self.nonfinite != "propagate"

    @cached_property
    def balances(self) -> bool:
        """Whether factors come from the norms of all weights before the step, and not from each layer's own norms."""
        return self.scaling is not None and self.factor_formula is None

    @cached_property
    def on_spheres(self) -> bool:
        """Whether layers keep the norms that they start with."""
        retraction = None if self.scaling is None else self.scaling.retraction
        return retraction is not None and retraction.fixed

    @cached_property
    def totals_option(self) -> str:
        """The option that needs sums over all layers before the step, or "" for none."""
        if self.clip_global_norm is not None:
            return f"clip_global_norm={self.clip_global_norm}"
        if self.skips:
            return f"nonfinite={self.nonfinite!r}"
        if self.balances:
            return f"scaling={self.scaling!r}"
        return "" if self.rescale_weights is False else "rescale_weights="

    def counts_on_device(self, groups: Groups) -> bool:
        """Returns whether the device counts steps: if it may skip one, rounds at random, or replays a graph."""
        may_skip = self.uses_grad_scaler or self.skips
        return may_skip or self.stochastic_rounding or any(group["capturable"] for group in groups)

    def has_master(self, param: Tensor) -> bool:
        """Returns whether the state has the master weight of a parameter."""
        return self.master_weights and param.dtype in HALF

    def scales(self, group: dict[str, Any], index: int) -> bool:
        """Returns whether the scaling acts on the parameter at a position of a group."""
        name = group["param_names"][index] if "param_names" in group else None
        return self.scaling is not None and self.scaling.selects(name, group["params"][index])

    def dtype_of(self, param: Tensor, name: str) -> torch.dtype:
        """Returns the dtype of an entry of a parameter's state; not of step counts, which are float32."""
        if name == MASTER:
            return torch.float32
        if name == EMA:
            return average_dtype(param)
        # double precision and complex parameters have state of the same dtype
        if self.state_dtype is None or param.is_complex() or param.dtype == torch.float64:
            return param.dtype
        return self.state_dtype
