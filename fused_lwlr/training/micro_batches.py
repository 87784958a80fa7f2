"""The micro-batches of one rank: the images of each, and its weight in the mean loss of a step."""

import os
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from fused_lwlr.data import Batch, MicroBatchSampler, Mixing, Splits, Text, train_batches
from fused_lwlr.data.check import check_loaded
from fused_lwlr.data.randomness import DROPOUT, sequence
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import DEFAULTS, Recipe, is_in_memory


class MicroBatches:
    """Loads the micro-batches of this rank.

    Attributes:
        micro_batch: images, or sequences of text, of a micro-batch.
        accumulation: micro-batches of a step.
        workers: processes that load data for this rank.
        check: refuses a batch that does not fit the data, with `is_validation` a batch of a validation.
    """

    def __init__(self, recipe: Recipe, world: World, data: Splits | Text) -> None:
        self.recipe, self.world, self.data = recipe, world, data
        self.micro_batch, self.accumulation = split_batch(recipe, world)
        self.workers = workers_of(recipe, world)
        if not self.workers and recipe.prefetch != DEFAULTS["prefetch"]:
            raise ValueError(f"--prefetch {recipe.prefetch} has no effect with 0 workers: give more, or leave it out")
        sides = (data.image_size, recipe.test_size) if isinstance(data, Splits) else ()
        self.check = partial(check_loaded, data, sides)
        self.mixing = None
        if recipe.mixup or recipe.cutmix:
            if self.micro_batch % 2:
                raise ValueError(
                    f"--mixup and --cutmix pair the images of a pass, but it has {self.micro_batch}: make it even "
                    "(--batch-size or --micro-batch)"
                )
            self.mixing = Mixing(
                classes=len(data.classes), mixup=recipe.mixup, cutmix=recipe.cutmix,
                smoothing=recipe.label_smoothing, seed=recipe.seed,
            )  # fmt: skip

    def check_threshold(self) -> None:
        """Refuse a `bce_threshold` for which all classes of all images count alike after label smoothing."""
        threshold, smoothing, classes = self.recipe.bce_threshold, self.recipe.label_smoothing, len(self.data.classes)
        lowest, highest = smoothing / classes, 1 - smoothing + smoothing / classes
        if threshold is not None and not lowest <= threshold < highest:
            raise ValueError(
                f"--bce-threshold {threshold:g} counts every class as {int(threshold < lowest)}, since "
                f"--label-smoothing {smoothing:g} makes labels of {classes} classes {lowest:g} to {highest:g}: give a "
                "threshold between them, or leave --label-smoothing out"
            )

    def sampler(self, start: int, stop: int) -> MicroBatchSampler:
        """The images of each micro-batch of this rank."""
        return MicroBatchSampler(
            len(self.data.train), seed=self.recipe.seed, batch_size=self.recipe.batch_size,
            micro_batch=self.micro_batch, world_size=self.world.size, rank=self.world.rank,
            repeats=self.recipe.repeats, start_step=start, steps=stop,
        )  # fmt: skip

    def batches(self, sampler: MicroBatchSampler) -> Iterator[Batch]:
        return train_batches(
            self.data.train, sampler, device=self.world.device, workers=self.workers, prefetch=self.recipe.prefetch,
            check=self.check,
        )  # fmt: skip

    def minibatches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Minibatches for measurements, inputs and targets of the size of a micro-batch: the same on every rank."""
        sampler = MicroBatchSampler(
            len(self.data.train), seed=self.recipe.seed, batch_size=self.micro_batch, micro_batch=self.micro_batch,
            repeats=self.recipe.repeats, steps=steps,
        )  # fmt: skip
        for step, batch in enumerate(self.batches(sampler)):
            yield self.inputs_and_targets(batch, step, 0)

    def step_batches(self, batches: Iterator[Batch]) -> tuple[Tensor | int, Iterable[tuple[Batch, Tensor | int]]]:
        """Takes the micro-batches of a step from `batches`.

        Returns the number of images or tokens in the step over all ranks, and its micro-batches, each with the number
        that divides its mean loss. All micro-batches have the same number of images. Sentences differ in their numbers
        of tokens, so the tokens of the step are counted before its first micro-batch. They fit in memory; images are
        loaded one micro-batch at a time.
        """
        if self.data.unit == "images":
            return self.recipe.batch_size, ((next(batches), self.accumulation) for _ in range(self.accumulation))
        of_step = [next(batches) for _ in range(self.accumulation)]
        counts = [(batch.targets >= 0).sum() for batch in of_step]
        total = self.world.sum(torch.stack(counts).sum())
        return total, [(b, total / (n * self.world.size)) for b, n in zip(of_step, counts, strict=True)]

    def calibration_batches(self, steps: int) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor | int]]]:
        """Inputs and targets of the micro-batches of this rank; targets come with the number of `step_batches`."""
        batches = self.batches(self.sampler(0, steps))
        for step in range(steps):
            for micro, (batch, divisor) in enumerate(self.step_batches(batches)[1]):
                number = micro * self.world.size + self.world.rank
                inputs, targets = self.inputs_and_targets(batch, step, number)
                self.seed(step, number)
                yield inputs, (targets, divisor)

    def seed(self, step: int, number: int) -> None:
        """Seed dropout and stochastic depth of a micro-batch.

        Args:
            number: of the micro-batch in its step, counted over all ranks, so that draws do not depend on which rank
                has it.
        """
        [seed] = sequence(DROPOUT, self.recipe.seed, step, number).generate_state(1, "uint64")
        torch.manual_seed(int(seed))

    def inputs_and_targets(self, batch: Batch, step: int, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch.inputs, batch.targets
        if self.recipe.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if self.mixing is None:
            return inputs, targets
        return self.mixing(inputs, targets, step=step, micro=number)


def split_batch(recipe: Recipe, world: World) -> tuple[int, int]:
    """The images of a micro-batch, and the number of micro-batches of each rank in a step.

    The batch must divide into equal micro-batches of equal ranks.
    """
    share, rest = divmod(recipe.batch_size, world.size)
    if rest or share == 0:
        fix = max(1, round(recipe.batch_size / world.size)) * world.size
        raise ValueError(
            f"--batch-size {recipe.batch_size} does not divide among {world.size} processes: take {fix}, for example"
        )
    micro = min(recipe.micro_batch or share, share)
    if share % micro:
        fits = max(size for size in range(1, micro) if share % size == 0)
        raise ValueError(
            f"--micro-batch {micro} does not divide the {share} examples that each process has of a batch: take {fits}"
        )
    return micro, share // micro


def workers_of(recipe: Recipe, world: World) -> int:
    """Processes that load data for this rank: as the recipe says, or its share of cores.

    0 for data in memory and text, and with `loader`, whose data may be in memory or come from its own processes.
    """
    if recipe.workers is not None:
        return recipe.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    alone = is_in_memory(recipe.data) or recipe.is_text or recipe.loader is not None
    return 0 if alone else min(8, max(1, cores // world.local_size))
