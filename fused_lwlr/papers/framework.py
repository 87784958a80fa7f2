"""The parts of a study: independent jobs, and a report of all their results."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fused_lwlr.papers.tables import Report
from fused_lwlr.training.recipe import is_text

OPTIONS = frozenset({"data", "model", "epochs", "seeds", "set"})
OWN = ("seed", "lr", "rates", "scaling", "goal", "data", "model", "epochs", "steps", "device")
"""Fields of a recipe that studies choose themselves."""
TEXT_OPTIONS = frozenset({"data", "steps", "seeds", "set"})


@dataclass(frozen=True)
class Settings:
    """Settings from the command line; part of every result, except the device.

    Trainings have a number of epochs, or of steps; the other one has no value.
    Without `model` the study uses its own models. `training` has fields of the recipes of all trainings, as
    text. `quick` is a smoke test of seconds: the fewest values with which the report works.
    """

    study: str
    seeds: int
    epochs: int | None
    steps: int | None = None
    data: str = "digits"
    model: str | None = None
    training: dict[str, str] = field(default_factory=dict)
    quick: bool = False
    device: str = "auto"

    @property
    def common(self) -> dict[str, Any]:
        """Parameters of all jobs that train."""
        lengths = {"epochs": self.epochs, "steps": self.steps}
        length = {name: value for name, value in lengths.items() if value is not None}
        found = {"data": self.data, **length, "device": self.device}
        return {**found, "training": self.training} if self.training else found

    @property
    def over(self) -> str:
        """The data, length and seeds of a table, for its notes."""
        spread = f", mean ± standard deviation over {self.seeds} seeds" if self.seeds > 1 else ", one seed"
        length = f"{self.steps} steps" if self.steps else f"{self.epochs} epoch{'s' * (self.epochs != 1)}"
        return f"{self.data}, {length}{spread}"

    def jobs(
        self,
        function: Callable[..., dict[str, Any]],
        name: str,
        cells: Iterable[dict[str, Any]],
        *,
        seeds: Iterable[int] | None = None,
        common: dict[str, Any] | None = None,
    ) -> "list[Job]":
        """A job for each cell and seed.

        Args:
            name: a format of the parameters of a job.
            cells: parameters in which the jobs differ, without the seed.
            seeds: by default all seeds of the study.
            common: parameters of all jobs; by default the options of trainings.
        """
        seeds = range(self.seeds) if seeds is None else tuple(seeds)
        every = [{**cell, "seed": seed} for cell in cells for seed in seeds]
        same = self.common if common is None else common
        return [Job(_word(name.format(**of)), function, of | same) for of in every]


def _word(text: str) -> str:
    """A text as the name of a job."""
    return re.sub(r"[^\w.=+-]+", "-", text)


@dataclass(frozen=True)
class Job:
    """One piece of work: a function of plain parameters, including the seed.

    Args:
        name: a unique name in the study: letters, digits and any of . , = + - _
        function: at the top of a module, since it is called in another process; returns numbers, text, None (for
            values that are not finite) and lists of these by name.
        parameters: its keyword arguments, as JSON values.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    parameters: dict[str, Any]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.,=+-]{1,120}", self.name):
            raise ValueError(f"job name {self.name!r} must be 1 to 120 letters, digits or any of . , = + - _")


@dataclass(frozen=True)
class Study:
    """A figure or table of a paper, at the size of this machine.

    Args:
        name: on the command line.
        doc: a sentence: the comparison, and the figure or table of the paper.
        jobs: the work, as settings have it.
        more: the work that follows from results, by settings and a data frame as of `report`; jobs that have run are
            left out, and it is asked again until none is new.
        report: tables, with the paper's own figures beside, and a picture. It gets a data frame of pandas with a row
            for each job, in their order: its name, parameters and values, with NaN instead of None among numbers.
        epochs: by default, or None where it counts steps. `quick` has 1.
        steps: of a training by default, or None where it counts epochs. `quick` has 4.
        data: by default; others must be text as well, or images as well.
        seeds: by default, 0, 1, ... `quick` has 2.
        least_seeds: the fewest seeds for the report; a spread needs 2.
        options: the applicable ones of --data, --model, --epochs, --steps, --seeds and --set; others are
            refused.
    """

    name: str
    doc: str
    jobs: Callable[[Settings], Sequence[Job]]
    report: Callable[[Settings, Any], Report]
    more: Callable[[Settings, Any], Sequence[Job]] = lambda settings, results: ()
    epochs: int | None = 10
    steps: int | None = None
    data: str = "digits"
    seeds: int = 5
    least_seeds: int = 2
    options: frozenset[str] = OPTIONS

    def settings(
        self, *, training: Sequence[str] = (), quick: bool = False, device: str = "auto", **given: Any
    ) -> Settings:
        """Settings, with the study's own values for missing options.

        Args:
            training: fields of the recipes of all trainings, each as NAME=VALUE.
            given: seeds, epochs, steps, data and model, or None for the study's own.

        Raises:
            ValueError: this study lacks an option, needs more seeds, or a field of the recipe does not
                have the form NAME=VALUE or is in `OWN`.
        """
        given = {name: value for name, value in given.items() if value is not None}
        asked = given | ({"set": " ".join(training)} if training else {})
        for option in sorted(asked.keys() - self.options):
            raise ValueError(f"--{option} {asked[option]} has no meaning for {self.name}: leave it out")
        own = {"data": self.data, "seeds": self.seeds, "epochs": self.epochs, "steps": self.steps}
        if quick:
            own |= {"seeds": min(2, self.seeds), "epochs": self.epochs and 1, "steps": self.steps and 4}
        chosen: dict[str, Any] = own | given
        if is_text(chosen["data"]) != is_text(self.data):
            kinds = ("images", "text") if is_text(self.data) else ("text", "images")
            raise ValueError(f"--data {chosen['data']} is {kinds[0]}: {self.name} needs {kinds[1]}")
        if chosen["seeds"] < self.least_seeds:
            raise ValueError(
                f"--seeds {chosen['seeds']}: {self.name} shows a spread over seeds, which takes two at least"
            )
        fields = self._fields(training)
        return Settings(study=self.name, **chosen, training=fields, quick=quick, device=device)

    def _fields(self, training: Sequence[str]) -> dict[str, str]:
        fields: dict[str, str] = {}
        for text in training:
            name, equals, value = text.partition("=")
            key = name.lstrip("-").replace("-", "_")
            if not equals:
                raise ValueError(f"--set {name} is not of the form NAME=VALUE, such as --set amp=bf16")
            if key in OWN:
                raise ValueError(f"--set {text}: {self.name} chooses it, or has an option for it: leave it out")
            # arguments of a model add up
            fields[key] = f"{fields[key]},{value}" if key == "model_args" and key in fields else value
        return fields
