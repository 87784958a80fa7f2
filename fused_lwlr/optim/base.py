"""What SGD and AdamW share: they collect parameters, gradients and state into tables and launch one step."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._C import _set_grad_enabled

from fused_lwlr.kernels.hyper import Number
from fused_lwlr.ops import Backend, check_backend
from fused_lwlr.optim import average, checkpoint
from fused_lwlr.optim import multipliers as multiplier
from fused_lwlr.optim.capture import check_capture, is_capturing
from fused_lwlr.optim.gate import NO_LOSS_SCALE, GlobalGate, LossScale, Nonfinite
from fused_lwlr.optim.hooks import hooked
from fused_lwlr.optim.layer_stats import StepStatistics, step_statistics
from fused_lwlr.optim.plan import Plan
from fused_lwlr.optim.precision import Precision
from fused_lwlr.optim.rescale import Rescaling
from fused_lwlr.optim.tables import Tables
from fused_lwlr.optim.validate import check_control
from fused_lwlr.scaling import BalancedLR, Scaling

if TYPE_CHECKING:
    from fused_lwlr.methods.elr import ScaleInvariant

CAPTURABLE = itemgetter("capturable")
NUMBERS = (float, int)
FACTS = itemgetter("params", "capturable", "ema", "multipliers")
UNSUPPORTED = {
    "foreach": "the step is one launch for all tensors already; leave foreach=None",
    "differentiable": "the step is not differentiable; use torch.optim for that",
}


class FusedOptimizer(torch.optim.Optimizer):
    """Mixin in front of a `torch.optim` class: its options, state keys and errors, with a step of our own.

    A subclass names its state columns, and turns a parameter group into the hyper rows of one step.
    """

    operation: str
    """The function of a backend that does the step."""
    state_names: tuple[str, ...]
    """All columns of state that the operation takes."""
    last_state: str
    """The option that the last of them goes with."""
    counts_steps: bool
    """Whether `state["step"]` is kept."""
    idle: Any
    """The hyper row of a tensor that is only rescaled."""
    device_counts: bool
    """Whether the device counts steps whatever the param groups say: where only it knows which were skipped."""
    holds_averages: bool = False
    """Whether parameters hold their averages now, within `averaged()`."""
    fused: bool | None = None
    """What was asked for. The backend decides; torch refuses meta parameters where this is True."""
    _ema: float | None = None
    _captured: tuple[Tables, ...] = ()
    """Those that graphs go on to read and write, also when steps outside of them go by others."""
    _step_supports_amp_scaling = True
    """Tells `torch.amp.GradScaler` that gradients are unscaled, and steps skipped, in here."""

    def _start(
        self,
        backend: Backend,
        precision: Precision,
        fused: bool | None,
        foreach: bool | None,
        differentiable: bool,
        capturable: bool,
        ema: float | None,
    ) -> None:
        check_backend(backend)
        average.check_decay(ema)
        # torch's errors, of flags that it never sees together: fused is not passed on
        if fused and differentiable:
            raise RuntimeError("`fused` does not support `differentiable`")
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self.backend: Backend = backend
        self.precision = precision
        self.fused = fused
        self._capturable = capturable
        self._ema = ema
        self._check_fused(fused)
        self._plan: Plan | None = None

    def _set_control(
        self,
        scaling: Scaling | None,
        clip_global_norm: float | None,
        nonfinite: Nonfinite,
        rescale_weights: "ScaleInvariant | Literal[False]" = False,
    ) -> None:
        """Take the options that act on whole layers; once the param groups are there."""
        check_control(scaling, clip_global_norm, nonfinite, rescale_weights)
        self.scaling = scaling
        self.rescaling = Rescaling(rescale_weights) if rescale_weights is not False else None
        self.device_counts = nonfinite != "propagate" or self.precision.stochastic_rounding
        max_norm = math.inf if clip_global_norm is None else float(clip_global_norm)
        balances = isinstance(scaling, BalancedLR)
        self.gate = GlobalGate(max_norm, nonfinite, rescales=self.rescaling is not None, balances=balances)
        if scaling is not None:
            named = all("param_names" in group for group in self.param_groups)
            scaling.check([name for group in self.param_groups for name in group["param_names"]] if named else None)

    @property
    def counts_on_device(self) -> bool:
        """Whether the device counts steps, also where a graph may replay them."""
        return self.device_counts or any(map(CAPTURABLE, self.param_groups))

    def _check_fused(self, fused: bool | None) -> None:
        # "auto" decides by itself, so that configurations may forward either
        if fused is not None and self.backend != "auto" and fused != (self.backend == "triton"):
            raise ValueError(
                f"fused={fused} contradicts backend={self.backend!r}: choose by backend= and leave fused=None"
            )

    def _set_multipliers(self, multipliers: Mapping[str, float] | None) -> None:
        if multipliers is not None:
            if any(group["multipliers"] is not None for group in self.param_groups):
                raise ValueError("multipliers= is given twice: to the optimizer, and in a param group")
            for group, entries in zip(
                self.param_groups, multiplier.resolve(multipliers, self.param_groups), strict=True
            ):
                group["multipliers"] = entries

    def state_columns(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Those of `state_names` that parameters of this group have."""
        return self.state_names if group[self.last_state] else self.state_names[:-1]

    def facts(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """What a plan depends on of a group; the multipliers last."""
        params, capturable, ema, entries = FACTS(group)
        return len(params), capturable, ema is None, bool(group[self.last_state]), entries

    def complete_groups(self) -> None:
        """Gives param groups that were made elsewhere, such as by `torch.optim`, the options that they lack."""
        for group in self.param_groups:
            group.setdefault("capturable", False)
            group.setdefault("ema", None)
            group.setdefault("multipliers", None)

    def hyper_rows(self, plan: Plan) -> tuple[list[Any], Sequence[int]]:
        """The hyper rows of the next step, and which of them each parameter of the plan uses."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        options = {**self.defaults, **param_group} if isinstance(param_group, dict) else {}
        for name, why in UNSUPPORTED.items():
            if options.get(name):
                raise ValueError(f"{name}={options[name]} is not supported: {why}")
        self._check_fused(options.get("fused"))
        average.check_decay(options.get("ema"))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("capturable", self._capturable)
        group.setdefault("ema", self._ema)
        try:
            if isinstance(group.setdefault("multipliers", None), Mapping):
                group["multipliers"] = multiplier.resolve(group["multipliers"], [group])[0]
            multiplier.check(group["multipliers"], group["params"])
        except ValueError:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, in one launch for each combination of device and dtypes.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            FloatingPointError: with `nonfinite="raise"`, a gradient of this step (on a GPU: of the one before) that is
                not finite. Nothing was changed by the step that it is of.
            RuntimeError: sparse gradients, a parameter whose elements share memory, a capture in a CUDA graph
                whose replays would not do what a step does, or a call within `averaged()`.
            ValueError: a backend that cannot work on a parameter, or state that does not fit one.
                All are raised before anything is written.
        """
        if self.holds_averages:
            raise RuntimeError("step() within averaged(): the parameters hold averages now, so leave it first")
        capturing = is_capturing(self.param_groups)
        if self.gate.verdict is not None and not capturing:
            self.gate.report(wait=True)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # GradScaler sets these for the time of a step
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        loss_scale = NO_LOSS_SCALE if grad_scale is None and found_inf is None else LossScale(grad_scale, found_inf)
        if found_inf is not None:
            self.device_counts = True
        groups = self.param_groups
        params = groups[0]["params"] if len(groups) == 1 else [param for group in groups for param in group["params"]]
        # what `torch.no_grad` does, which takes five times as long
        grad_enabled = is_grad_enabled()
        _set_grad_enabled(False)
        try:
            plan = self._plan
            if plan is not None and not plan.take(self, params):
                plan = None
            if capturing:
                captured = check_capture(self, plan)
                if captured not in self._captured:
                    self._captured = (*self._captured, captured)
            self._plan = plan or Plan(self, params)
            self._plan.run(self, params, loss_scale)
        finally:
            _set_grad_enabled(grad_enabled)
        if self.gate.verdict is not None:
            self.gate.report(wait=False)
        return loss

    step = hooked(step)

    def layer_stats(self) -> StepStatistics:
        """Norms, ELR and trust ratio of every layer in the last step, from what the step computed anyway.

        A copy, on the device until asked for.

        Raises:
            RuntimeError: there was no step yet, or steps compute no norms since there is no `scaling=`.
        """
        return step_statistics(self.scaling, self._plan.tables.parts if self._plan is not None else [])

    def averaged(self, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Puts the averages of the weights in their place, for an evaluation or a checkpoint of the model.

            with optimizer.averaged():
                accuracy = evaluate(model)
                torch.save(model.state_dict(), "averaged.pt")

        Averages are rounded to the dtype of their parameter. On leaving, with an exception too, the weights of the
        training are back, bit for bit; they are kept aside as a copy. Parameters without an average stay as they are.
        Buffers, such as the running statistics of batch normalization, are not averaged, and are those of the training:
        for some of the averaged weights, use `torch.optim.swa_utils.update_bn(loader, copy.deepcopy(model))` within.

        Args:
            model: needed where it is under `torch.distributed.fsdp.fully_shard`, whose modules may hold whole weights
                of the last forward pass: they are let go of, on entering and on leaving.

        Raises:
            RuntimeError: there are no averages yet, or this is called within itself; so does `step()` within.
        """
        self.complete_groups()
        return average.averaged(self, model)

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim`'s, with multipliers; a step that was skipped because of a gradient is reported first."""
        self.gate.report(wait=True)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of its `torch.optim` namesake: all of it, or nothing.

        Multipliers come from the dict if it has them and stay as they are if not; so does the decay `ema`, for which
        None counts as not having it: averages that the dict lacks begin with the weights before the next step.
        Implementation flags (`foreach`, `fused`, ...) stay as constructed. State is copied, in the dtype that the
        optimizer keeps it in.

        Raises:
            ValueError: something in the dict does not fit the optimizer, or cannot be what it should. The optimizer
                is left as it was, also where a hook raises.
        """
        self.complete_groups()
        checkpoint.load(self, state_dict, kept=("fused", "capturable", *UNSUPPORTED))

    def __getstate__(self) -> dict[str, Any]:
        own = ("backend", "precision", "scaling", "rescaling", "gate", "_capturable", "device_counts", "_ema", "fused")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.complete_groups()
        self._plan = None

    def __repr__(self) -> str:
        groups = [group.get("multipliers") for group in self.param_groups]
        try:
            for group, entries in zip(self.param_groups, groups, strict=True):
                if entries is not None:
                    group["multipliers"] = f"for {len(entries)} parameters"
            return super().__repr__()
        finally:
            for group, entries in zip(self.param_groups, groups, strict=True):
                group["multipliers"] = entries


def number(value: float | Tensor, group: dict[str, Any]) -> Number:
    """A learning rate or weight decay of a group: a tensor where it is to be read on the device, by every replay."""
    # to ask whether a number is a tensor takes longer than all else here
    if type(value) in NUMBERS or not isinstance(value, Tensor) or not (value.is_cuda or group["capturable"]):
        return float(value)
    return value if value.dtype in (torch.float32, torch.float64) else value.float()
