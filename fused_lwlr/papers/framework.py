"""What a study is: jobs that do not depend on each other, and a report of all their results."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from fused_lwlr.papers.tables import Report

OPTIONS = frozenset({"data", "model", "epochs"})


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line; part of every result, except for the device.

    `model` is None where the study's own models are wanted. `quick` asks for a smoke test of seconds: as few values
    of everything as the report can do with.
    """

    study: str
    seeds: int
    epochs: int
    data: str = "digits"
    model: str | None = None
    quick: bool = False
    device: str = "auto"


@dataclass(frozen=True)
class Job:
    """One piece of work: a function of plain parameters, the seed among them.

    Args:
        name: what it is called, unlike all other jobs of the study: letters, digits and any of . , = + - _
        function: at the top of a module, since it is called in another process; returns numbers, text, None (for what
            is not finite) and lists of these by name.
        parameters: its keyword arguments, all of which JSON can hold.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    parameters: dict[str, Any]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.,=+-]{1,120}", self.name):
            raise ValueError(f"job name {self.name!r} must be 1 to 120 letters, digits or any of . , = + - _")


@dataclass(frozen=True)
class Result:
    """A finished job: what it was given, what came out, and the seconds it took."""

    name: str
    parameters: dict[str, Any]
    values: dict[str, Any]
    seconds: float


class Results(Sequence[Result]):
    """Results in the order of their jobs, and ways to choose among them."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = tuple(results)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> "Results": ...
    def __getitem__(self, index: int | slice) -> "Result | Results":
        return Results(self._results[index]) if isinstance(index, slice) else self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self._results)

    def where(self, **parameters: Any) -> "Results":
        """Those of jobs with these parameters; a job without the parameter is not among them."""
        wanted = parameters.items()
        return Results([r for r in self if all(k in r.parameters and r.parameters[k] == v for k, v in wanted)])

    def distinct(self, parameter: str) -> list[Any]:
        """The values of a parameter, each once, in the order of the jobs."""
        return list(dict.fromkeys(r.parameters[parameter] for r in self if parameter in r.parameters))

    def of(self, value: str) -> list[Any]:
        """One value of every result."""
        return [r.values[value] for r in self]


@dataclass(frozen=True)
class Study:
    """A figure or table of a paper, at the size of this machine.

    Args:
        name: on the command line.
        doc: a sentence: what is compared, and in which figure or table of which paper.
        jobs: the work, as settings have it.
        report: tables, with the paper's own figures beside, and a picture, from the results of all jobs.
        epochs: by default. `quick` has 1.
        seeds: by default, 0, 1, ...; a spread needs 2. `quick` has 2.
        options: those of --data, --model and --epochs that have a meaning for it; others are refused.
    """

    name: str
    doc: str
    jobs: Callable[[Settings], Sequence[Job]]
    report: Callable[[Settings, Results], Report]
    epochs: int = 10
    seeds: int = 3
    options: frozenset[str] = OPTIONS

    def settings(
        self,
        *,
        seeds: int | None = None,
        epochs: int | None = None,
        data: str | None = None,
        model: str | None = None,
        quick: bool = False,
        device: str = "auto",
    ) -> Settings:
        """Settings, with the study's own values for what is None.

        Raises:
            ValueError: an option that this study does not have, or fewer than two seeds.
        """
        given = {"data": data, "model": model, "epochs": epochs}
        for option in sorted(OPTIONS - self.options):
            if given[option] is not None:
                raise ValueError(f"--{option} {given[option]} has no meaning for {self.name}: leave it out")
        count = seeds if seeds is not None else 2 if quick else self.seeds
        if count < 2:
            raise ValueError(f"--seeds {count}: a study shows a spread over seeds, which takes two at least")
        return Settings(
            study=self.name,
            seeds=count,
            epochs=epochs if epochs is not None else 1 if quick else self.epochs,
            data=data or "digits",
            model=model,
            quick=quick,
            device=device,
        )
