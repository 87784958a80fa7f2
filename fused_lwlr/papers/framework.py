"""The parts of a study: independent jobs, and tables and a picture of all their results."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas

from fused_lwlr.papers.grid import Grid
from fused_lwlr.papers.tables import Table
from fused_lwlr.training.recipe import is_text
from fused_lwlr.training.setup import literal

REFUSED = (
    "seed", "lr", "rates", "init", "optimizer", "scaling", "goal", "data", "model", "epochs", "steps", "device",
    "target_top1", "deterministic", "ema", "out", "checkpoint_minutes", "log_every", "eval_every", "eval_epochs",
    "stats_every", "keep_best", "tensorboard", "wandb",
)  # fmt: skip
"""Fields of a recipe that studies choose themselves, or that would not change their results."""


@dataclass(frozen=True)
class Job:
    """One piece of work: a function at the top of a module, and its keyword arguments as JSON values.

    It returns numbers, text, None (for values that are not finite) and lists of these by name. `form` is a format of
    the parameters, which gives each job of a study its own name.
    """

    form: str
    function: Callable[..., dict[str, Any]]
    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the job, and of its file."""
        return re.sub(r"[^\w.=+-]+", "-", self.form.format(**self.parameters))


@dataclass(frozen=True)
class Settings:
    """Settings from the command line.

    Trainings have a number of epochs or of steps, and None for the other. Without `model` or `width` the study uses its
    own. `training` has fields of the recipes of all trainings. `quick` is a smoke test of minutes: the fewest
    values with which the tables work.
    """

    study: str
    seeds: int
    epochs: int | None
    steps: int | None = None
    data: str = "digits"
    model: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    device: str = "auto"
    width: int | None = None

    @property
    def common(self) -> dict[str, Any]:
        """Parameters of all jobs that train."""
        optional = {"epochs": self.epochs, "steps": self.steps, "training": self.training}
        return {"data": self.data, "device": self.device, **{name: value for name, value in optional.items() if value}}

    def few(self, values: Sequence[Any], count: int) -> Sequence[Any]:
        """All values; in a quick study only the first `count`."""
        return values[:count] if self.quick else values

    def models(self, own: Sequence[str]) -> Sequence[str]:
        """The given model, or the study's own ones: the first in a quick study."""
        return [self.model] if self.model else self.few(own, 1)

    @property
    def over(self) -> str:
        """The data, length and seeds of a table, for its notes."""
        spread = f", mean ± standard deviation over {self.seeds} seeds" if self.seeds > 1 else ", one seed"
        length = f"{self.steps} steps" if self.steps else "1 epoch" if self.epochs == 1 else f"{self.epochs} epochs"
        return f"{self.data}, {length}{spread}"

    def jobs(
        self, function: Callable[..., dict[str, Any]], form: str, cells: Iterable[dict[str, Any]], *,
        seeds: int | None = None, common: dict[str, Any] | None = None,
    ) -> list[Job]:  # fmt: skip
        """A job for each cell and seed: `cells` are the parameters in which jobs differ, `common` the others.

        By default all seeds of the study run, and the common parameters are the options of trainings.
        """
        common = self.common if common is None else common
        every = range(seeds or self.seeds)
        return [Job(form, function, {**common, **cell, "seed": seed}) for cell in cells for seed in every]


