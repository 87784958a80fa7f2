"""Options of single layers within a param group: `layers=` of the optimizers.

A param group without options of layers has None as `group["layers"]`. Otherwise `group["layers"]` is a tuple with an
entry for each parameter of the group: a tuple of slices that cover its first dimension.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

from fused_lwlr.optim.option_table import check_option, number_of, shown

Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class LayerOptions:
    """How the options of a layer differ from the options of its param group; None where they do not differ.

    Attributes:
        lr: the multiplier η of the group's lr; 0 freezes the layer.
        weight_decay: the multiplier of the group's weight_decay.
        betas: replaces the group's betas.
        eps: replaces the group's eps.
        corrected_decay: True also multiplies weight decay by lr / max_lr, where max_lr is an option of the group.

    Raises:
        ValueError: an option out of range.
    """

    lr: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    corrected_decay: bool | None = None

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if value is None:
                continue
            check_option(name, value, "a layer")
            if name != "corrected_decay":
                # tensors and lists have no hash by value
                number = tuple(map(number_of, value)) if name == "betas" else number_of(value)
                object.__setattr__(self, name, number)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options that differ: name -> number, list or bool, as JSON has them."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {name: list(value) if name == "betas" else value for name, value in given.items()}

    def updated(self, other: "LayerOptions") -> "LayerOptions":
        """Returns these options, each replaced by the option of another layer if that is not None.

        Args:
            other: the options of the other layer.
        """
        return replace(self, **other.to_dict())

    @property
    def eta(self) -> float:
        """The learning-rate multiplier η."""
        return 1.0 if self.lr is None else self.lr

    def decay_factors(self, group: dict[str, Any]) -> tuple[float, float]:
        """Returns a and b: the weight decay of the layer is the weight decay of its group times (a + b · lr).

        Args:
            group: the param group of the layer.

        Raises:
            ValueError: the decay follows lr, and max_lr of the group is not a finite number above 0.
        """
        factor = 1.0 if self.weight_decay is None else self.weight_decay
        return (0.0, factor / max_lr(group)) if self.corrected_decay else (factor, 0.0)


class Slice(NamedTuple):
    """The options of a range of a parameter's first dimension. A `stop` of None means the whole parameter."""

    start: int
    stop: int | None
    options: LayerOptions

    def label(self, param: str) -> str:
        """Returns the label of the layer: the parameter's, with the range if it is not the whole parameter."""
        return param if self.stop is None else f"{param}[{self.start}:{self.stop}]"


Slices = tuple[Slice, ...]

NAMES = tuple(field.name for field in fields(LayerOptions))
GROUP_OPTIONS = LayerOptions()
"""The options of a layer that has its group's options."""


def slices_of(group: dict[str, Any], index: int) -> Slices:
    """Returns the slices of the parameter at a position of a group."""
    entry: Slices = (Slice(0, None, GROUP_OPTIONS),) if group.get("layers") is None else group["layers"][index]
    return entry


def eta_of(entry: Slices, start: int, stop: int | None) -> float | None:
    """Returns η of a slice of a parameter, or of the whole parameter; None if its elements have several."""
    etas = set()
    for first, last, options in entry:
        # one of them is the whole parameter, or they overlap
        if last is None or stop is None or (first < stop and start < last):
            etas.add(options.eta)
    return etas.pop() if len(etas) == 1 else None


def labels_of(groups: Groups) -> list[list[str]]:
    """Returns the label of each parameter of each group: its name, or "group:position" if it has none.

    A name that occurs more than once is preceded by "group:", or by "group:position:" where that occurs, too.
    """
    # only names are counted: a position is never unique by itself
    counts = Counter(name for group in groups for name in group.get("param_names", ()))
    labels = []
    for index, group in enumerate(groups):
        count = len(group["params"])
        names = group.get("param_names", range(count))[:count]
        labels.append([name if counts[name] == 1 else f"{index}:{name}" for name in names])
    repeated = Counter(chain.from_iterable(labels))
    return [
        [label if repeated[label] == 1 else f"{index}:{position}:{label}" for position, label in enumerate(of_group)]
        for index, of_group in enumerate(labels)
    ]


def options_by_layer(groups: Groups) -> dict[str, dict[str, Any]]:
    """Returns the options that each layer has now, by its label."""
    found: dict[str, dict[str, Any]] = {}
    for group, labels in zip(groups, labels_of(groups), strict=True):
        shared: dict[str, Any] = {name: group[name] for name in ("betas", "eps") if name in group}
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        for index, label in enumerate(labels):
            for layer in slices_of(group, index):
                own = {name: value for name, value in vars(layer.options).items() if value is not None}
                factor, per_lr = layer.options.decay_factors(group)
                found[layer.label(label)] = {
                    **shared,
                    **own,
                    "lr": lr * layer.options.eta,
                    "weight_decay": weight_decay * (factor + per_lr * lr),
                }
    return found


def max_lr(group: dict[str, Any]) -> float:
    """Returns the lr at which corrected decay equals the decay without correction."""
    value = number_of(group.get("max_lr"))
    if value is None or not 0 < value < math.inf:
        raise ValueError(
            f"max_lr={shown(group.get('max_lr'))} must be a finite number above 0, since corrected_decay divides lr by "
            "it: set max_lr of the param group to its largest lr"
        )
    return value


def corrects_decay(group: dict[str, Any]) -> bool:
    """Returns whether any layer of a group has corrected decay."""
    return any(part.options.corrected_decay for entry in group["layers"] or () for part in entry)


def set_max_lr(group: dict[str, Any]) -> None:
    """Gives a new param group whose layers have corrected decay a max_lr: its initial lr."""
    if corrects_decay(group):
        group.setdefault("max_lr", float(group["lr"]))
        max_lr(group)
