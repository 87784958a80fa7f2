"""The passes of a training in one of its processes: the images of each, and their part in the mean of a step."""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from fused_lwlr.data import Batch, MicroBatchSampler, Mixing, Splits, Text, train_batches
from fused_lwlr.data.check import check_batch
from fused_lwlr.data.randomness import DROPOUT, sequence
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe


class Passes:
    """Loads the passes of this process.

    Attributes:
        micro: images, or sequences of text, of a pass.
        accumulation: passes of a step.
        check: refuses a batch that does not fit the data, with `is_test` a batch of a test.
    """

    def __init__(self, recipe: Recipe, world: World, data: Splits | Text) -> None:
        self.recipe, self.world, self.data = recipe, world, data
        self.micro, self.accumulation = world.micro_batch(recipe), world.accumulation(recipe)
        self.workers = world.workers(recipe)
        sides = (data.image_size, recipe.test_size) if isinstance(data, Splits) else ()
        self.check = partial(check_batch, data, sides)
        self.mixing = None
        if recipe.mixup or recipe.cutmix:
            if self.micro % 2:
                raise ValueError(
                    f"--mixup and --cutmix pair the images of a pass, but it has {self.micro}: make it even "
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
        """The images of each pass of this process."""
        return MicroBatchSampler(
            len(self.data.train), seed=self.recipe.seed, batch_size=self.recipe.batch_size, micro_batch=self.micro,
            world_size=self.world.size, rank=self.world.rank, repeats=self.recipe.repeats, start_step=start, steps=stop,
        )  # fmt: skip

    def batches(self, sampler: MicroBatchSampler) -> Iterator[Batch]:
        return train_batches(
            self.data.train, sampler, device=self.world.device, workers=self.workers, prefetch=self.recipe.prefetch,
            check=self.check,
        )  # fmt: skip

    def minibatches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Minibatches for measurements, inputs and targets of the size of a pass: the same in every process."""
        sampler = MicroBatchSampler(
            len(self.data.train), seed=self.recipe.seed, batch_size=self.micro, micro_batch=self.micro,
            repeats=self.recipe.repeats, steps=steps,
        )  # fmt: skip
        for step, batch in enumerate(self.batches(sampler)):
            yield self.mixed(batch, step, 0)

    def parts(self, passes: Iterator[Batch]) -> tuple[Tensor | int, Iterable[tuple[Batch, Tensor | int]]]:
        """The images, or tokens, of a step in all processes; and its passes, each with the divisor of its mean loss.

        All passes have the same number of images. Sentences differ in their numbers of tokens, so the tokens of the
        step are counted before its first pass. They fit in memory; images are loaded pass by pass.
        """
        if self.data.unit == "images":
            return self.recipe.batch_size, ((next(passes), self.accumulation) for _ in range(self.accumulation))
        batches = [next(passes) for _ in range(self.accumulation)]
        counts = [(batch.targets >= 0).sum() for batch in batches]
        total = self.world.sum(torch.stack(counts).sum())
        return total, [(b, total / (n * self.world.size)) for b, n in zip(batches, counts, strict=True)]

    def weighted(self, steps: int) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor | int]]]:
        """Inputs and targets of the passes of this process; targets come with the number of `parts`."""
        passes = self.batches(self.sampler(0, steps))
        for step in range(steps):
            for micro, (batch, parts) in enumerate(self.parts(passes)[1]):
                number = micro * self.world.size + self.world.rank
                inputs, targets = self.mixed(batch, step, number)
                self.seed(step, number)
                yield inputs, (targets, parts)

    def seed(self, step: int, number: int) -> None:
        """Seed dropout and stochastic depth of a pass.

        Args:
            number: of the pass in its step, counted over all processes, so that draws do not depend on which process
                has it.
        """
        [seed] = sequence(DROPOUT, self.recipe.seed, step, number).generate_state(1, "uint64")
        torch.manual_seed(int(seed))

    def mixed(self, batch: Batch, step: int, number: int) -> tuple[Tensor, Tensor]:
        inputs, targets = batch.inputs, batch.targets
        if self.recipe.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if self.mixing is None:
            return inputs, targets
        return self.mixing(inputs, targets, step=step, micro=number)
