"""A training in progress: model, optimizer and step count, and the parts of one optimizer step."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_lwlr import LayerRates, ScaleInvariant, calibrate, gradinit_, scale_invariant
from fused_lwlr.data import Batch, Splits, Stream, Text, val_batches
from fused_lwlr.measure.layers import Layer
from fused_lwlr.measure.statistics import StatisticsPass
from fused_lwlr.training.buffer_averages import BufferAverages
from fused_lwlr.training.evaluate import Context, Evaluation, evaluate
from fused_lwlr.training.losses import loss_of
from fused_lwlr.training.micro_batches import MicroBatches
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.schedule import lr_of_step, total_steps, warmup_steps
from fused_lwlr.training.setup import left_out_of_rates, new_model, new_optimizer, rates_of_file, split_by_decay
from fused_lwlr.training.signals import Agree, no_signals, until_stopped
from fused_lwlr.training.weights import load_weights
from fused_lwlr.training.wrapping import check_wrapping, unsynchronized, wrap

CALIBRATION = 100
"""Minibatches for the measurement of rates if the recipe gives no number and an epoch has more."""


class Step(NamedTuple):
    """The loss of a step whose gradients were computed.

    Attributes:
        loss: on the device; its mean over the ranks is the mean over the images, or tokens, of the step.
        counted: images, or tokens, of the step on all ranks.
        skipped: files of this rank that could not be read.
    """

    loss: Tensor
    counted: Tensor | int
    skipped: list[str]


class Trainer:
    """A model that is trained by a recipe, on one of the ranks of the training.

    All random numbers follow from the seed, the step and the micro-batch, so a checkpoint needs only weights, buffers
    and the state of the optimizer.

    Args:
        model: a network to train from its present weights, instead of the recipe's model.

    Attributes:
        model: the network itself, sharded with `fsdp`.
        forward_model: the callable for forward passes, which synchronizes gradients and may be compiled.
        optimizer: set by `prepare` or `prepare_to_resume`.
        step: number of steps taken.
        rates: layer-wise rates, or None.
    """

    optimizer: Any

    def __init__(self, recipe: Recipe, world: World, data: Splits | Text, *, model: nn.Module | None = None) -> None:
        self.recipe, self.world, self.data = recipe, world, data
        loaded = MicroBatches(recipe, world, data)
        self.micro_batches, self.micro_batch = loaded, loaded.micro_batch
        self.accumulation, self.workers = loaded.accumulation, loaded.workers
        self.val_batch = min(2 * self.micro_batch, max(1, math.ceil(len(data.val) / world.size)))
        if model is None:
            model = new_model(recipe, classes=len(data.classes), **data.sizes)
        check_wrapping(model, recipe, world)
        self.model = model.to(world.device)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=recipe.amp == "fp16")
        self.rates: LayerRates | None = None
        self.step = 0

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch. A batch that is larger than the training set is an error here, and not in `evaluate`."""
        return self.micro_batches.sampler(0, 1).steps_per_epoch

    @cached_property
    def total(self) -> int:
        """Steps of the training."""
        return total_steps(self.recipe, self.steps_per_epoch)

    @cached_property
    def warmup(self) -> int:
        """Steps of the warm-up."""
        return warmup_steps(self.recipe, self.steps_per_epoch)

    def prepare(
        self, optimizer: "Callable[[Trainer], Any] | None" = None, *, progress: bool = False, agree: Agree = no_signals
    ) -> None:
        """Run GradInit and measure layer-wise rates, if the recipe has them, and make the optimizer.

        Args:
            optimizer: makes the optimizer from this training and its rates, instead of the recipe's optimizer.
            agree: called before each minibatch, as in `evaluate`.

        Raises:
            StoppedError: `agree` returned a stop.
        """
        recipe, progress = self.recipe, progress and self.world.is_rank0
        # check numbers, the file, and patterns of names, before minutes are spent
        self.micro_batches.check_threshold()
        rates = rates_of_file(recipe, self.model)
        split_by_decay(recipe, self.model)
        invariant = self._scale_invariant()
        load_weights(recipe.weights, self.model)
        left_out = left_out_of_rates(recipe, self.model)
        if recipe.init == "gradinit":
            # GradInit takes three minibatches a step: two for the constraint, one for the objective. Every rank uses
            # the same, because second derivatives are not averaged over ranks
            gradinit_(
                self.model, until_stopped(self.micro_batches.minibatches(3 * recipe.gradinit_steps), agree), self.loss,
                optimizer="sgd" if recipe.optimizer == "sgd" else "adam", lr=recipe.peak_lr,
                steps=recipe.gradinit_steps, relative_gamma=recipe.gradinit_gamma, tau=recipe.gradinit_tau,
                progress=progress,
            )  # fmt: skip
            self.world.broadcast(self.model, params=True)
        forward_model = wrap(self.model, recipe, self.world)
        if recipe.rates == "layerwise":
            # magnitudes of the gradient of a step, the mean over its micro-batches and ranks. `calibrate` turns mixed
            # precision off for weights in float32
            steps = recipe.calibration_steps or min(self.steps_per_epoch, CALIBRATION)
            with self.mixed_precision():
                measured = calibrate(
                    forward_model, until_stopped(self.micro_batches.calibration_batches(steps), agree),
                    self._weighted_loss, steps=steps, accumulate=self.accumulation, init=False, progress=progress,
                    backend=recipe.backend,
                )  # fmt: skip
            rows = [replace(layer, name=layer.name.removeprefix("module.")) for layer in measured.layers]
            rates = LayerRates(rows, measured.steps)
            rates = rates.exclude(*left_out) if left_out else rates
        self.rates = rates
        self._start(forward_model, invariant, optimizer)

    def prepare_to_resume(self) -> None:
        """Prepare for loading a checkpoint, which has the multipliers: no rates are measured."""
        invariant = self._scale_invariant()
        self._start(wrap(self.model, self.recipe, self.world), invariant)

    def _scale_invariant(self) -> ScaleInvariant | None:
        """The layers of `rescale_weights` and `warmup_bound`, or None if the recipe has neither.

        Every rank measures which layers are scale-invariant at the initial weights. These follow from the seed, so a
        resumed training has the same layers.
        """
        recipe = self.recipe
        if not recipe.rescale_weights and recipe.warmup_bound is None:
            return None
        [batch] = self.micro_batches.minibatches(1)
        layers = scale_invariant(self.model, batch, self.loss, backend=recipe.backend)
        if not len(layers):
            option = "--rescale-weights" if recipe.rescale_weights else f"--warmup-bound {recipe.warmup_bound:g}"
            raise ValueError(
                f"{option}: no weight of {recipe.model} is scale-invariant, which takes a normalization after it; "
                "leave the option out"
            )
        return layers

    def _start(
        self,
        forward_model: nn.Module,
        invariant: ScaleInvariant | None,
        optimizer: "Callable[[Trainer], Any] | None" = None,
    ) -> None:
        self.forward_model: Any = forward_model
        if self.recipe.compile:
            self.forward_model = torch.compile(forward_model, mode=self.recipe.compile_mode)
        rescaled: dict[str, Any] = {"rescale_weights": invariant} if self.recipe.rescale_weights else {}
        self.optimizer = (
            optimizer(self) if optimizer else new_optimizer(self.recipe, self.model, self.rates, **rescaled)
        )
        self.averages = BufferAverages(self.model) if self.recipe.ema is not None else None
        # sharding replaces the parameters, so this comes after it
        params, names = dict(self.model.named_parameters()), () if invariant is None else invariant.names
        self._measure = StatisticsPass([Layer(name, params[name]) for name in names], self.recipe.backend)

    def batches(self) -> Iterator[Batch]:
        """The micro-batches of this rank from the next step to the end of the training."""
        return self.micro_batches.batches(self.micro_batches.sampler(self.step, self.total))

    def _weighted_loss(self, outputs: Tensor, weighted: tuple[Tensor, Tensor | int]) -> Tensor:
        """A loss whose mean over the micro-batches and ranks of a step is the mean over its images, or tokens."""
        targets, divisor = weighted
        return self.loss(outputs, targets) * (self.accumulation / divisor)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a micro-batch, averaged over its images or tokens."""
        return loss_of(self.recipe, outputs, targets)

    def mixed_precision(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.recipe.amp)
        return nullcontext() if dtype is None else torch.autocast(self.world.device.type, dtype)

    def _lr(self) -> float:
        """Returns the learning rate of the next step. `warmup_bound` measures gradients, and waits for the device.

        Spreads in Effective Learning Rates, Eq. 25: √2 ‖W‖² / c with c = ‖∇W‖ ‖W‖, of the layer with the lowest bound.
        """
        fraction = self.recipe.warmup_bound
        if fraction is None or self.step >= self.warmup:
            return lr_of_step(self.recipe, self.step, self.steps_per_epoch)
        statistics = self._measure()
        bound = math.sqrt(2) * (statistics.weight_norm / statistics.grad_norm).min().item()
        return min(self.recipe.peak_lr, fraction * bound)

    def gradients(self, batches: Iterator[Batch]) -> Step:
        """Compute the gradients of the next step, the mean over its images, or tokens, on all ranks.

        Args:
            batches: the micro-batches of this rank.
        """
        total = torch.zeros((), device=self.world.device)
        skipped: list[str] = []
        self.model.train()
        count, of_step = self.micro_batches.step_batches(batches)
        for micro, (batch, divisor) in enumerate(of_step):
            number = micro * self.world.size + self.world.rank
            inputs, targets = self.micro_batches.inputs_and_targets(batch, self.step, number)
            self.micro_batches.seed(self.step, number)
            with unsynchronized(self.forward_model, micro + 1 < self.accumulation):
                with self.mixed_precision():
                    loss = self.loss(self.forward_model(inputs), targets) / divisor
                self.scaler.scale(loss).backward()
            total += loss.detach()
            skipped += batch.skipped
        return Step(total, count, skipped)

    def update(self) -> None:
        """Step the optimizer with the present gradients, and free them."""
        lr = self._lr()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            if self.recipe.ema is not None:
                # a smaller decay in the first steps
                group["ema"] = min(self.recipe.ema, (1 + self.step) / (10 + self.step))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.averages is not None:
            self.averages.update(self.model, self.optimizer.param_groups[0]["ema"])
        self.step += 1

    @property
    def steps_skipped(self) -> int:
        """Number of steps that the optimizer skipped because of their gradients, with `nonfinite="skip"`."""
        taken = [state["step"] for state in self.optimizer.state.values()]
        return self.step - (int(torch.stack(taken).max()) if taken else 0)

    def evaluate(self, agree: Agree = no_signals) -> dict[str, Evaluation]:
        """Evaluate the weights ("model") and their averages ("ema") on the validation data; the results by name.

        Averaged weights are evaluated with averaged statistics of normalizations. Averages exist with `ema`, after the
        first step. `agree` may raise StoppedError, as in `evaluate`.
        """
        batches = val_batches(
            self.data.val, batch_size=self.val_batch, device=self.world.device, workers=self.workers,
            prefetch=self.recipe.prefetch, world_size=self.world.size, rank=self.world.rank,
            check=partial(self.micro_batches.check, is_validation=True),
        )  # fmt: skip
        self.world.broadcast(self.model)
        weights: dict[str, Context] = {"model": nullcontext}
        if self.averages is not None and self.step:
            self.world.broadcast(self.averages)
            weights["ema"] = self.averaged
        results = evaluate(
            self.model, batches, self.world, self.mixed_precision, weights, agree=agree,
            accuracy=self.data.unit == "images",
        )  # fmt: skip
        if isinstance(self.data.val, Stream) and results["model"].count != len(self.data.val):
            raise ValueError(
                f"the loader made {results['model'].count} images to test, and not {len(self.data.val)}: each counts "
                "once, and one that comes again needs the target -1"
            )
        return results

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the context the model has averaged weights and statistics; requires `ema`."""
        assert self.averages is not None, "a recipe with ema has averages"
        with self.optimizer.averaged(self.model), self.averages.applied(self.model):
            yield
