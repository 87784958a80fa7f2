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

    def jobs(self, function: Callable[..., dict[str, Any]], name: str, cells: Iterable[dict[str, Any]]) -> "list[Job]":
        """A training for each cell and seed; `name` is a format of its parameters."""
        every = [cell | {"seed": seed} for cell in cells for seed in range(self.seeds)]
        names = [name.format(**of).replace(":", "-").replace(", ", "+") for of in every]
        return [Job(of_job, function, of | self.common) for of_job, of in zip(names, every, strict=True)]


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
        self,
        *,
        seeds: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        data: str | None = None,
        model: str | None = None,
        training: Sequence[str] = (),
        quick: bool = False,
        device: str = "auto",
    ) -> Settings:
        """Settings, with the study's own values for missing options.

        Raises:
            ValueError: this study lacks an option, needs more seeds, or a field of the recipe does not
                have the form NAME=VALUE or is in `OWN`.
        """
        given = {"data": data, "model": model, "epochs": epochs, "steps": steps, "seeds": seeds}
        given["set"] = " ".join(training) or None
        for option in sorted(given.keys() - self.options):
            if given[option] is not None:
                raise ValueError(f"--{option} {given[option]} has no meaning for {self.name}: leave it out")
        if data is not None and is_text(data) != is_text(self.data):
            kinds = ("text", "images") if is_text(data) else ("images", "text")
            raise ValueError(f"--data {data} is {kinds[0]}: {self.name} needs {kinds[1]}")
        count = seeds if seeds is not None else min(2, self.seeds) if quick else self.seeds
        if count < self.least_seeds:
            raise ValueError(f"--seeds {count}: {self.name} shows a spread over seeds, which takes two at least")
        pairs = [text.partition("=") for text in training]
        if bad := [name for name, equals, _ in pairs if not equals]:
            raise ValueError(f"--set {bad[0]} is not of the form NAME=VALUE, such as --set amp=bf16")
        fields: dict[str, str] = {}
        for name, _, value in pairs:
            key = name.lstrip("-").replace("-", "_")
            if key in OWN:
                raise ValueError(f"--set {name}={value}: {self.name} chooses it, or has an option for it: leave it out")
            # arguments of a model add up
            fields[key] = f"{fields[key]},{value}" if key == "model_args" and key in fields else value
        own = (self.epochs and 1, self.steps and 4) if quick else (self.epochs, self.steps)
        return Settings(
            study=self.name,
            seeds=count,
            epochs=own[0] if epochs is None else epochs,
            steps=own[1] if steps is None else steps,
            data=data or self.data,
            model=model,
            training=fields,
            quick=quick,
            device=device,
        )
