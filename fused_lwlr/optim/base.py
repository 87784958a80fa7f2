"""The base of all optimizers: options, param groups, `step()` and checkpoints."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fused_lwlr import backends
from fused_lwlr.kernels import Gate, Rule, reference
from fused_lwlr.kernels.tensors import untraced
from fused_lwlr.memory import is_addressable
from fused_lwlr.optim.average import averages_of, exchanged
from fused_lwlr.optim.capture import are_on_gpu, check_capture
from fused_lwlr.optim.checkpoint import check_owners, read_state_dict, require_dict
from fused_lwlr.optim.gate import SkipReport
from fused_lwlr.optim.handle import Handle
from fused_lwlr.optim.hooks import hooked
from fused_lwlr.optim.layer_options import labels_of, options_by_layer, set_max_lr
from fused_lwlr.optim.layer_stats import last_statistics
from fused_lwlr.optim.layers_argument import entries_of, resolve, to_text
from fused_lwlr.optim.option_table import names_of
from fused_lwlr.optim.options import SharedOptions, StepOptions, of_param_groups, read_only
from fused_lwlr.optim.step_plan import StepPlan
from fused_lwlr.optim.validate import (
    DTYPES,
    check_selection,
    checked_group,
    checked_options,
    is_made_by_zero_redundancy_optimizer,
    warn_of_unused_scaling,
)
from fused_lwlr.scaling import Scaling
from fused_lwlr.shards import local
from fused_lwlr.step_statistics import StepStatistics


class FusedOptimizer(torch.optim.Optimizer):
    """Mixin in front of a `torch.optim` class: its options, state keys and errors, with another step.

    A subclass sets `rule`.

    Args:
        foreach, differentiable: must not be True.
        fused: accepted for compatibility; `backend` decides. It must not contradict "triton" or "torch".
        capturable: allows `step()` to be captured in a CUDA graph, after a first step without one. Every replay reads
            lr and weight_decay that are tensors on the GPU. Step counts are on the device, as `state["step"]`.
        layers: options of single layers: a mapping from names of parameters, of slices of them ("qkv.weight[0:64]") or
            patterns with `*` and `?`. A value is a multiplier η of lr, as `fused_lwlr.calibrate` returns
            (Initializing the Layer-wise Learning Rate, Eq. 2), or a dict of options: "lr" and "weight_decay" multiply
            the group's, "betas" and "eps" replace the group's, and "corrected_decay": True multiplies the decay by
            lr / max_lr, where the option max_lr of a param group is by default the lr that it is made with. If several
            keys match a layer, their options are merged in the order of the mapping, and the last of each counts. A
            list of mappings acts like one mapping. Parameters need names (`model.named_parameters()`). The options are
            part of `state_dict()`. They may be given in param groups instead.
        scaling: computes one factor for each layer from norms of this step, such as `ELR`, `LARS` or `LAMB`. The step
            is still one launch.
        clip_global_norm: the largest norm of all gradients together. The step equals a step after
            `torch.nn.utils.clip_grad_norm_`, but `.grad` does not change. It costs a launch that reads the gradients.
        nonfinite: what happens with a NaN or infinite gradient. "propagate" uses it, as torch.optim does. "skip" skips
            the step on the device: no parameter, state or step count changes. "raise" skips the step, and raises an
            error at once or, on a GPU, in the next step. "skip" and "raise" keep step counts on the device, as
            `state["step"]`, and cost the same launch as clipping.
        ema: the decay of a moving average of the weights; None for no average. The launch of a step moves it by
            e ← e + (1 − ema) · (w − e), from the weight before the first step on. It is kept in `state["ema"]`, in
            float32 for half precision too, and follows the master weight with `master_weights`. It is an option of the
            param group that may change in every step, for example for a warm-up: `group["ema"] = min(0.999, (1 + t) /
            (10 + t))` (a CUDA graph keeps its value). A step with None drops the average; a number after
            that starts again from the current weight. A parameter that is not stepped, because it has no gradient or
            the step is skipped, keeps its average. See `averaged()`.
        cautious_decay: applies weight decay only to elements where it does not act against the step: where the
            signs of weight and direction do not differ (Cautious Weight Decay, arXiv 2510.12402). For AdamW and
            Lion.
        master_weights: keeps master weights of bfloat16 and float16 parameters in float32, as
            `state["master_weight"]`, and steps these. An element of the parameter that was changed from outside
            replaces its master weight.
        stochastic_rounding: rounds half-precision parameters and state up or down at random, so that the mean is exact
            and small steps are not lost. The noise depends on `rounding_seed`, the number of the layer, the step
            count and the element: it is the same in every run and on all replicas. The elements of a sharded parameter
            are counted within each shard. Step counts are on the device.
        rounding_seed: the seed of that noise, from 0 to 2³¹ − 1.
        state_dtype: the dtype of momentum and moments of float32 and half-precision parameters; the dtype of the
            parameter when None.
        backend: "auto" uses Triton's kernels on GPUs and CPUs, and the PyTorch reference for float64 and elsewhere.
            "triton" and "torch" allow one of them only. "torch" computes the bits of `torch.optim`'s single-tensor
            implementation.

    Raises:
        ValueError: an argument is out of range or not supported, or a layer is not a parameter.
    """

    rule: Rule
    """The update rule."""
    options: StepOptions
    """The options of its steps, replaced as a whole when one changes."""
    holds_averages: bool = False
    """Whether parameters hold their averages now, within `averaged()`."""
    _last_plans: tuple[StepPlan, ...] | None = None
    """The plans of the last step: one, or one for each bucket of `step_in_backward`. None if there was no step."""
    _captured: tuple[StepPlan, ...] = ()
    """The plans whose memory captured CUDA graphs read and write. They are never dropped."""
    _handle: Any = Handle()
    """The handle of `step_in_backward` or `offload_to_cpu`, or one that does nothing."""
    _skip_report: SkipReport | None = None
    _last_values: Sequence[Any] = ()
    """The options of all param groups in the last step."""
    _step_supports_amp_scaling = True
    """Tells `torch.amp.GradScaler` that gradients are unscaled, and steps skipped, in here."""

    @contextmanager
    def construction(self, given: SharedOptions, **more: Any) -> Iterator[dict[str, Any]]:
        """Checks and keeps the options. The constructor of a subclass calls the constructor of torch within it.

        Args:
            given: the options that all optimizers share.
            more: options of this class that a step depends on.

        Yields:
            The flags for the constructor of torch.

        Raises:
            ValueError: an option is out of range or not supported, or a layer is not a parameter.
            TypeError: an option is unknown.
            RuntimeError: `fused` contradicts `foreach` or `differentiable`.
        """
        for name in given:
            if name not in SharedOptions.__annotations__:
                raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument {name!r}")
        flags = {"foreach": given.get("foreach"), "differentiable": given.get("differentiable", False)}
        # raises torch's errors for these flags, since fused is not passed to torch
        if given.get("fused") and flags["differentiable"]:
            raise RuntimeError("`fused` does not support `differentiable`")
        if given.get("fused") and flags["foreach"]:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        shared: dict[str, Any] = {name: option for name, option in given.items() if name not in (*flags, "layers")}
        is_zero_partition = is_made_by_zero_redundancy_optimizer()
        self.options = StepOptions(**shared, **more, **self._class_options, is_zero_partition=is_zero_partition)
        yield {**flags, "fused": None}
        # layers= and select= name parameters, which exist from here on
        groups, layers = self.param_groups, given.get("layers")
        if layers is not None:
            for group, entries in zip(groups, resolve(layers, groups), strict=True):
                # wrappers such as SAM write the arguments of the constructor into every group, too
                if group["layers"] not in (None, entries):
                    raise ValueError(
                        "layers= is given to the optimizer and in a param group: give it in one of these places"
                    )
                group["layers"] = entries
                set_max_lr(group)
        check_selection(self.options, groups)

    @property
    def _class_options(self) -> dict[str, Any]:
        """The step options that the class fixes."""
        return {"class_name": type(self).__name__, "rule": self.rule}

    @property
    def scaling(self) -> Scaling | None:
        """One factor for each layer from norms of a step, or None. It may be replaced between two steps."""
        return self.options.scaling

    @scaling.setter
    def scaling(self, scaling: Scaling | None) -> None:
        options = replace(self.options, scaling=scaling)
        check_selection(options, self.param_groups)
        self.options = options

    def _backends(self) -> dict[str, str]:
        """The code that steps the parameters of each device: device -> "triton", "torch", or "torch and triton".

        Both if dtypes differ, since "torch" steps float64. The argument is `options.backend`.
        """
        found: dict[str, set[str]] = {}
        params = [param for group in self.param_groups for param in group["params"]]
        for param in map(local, params):
            if param.dtype not in DTYPES:
                # quantized weights have no gradient
                continue
            addressable = is_lazy(param) or (is_addressable(param) and not param.is_inference())
            module = backends.pick(self.options.backend, param.device, param.dtype, addressable=addressable)
            found.setdefault(str(param.device), set()).add("torch" if module is reference else "triton")
        return {device: " and ".join(sorted(names)) for device, names in found.items()}

    backend = read_only("backend", _backends)
    clip_global_norm = read_only("clip_global_norm")
    nonfinite = read_only("nonfinite")
    cautious_decay = read_only("cautious_decay")
    master_weights = read_only("master_weights")
    stochastic_rounding = read_only("stochastic_rounding")
    rounding_seed = read_only("rounding_seed")
    state_dtype = read_only("state_dtype")
    rescale_weights = read_only("rescale_weights")
    lr_in_momentum = read_only("lr_in_momentum")

    def complete_groups(self) -> None:
        """Completes param groups that were made or changed elsewhere, such as by `torch.optim`.

        Raises:
            ValueError: a group has layers that do not fit it, or another number of names.
        """
        for group, labels in zip(self.param_groups, labels_of(self.param_groups), strict=True):
            group.setdefault("capturable", False)
            # torch.optim sets it for its own classes alone
            group.setdefault("maximize", False)
            group.setdefault("ema", None)
            count, names = len(group["params"]), len(group.get("param_names", labels))
            if names != count:
                raise ValueError(
                    f"a param group has {count} parameters, but {names} names: change group['params'] and "
                    "group['param_names'] together, or add parameters by add_param_group()"
                )
            group["layers"] = entries_of(group, labels, group.get("layers"))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, as in `torch.optim`.

        Args:
            param_group: "params", and the options in which the group differs from the others. It may have `layers` (a
                mapping, if its parameters are named) and `ema`. `layers=` of the constructor does not act on it: its
                patterns are matched once, with the parameters that the constructor has.

        Raises:
            ValueError: an option is not supported or out of range, a key of `layers` matches no parameter of the group,
                or a parameter is in a group already. The optimizer does not change.
        """
        param_group = checked_group(self.options, self.defaults, param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("capturable", self.options.capturable)
        group.setdefault("ema", self.options.ema)
        if "momentum" in group:
            # saved with the state, whose meaning it changes; torch.distributed.checkpoint drops keys that a group lacks
            group["lr_in_momentum"] = self.options.lr_in_momentum
        try:
            self._handle.check_added(group["params"])
            if group.setdefault("layers", None) is not None:
                group["layers"] = entries_of(group, labels_of(self.param_groups)[-1], group["layers"])
                set_max_lr(group)
        except BaseException:
            self.param_groups.pop()
            raise

    @hooked
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, in one launch for each combination of device and dtypes.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            FloatingPointError: with `nonfinite="raise"`, a gradient of this step (on a GPU: the previous one) is not
                finite. That step changed nothing.
            RuntimeError: sparse gradients, a parameter whose elements share memory, a capture in a CUDA graph
                whose replays would differ from a step, or a call within `averaged()`.
            ValueError: a backend does not support a parameter, or state does not fit its parameter.
                All errors are raised before anything is written.
        """
        if self.holds_averages:
            raise RuntimeError("step() within averaged(): the parameters hold averages now, so leave it first")
        groups = self.param_groups
        # is_initialized() first: the other call would create a CUDA context
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing() and are_on_gpu(groups)
        if self._skip_report is not None and not capturing:
            self._raise_if_skipped()
        loss = None
        if closure is not None:
            if self.options.in_backward:
                raise RuntimeError(
                    f"step(closure) after {self._handle.called}: the closure's backward() would step parameters "
                    "before the step; call backward(), and then step() without a closure"
                )
            with torch.enable_grad():
                loss = closure()
        # GradScaler sets these, and deletes them after a step that did not raise; see also `hooked`
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        loss_scale = None
        if grad_scale is not None or found_inf is not None:
            loss_scale = Gate(grad_scale=grad_scale, found_inf=found_inf)
        if found_inf is not None and not (self.options.uses_grad_scaler or self.options.in_backward):
            # only the device knows which steps are skipped
            self.options = replace(self.options, uses_grad_scaler=True)
        if self.options.in_backward:
            if capturing:
                raise RuntimeError(
                    "steps during backward cannot be captured in a CUDA graph: remove() their handle first"
                )
            self._last_plans = self._handle.end_step()
        else:
            self._last_plans = (self.step_bucket(0, None, loss_scale, capturing=capturing),)
        if self._skip_report is not None and self._skip_report.arrived is None:
            self._raise_if_skipped()
        return loss

    def use_handle(self, handle: Any) -> None:
        """Lets `step()` end a step in buckets, see `step_in_backward` and `offload_to_cpu`.

        Args:
            handle: a `StepInBackward`; None to step all parameters in `step()` again.

        Raises:
            RuntimeError: within `averaged()`.
        """
        if self.holds_averages:
            raise RuntimeError("the parameters hold averages now: leave averaged() before a handle is made or removed")
        self.options = replace(self.options, in_backward=handle is not None)
        self._handle, self._last_plans = handle or Handle(), None

    @torch.no_grad()
    def step_bucket(
        self, index: int, bucket: Sequence[Tensor] | None, loss_scale: Gate | None = None, *, capturing: bool = False
    ) -> StepPlan:
        """Takes a step by the plan of the last step, or by a new plan if that one does not fit. Returns the plan.

        Args:
            index: the index of the bucket in the step.
            bucket: the parameters to step, of any shape and dtype, each with a gradient; None for all parameters.
            loss_scale: the scale and found_inf of a `torch.amp.GradScaler`.
            capturing: whether the step is captured in a CUDA graph.

        Raises:
            RuntimeError, ValueError: as `step`.
        """
        groups, last = self.param_groups, self._last_plans or ()
        plan = last[index] if index < len(last) else None
        try:
            self._last_values = checked_options(self.options, groups, self._last_values)
            if plan is not None and not plan.accept_gradients(self.options, groups, self.state, bucket):
                plan.release_gradients()
                plan = None
            if capturing:
                check_capture(self.options, groups, plan)
                if plan not in self._captured:
                    self._captured = (*self._captured, plan)  # type: ignore[arg-type]
            if plan is None:
                self.complete_groups()
                warn_of_unused_scaling(self.options, groups)
                plan = StepPlan(self.options, groups, self.state, bucket)
            self._skip_report = plan.step(groups, self.state, loss_scale)
        except BaseException:
            # layer_stats() must not show the statistics of an earlier step
            self._last_plans = None
            raise
        finally:
            if plan is not None:
                plan.release_gradients()
        return plan

    def layers(self) -> dict[str, dict[str, Any]]:
        """Returns the options of every layer: its name -> lr, weight_decay, and betas and eps if the rule has them.

        lr and weight_decay are the group's times the multipliers of the layer. A parameter without a name
        has the number of its group and its position in it as its name, such as "0:3".
        """
        self.complete_groups()
        return options_by_layer(self.param_groups)

    @untraced
    def layer_stats(self) -> StepStatistics:
        """Returns norms, ELR and trust ratio of every layer in the last step, which the step computed anyway.

        They are a copy, on the device until they are read.

        Raises:
            RuntimeError: there was no step yet, it was taken with another scaling, or steps compute no norms since
                there is no `scaling=`.
        """
        return last_statistics(self.options, self._last_plans)

    def _raise_if_skipped(self) -> None:
        """Raises FloatingPointError if the last step was skipped because of a gradient, and that was not reported."""
        report, self._skip_report = self._skip_report, None
        if report is not None:
            report.raise_if_skipped()

    @contextmanager
    def averaged(self, model: nn.Module | None = None) -> Iterator[None]:
        """Replaces the weights by their averages, for an evaluation or a checkpoint of the model.

            with optimizer.averaged():
                accuracy = evaluate(model)
                torch.save(model.state_dict(), "averaged.pt")

        Averages are rounded to the dtype of their parameter. On leaving, also with an exception, the trained weights
        are back, bit for bit, from a copy. Parameters without an average do not change. Buffers, such as the running
        statistics of batch normalization, are not averaged. To test averaged weights with their own statistics, make
        `averaged = copy.deepcopy(model)` within the context, call `torch.optim.swa_utils.update_bn(loader, averaged)`,
        and test the copy.

        Args:
            model: needed for a model under `torch.distributed.fsdp.fully_shard`, whose modules may still hold whole
                weights of the last forward pass. These are freed on entering and on leaving.

        Raises:
            RuntimeError: averages do not exist yet, or calls are nested. `step()` within the context raises, too.
            TypeError: the model is not a module.
        """
        if not (model is None or isinstance(model, nn.Module)):
            raise TypeError(f"averaged(model): model is {type(model)}, but must be a module, or None")
        if self.holds_averages:
            raise RuntimeError("averaged() within averaged(): the parameters hold the averages already")
        self.complete_groups()
        pairs = averages_of(self.param_groups, self.state)
        self._handle.pull_weights()
        self.holds_averages = True
        try:
            with exchanged(pairs, model):
                self._handle.push_weights()
                yield
        finally:
            self.holds_averages = False
            self._handle.push_weights()

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim`'s, with layers; a step that was skipped because of a gradient is reported first.

        `layers` of a param group is text, which JSON and `torch.distributed.checkpoint` keep.

        Raises:
            ValueError: there is state of a parameter that no param group has.
            FloatingPointError: as `step`.
        """
        self._raise_if_skipped()
        check_owners(self.param_groups, self.state)
        found: dict[str, Any] = super().state_dict()
        # a hook may return anything, also the param groups themselves
        groups = found.get("param_groups") if isinstance(found, dict) else None
        if not groups:
            return found
        saved = [dict(group) for group in groups]
        for copy, group, labels in zip(saved, self.param_groups, labels_of(self.param_groups), strict=False):
            copy["layers"] = to_text(entries_of(group, labels, group.get("layers")))
        return {**found, "param_groups": saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of its `torch.optim` namesake: all of it, or nothing.

        Options of layers come from the dict if it has them; otherwise they do not change. The same holds for the decay
        `ema`, for which None counts as missing: averages that the dict lacks begin with the weights before the next
        step. Momentum and the maximum of amsgrad that the dict lacks begin in the next step, as when these options are
        switched on in mid-training. Implementation flags (`foreach`, `fused`, ...) do not change. State is copied, in
        the dtype in which the optimizer keeps it. A skipped step that was not reported yet is not reported any more.

        Args:
            state_dict: the result of `state_dict()`.

        Raises:
            ValueError: an entry of the dict does not fit the optimizer, or is invalid. The optimizer
                does not change, also if a hook raises.
        """
        # waits for buckets that are not stepped yet: they would step the new state
        self._handle.pull_weights()
        self.complete_groups()
        state_dict = require_dict(state_dict, "a state dict").copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, state_dict)
            if result is not None:
                state_dict = require_dict(result, "the state dict that a hook returns")
        state, groups = read_state_dict(self.options, self.param_groups, state_dict)
        before = dict(vars(self))
        try:
            self.__setstate__({"state": state, "param_groups": groups})
            for post_hook in self._optimizer_load_state_dict_post_hooks.values():
                post_hook(self)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise
        self._handle.reset()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `torch.optim`'s. After an exception in a backward pass, `step_in_backward` starts over.

        Args:
            set_to_none: sets gradients to None, and not to zeros.
        """
        super().zero_grad(set_to_none)
        self._handle.reset()

    def release(self) -> None:
        """Frees the memory that steps reuse, and their references to the state. The next step allocates it again.

        Call it after state was moved by hand, such as to the CPU between training and generation. Otherwise the old
        tensors stay until the next step.
        """
        self._last_plans = None

    def __getstate__(self) -> dict[str, Any]:
        self._handle.check_copy()
        # without the rule, which belongs to the class and cannot be pickled, and without backward hooks
        left_out = (*self._class_options, "in_backward")
        names = [field.name for field in fields(StepOptions) if field.name not in left_out]
        return {**super().__getstate__(), "options": {name: getattr(self.options, name) for name in names}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "options" in state:
            state = {**state, "options": StepOptions(**state["options"], **self._class_options)}
        super().__setstate__(state)
        self.complete_groups()
        # a report would be about a step that this state does not have
        self._last_plans = self._skip_report = None

    def __repr__(self) -> str:
        groups = self.param_groups
        self.param_groups = [dict(group) for group in groups]
        for shown in self.param_groups:
            if isinstance(shown.get("layers"), tuple):
                shown["layers"] = f"of {len(shown['layers'])} parameters, see layers()"
        try:
            found = super().__repr__()
        finally:
            self.param_groups = groups
        lines = []
        for field in fields(StepOptions):
            value = getattr(self.options, field.name)
            if field.name in names_of("shared") and value != field.default:
                lines.append(f"    {field.name}: {value!r}\n")
        if not lines:
            return found
        return "".join((found.removesuffix(")"), "Options of all groups\n", *lines, ")"))


for _name in (*names_of("group"), *names_of("flag")):
    setattr(FusedOptimizer, _name, of_param_groups(_name, vars(FusedOptimizer).get(_name)))
