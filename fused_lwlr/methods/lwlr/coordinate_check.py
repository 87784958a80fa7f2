"""The scale of activations over widths and steps, which shows whether a parametrization transfers between widths."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fused_lwlr.methods.checks import Array, check_count, listed
from fused_lwlr.methods.minibatches import loss_of, tensors_in
from fused_lwlr.methods.plots import finish
from fused_lwlr.optim.option_table import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUTPUT = "(output)"
"""The name of the output of the model itself."""


@dataclass(frozen=True)
class CoordinateCheck:
    """The scale of the outputs of every module, at every width and step.

    Attributes:
        names: the modules in the order of their first calls. The model itself has the name "(output)".
        widths: the widths.
        scale: the mean |activation|, float64 [widths, steps, modules]: the mean over the elements and the seeds. Row 0
            of the steps is before the first step of the optimizer.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    scale: Array

    @property
    def exponents(self) -> Array:
        """The exponents b of scale ∝ width^b, float64 [steps, modules], a least-squares fit over all widths.

        b is near 0 where the scale does not depend on the width, and NaN where a scale is 0 or not finite.
        """
        x = np.log(np.array(self.widths, dtype=np.float64))
        x -= x.mean()
        valid = (np.isfinite(self.scale) & (self.scale > 0)).all(axis=0)
        fitted = np.einsum("w,wsm->sm", x, np.log(np.where(valid, self.scale, 1.0))) / np.square(x).sum()
        return np.where(valid, fitted, np.nan)

    def table(self) -> str:
        """Returns the scales after the last step as text: a row for each module, a column for each width, and b."""
        width = max(len("module"), *map(len, self.names))
        head = "".join(f"  {size:>10}" for size in self.widths)
        lines = [f"{'module':{width}}{head}  {'exponent':>8}"]
        for name, scales, exponent in zip(self.names, self.scale[:, -1].T, self.exponents[-1], strict=True):
            lines.append(
                f"{name:{width}}{''.join(f'  {scale:10.3e}' for scale in scales)}  {round(exponent, 2) + 0.0:8.2f}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def plot(self, path: str | Path | None = None, title: str | None = None) -> "Figure":
        """Plots the scale of every module over the width, with a plot for each step.

        The first modules are dark, the last ones bright; up to 20 are named. Needs matplotlib.

        Args:
            path: the file to save the figure to; its suffix gives the format. None saves nothing.
            title: the title of the figure.
        """
        import matplotlib
        from matplotlib.figure import Figure

        steps = self.scale.shape[1]
        figure = Figure(figsize=(2.6 * steps + 2, 3.6), layout="constrained")
        colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, len(self.names)))
        plots = figure.subplots(1, steps, sharey=True, squeeze=False)[0]
        for step, axes in enumerate(plots):
            for module, (name, color) in enumerate(zip(self.names, colors, strict=True)):
                axes.plot(self.widths, self.scale[:, step, module], color=color, marker="o", markersize=3, label=name)
            axes.set_title(f"step {step}", fontsize="medium")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("width")
        plots[0].set_ylabel("mean |activation|")
        if len(self.names) <= 20:
            handles, labels = plots[0].get_legend_handles_labels()
            figure.legend(handles, labels, frameon=False, fontsize="small", loc="outside right upper")
        return finish(figure, path, title)


def coordinate_check(
    make_model: Callable[[int], nn.Module],
    widths: Sequence[int],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Iterable[Any],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    steps: int = 4,
    seeds: Sequence[int] = (0,),
) -> CoordinateCheck:
    """Trains models of several widths for some steps, and measures the scale of their activations.

    With a parametrization that transfers, such as μP, the scale of activations after a step does not grow with the
    width, so that a learning rate which was tuned on a narrow model suits a wide one (Tensor Programs V, Appendix
    D.1). The output at initialization may shrink with the width.

    The models are in the mode in which `make_model` returns them. torch's random number generators of the CPU and of
    CUDA devices are restored.

    Args:
        make_model: returns the model of a width, on the device on which it runs. It is called after
            `torch.manual_seed(seed)`.
        widths: the widths, at least two different ones.
        make_optimizer: returns the optimizer of a model: ours, with `layers=multipliers.mup(model, base, "adamw")`, or
            any other.
        batches: minibatches, as in `calibrate`. Every model is trained on the same ones.
        loss_fn: returns the mean loss over the minibatch, a scalar.
        steps: the number of steps, and of minibatches less one: the last one only measures.
        seeds: the scale is the mean over models with these seeds.

    Returns:
        The mean |activation| of each module that returns floating-point numbers, in a tensor or first in a tuple, list,
        mapping or dataclass.

    Raises:
        ValueError: there are fewer than two widths, no seeds, no parameters, `steps` below 0 or too few minibatches, or
            two models differ in the modules that they call.
        TypeError: `make_optimizer` returns no optimizer.
    """
    widths, seeds = listed("widths", widths), listed("seeds", seeds)
    if len(set(widths)) < 2 or not all((number_of(width) or 0) > 0 for width in widths):
        raise ValueError(f"{widths=} must have at least two different widths, all above 0")
    check_count("steps", steps, 0)
    if not seeds:
        raise ValueError(f"{seeds=} must have at least one seed")
    minibatches = list(islice(batches, steps + 1))
    if len(minibatches) <= steps:
        raise ValueError(f"batches ended after {len(minibatches)} minibatches, but steps={steps} needs {steps + 1}")
    names: list[str] = []
    scale: list[Array] = []
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.inference_mode(False):
        for width in widths:
            runs = []
            for seed in seeds:
                torch.manual_seed(seed)
                model = make_model(width)
                if not any(True for _ in model.parameters()):
                    raise ValueError(f"make_model({width}) must return a model with parameters")
                optimizer = make_optimizer(model)
                if not hasattr(optimizer, "step"):
                    raise TypeError(f"make_optimizer must return an optimizer, not {type(optimizer).__name__}")
                measured = _train(model, optimizer, minibatches, loss_fn)
                names = names or list(measured[0])
                for step in measured:
                    if other := sorted(set(names) ^ step.keys()):
                        raise ValueError(
                            f"make_model({width}) must return a model that calls the same modules as the first one in "
                            f"every step, but {other[0]!r} is called in only one of them"
                        )
                runs.append([[step[name] for name in names] for step in measured])
            scale.append(np.mean(runs, axis=0, dtype=np.float64))
    return CoordinateCheck(tuple(names), tuple(widths), np.array(scale))


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any], loss_fn: Callable[[Any, Any], Tensor]
) -> list[dict[str, float]]:
    """Returns the scale of each module for each minibatch, and steps after all minibatches but the last."""
    device = next(model.parameters()).device
    measured = []
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        with _activations(model) as calls:
            loss = loss_of(model, batch, loss_fn, device)
        measured.append({name: float(torch.stack(scales).mean()) for name, scales in calls.items()})
        if i < len(batches) - 1:
            loss.backward()
            optimizer.step()
    return measured


@contextmanager
def _activations(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Yields a dict that gets the mean |activation| of each call of each module, float32 scalars."""
    calls: dict[str, list[Tensor]] = {}

    def record(name: str, output: Any) -> None:
        activation = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)
        if activation is not None:
            calls.setdefault(name, []).append(activation.detach().abs().float().mean())

    handles = [
        module.register_forward_hook(lambda _module, _inputs, output, name=name: record(name or OUTPUT, output))
        for name, module in model.named_modules()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