@dataclass(frozen=True)
class Study:
    """A figure or table of a paper, at the size of this machine.

    Args:
        doc: the comparison, and the figure or table of the paper. The first paragraph is printed.
        jobs: the work for some settings.
        tables: the results, a data frame as of `frame`, beside the figures of the paper.
        draw: a figure of matplotlib, of the same data frame.
        grid: chooses a rate for each arm. If some seeds choose, the others run later, see `Grid.next_runs`.
        columns: further columns of the data frame, each a function of it.
        epochs, steps: of a training; one of them is None. With `quick` they are 1 and 4.
        data: others must be text as well, or images as well.
        seeds: how many, from 0 on; at most 2 with `quick`.
        least_seeds: the fewest seeds for the tables; a spread needs 2.
        options: the applicable ones of --data, --model, --width, --epochs, --steps, --seeds and --set; others are
            refused. By default all but --width, with --epochs or --steps, whichever the study counts.
    """

    name: str
    doc: str | None
    jobs: Callable[[Settings], Sequence[Job]]
    tables: Callable[[Settings, Any], Sequence[Table]]
    draw: Callable[[Any], Any]
    grid: Grid | None = None
    columns: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    epochs: int | None = None
    steps: int | None = None
    data: str = "digits"
    seeds: int = 5
    least_seeds: int = 2
    options: str | None = None

    def frame(self, results: Sequence[dict[str, Any]]) -> Any:
        """A data frame with a row for each job: its name, parameters, the `labels` of its arm, values, and `columns`.

        Among numbers None is NaN. A label replaces a parameter of the same name.
        """
        rows = [
            {"name": r["name"], **r["parameters"], **r["parameters"].get("labels", {}), **r["values"]} for r in results
        ]
        return pandas.DataFrame(rows).assign(**self.columns)

    def next_jobs(self, settings: Settings, results: Any) -> list[Job]:
        """The jobs that follow from results, at the next rates and seeds of each arm."""
        if self.grid is None or self.grid.choosing is None:
            return []
        runs = self.grid.next_runs(results, settings.seeds, widen=not settings.quick)
        by = self.grid.by.values()
        first = {tuple(job.parameters[name] for name in by): job for job in reversed(self.jobs(settings))}
        cells = [(first[arm], {self.grid.rate: rate, "seed": seed}) for arm, rate, seeds in runs for seed in seeds]
        return [replace(job, parameters=job.parameters | cell) for job, cell in cells]

    def settings(
        self, *, training: Sequence[str] = (), quick: bool = False, device: str = "auto", **options: Any
    ) -> Settings:
        """Settings, with the study's own values for missing options.

        Args:
            training: fields of the recipes of all trainings, each as NAME=VALUE.
            options: seeds, epochs, steps, data, model and width.

        Raises:
            ValueError: this study lacks an option, needs more seeds, or a field of the recipe does not
                have the form NAME=VALUE or is in `REFUSED`.
        """
        options = {name: value for name, value in options.items() if value is not None}
        named = options | ({"set": " ".join(training)} if training else {})
        every = f"data model {'steps' if self.steps else 'epochs'} seeds set"
        for option in sorted(named.keys() - (every if self.options is None else self.options).split()):
            raise ValueError(f"--{option} {named[option]} has no meaning for {self.name}: leave it out")
        own = {"data": self.data, "seeds": self.seeds, "epochs": self.epochs, "steps": self.steps}
        if quick:
            own |= {"seeds": min(2, self.seeds), "epochs": self.epochs and 1, "steps": self.steps and 4}
        chosen: dict[str, Any] = own | options
        given, needed = map(_kind, (chosen["data"], self.data))
        if given != needed:
            raise ValueError(f"--data {chosen['data']} is {given}: {self.name} needs {needed}")
        if chosen["seeds"] < self.least_seeds:
            raise ValueError(
                f"--seeds {chosen['seeds']}: {self.name} shows a spread over seeds, which takes two at least"
            )
        fields: dict[str, Any] = {}
        for text in training:
            name, equals, value = text.partition("=")
            key = name.lstrip("-").replace("-", "_")
            if not equals:
                raise ValueError(f"--set {name} is not of the form NAME=VALUE, such as --set amp=bf16")
            if key in REFUSED:
                raise ValueError(
                    f"--set {text}: {self.name} chooses it, has an option for it or does not use it: leave it out"
                )
            # arguments of a model add up
            fields[key] = [*fields.get(key, ()), value] if key == "model_args" else literal(value)
        return Settings(study=self.name, **chosen, training=fields, quick=quick, device=device)


def _kind(data: str) -> str:
    return "pairs" if data.startswith("pairs:") else "text" if is_text(data) else "images"
