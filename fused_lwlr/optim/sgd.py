"""SGD with momentum, and a multiplier for every layer."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fused_lwlr.kernels import SGDHyper
from fused_lwlr.ops import Backend
from fused_lwlr.optim.average import decay_of
from fused_lwlr.optim.base import FusedOptimizer, number
from fused_lwlr.optim.gate import Nonfinite
from fused_lwlr.optim.plan import Plan
from fused_lwlr.optim.precision import Precision
from fused_lwlr.scaling import Scaling

if TYPE_CHECKING:
    from fused_lwlr.methods.elr import ScaleInvariant


OPTIONS = itemgetter("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "ema")


class SGD(FusedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` in one launch, with a learning-rate multiplier η for every layer.

        g ← g + weight_decay · w
        b ← momentum · b + (1 − dampening) · g       (b ← g on the first step)
        w ← w − lr · η · (b, or g + momentum · b with nesterov)

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in `torch.optim.SGD`.
        foreach, differentiable: refused when True.
        capturable: allows `step()` to be captured in a CUDA graph, after a step was taken. lr and weight_decay are
            read by every replay if they are tensors on the GPU; step counts are kept there, as `state["step"]`.
        fused: accepted for compatibility; `backend` decides. Must not contradict "triton" or "torch".
        multipliers: layer name -> η, such as `fused_lwlr.calibrate` returns; needs named parameters
            (`model.named_parameters()`). A parameter that is not named gets 1. They are part of
            `state_dict()`. Initializing the Layer-wise Learning Rate, Eq. 2.
        scaling: one factor for each layer from norms of this step: `ELR`, `LARS`, `LARC`, `LAMB`, ... Still one launch.
        clip_global_norm: the largest norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` before the
            step would have it, but `.grad` stays as it is. Costs a launch that reads the gradients.
        nonfinite: what a NaN or infinite gradient does. "propagate": it is used, as in torch.optim. "skip": the
            device skips the step; no parameter, state or step count changes. "raise": it is skipped, and reported
            at once or, on a GPU, by the next step. The last two keep step counts on the device, as `state["step"]`,
            and cost the same launch as clipping.
        rescale_weights: what `fused_lwlr.scale_invariant` returns, to divide the weights of scale-invariant layers by
            the largest of their norms in every step, and what depends on them with them, so that the function of the
            network stays as it is, up to the eps of its normalizations.
        ema: the decay of a moving average of the weights, moved by the same launch: after every step
            e ← e + (1 − ema) · (w − e), in `state["ema"]`, float32 also of half precision, of the exact weight with
            `master_weights`. It begins with the weight before the first step. None: there is none. An option of the
            param group, that may change in every step: `group["ema"] = min(0.999, (1 + t) / (10 + t))` is a warm-up (in
            a CUDA graph it is that of the capture). With None the average is dropped, and a number after that begins
            with the weight as it is then. A parameter that is not stepped, for want of a gradient or since the step is
            skipped, keeps its average. See `averaged()`.
        master_weights: keeps the exact weights of half-precision parameters, float32, as `state["master_weight"]`, and
            steps those. A parameter that was changed from outside counts as it is, element by element.
        stochastic_rounding: rounds half-precision parameters and state up or down at random, so that expectations are
            exact and small steps are not lost. The noise depends on `rounding_seed`, the parameter's place, the step
            count and the element: the same in every run, and on every rank. Keeps step counts on the device.
        state_dtype: dtype of momentum of float32 and half-precision parameters; theirs when None.
        backend: "auto" takes Triton on a GPU and the PyTorch reference elsewhere; "triton" and "torch"
            insist.

    Raises:
        ValueError: an argument out of range, one that cannot be honoured, or a multiplier that names no
            parameter.
    """

    operation = "sgd"
    state_names = ("momentum_buffer",)
    last_state = "momentum"
    counts_steps = False
    idle = SGDHyper(lr=0.0, momentum=1.0, dampening=1.0)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        multipliers: Mapping[str, float] | None = None,
        scaling: Scaling | None = None,
        clip_global_norm: float | None = None,
        nonfinite: Nonfinite = "propagate",
        ema: float | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
        state_dtype: torch.dtype | None = None,
        rescale_weights: "ScaleInvariant | Literal[False]" = False,
        backend: Backend = "auto",
    ) -> None:
        precision = Precision(master_weights, stochastic_rounding, rounding_seed, state_dtype)
        self._start(backend, precision, fused, foreach, differentiable, capturable, ema)
        super().__init__(
            params, lr, momentum, dampening, weight_decay, nesterov,
            maximize=maximize, foreach=foreach, differentiable=differentiable,
        )  # fmt: skip
        self._set_multipliers(multipliers)
        self._set_control(scaling, clip_global_norm, nonfinite, rescale_weights)
        if scaling is not None and not scaling.bias_correction:
            raise ValueError(f"scaling={scaling!r}: SGD has no moments whose bias could be corrected or not")

    def hyper_rows(self, plan: Plan) -> tuple[list[SGDHyper], Sequence[int]]:
        if plan.new:
            cohorts, rows = plan.cohorts(plan.state.fresh)
            return [_hyper(self.param_groups[group], bool(first)) for group, first in cohorts], rows
        # after the first step no buffer is
        groups, used = self.param_groups, plan.tables.groups
        return [_hyper(group) for group in (groups if used == len(groups) else groups[:used])], plan.tables.group


def _hyper(group: dict[str, Any], first: bool = False) -> SGDHyper:
    lr, momentum, dampening, weight_decay, nesterov, maximize, ema = OPTIONS(group)
    rate, weight_decay = number(lr, group), number(weight_decay, group)
    decay = 0.0 if ema is None else decay_of(group)
    # which takes less time than a call of the class
    return SGDHyper._make((rate, float(momentum), float(dampening), weight_decay, nesterov, maximize, first, decay))
