"""Each arm of a comparison at its own best learning rate, among rates of a grid."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pandas
from matplotlib.figure import Figure

from fused_lwlr.papers import comparison
from fused_lwlr.papers.figures import ACCURACY, bands
from fused_lwlr.papers.tables import Table, Values, label, summary

LADDER = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""All learning rates that a search can reach."""
CHOOSING = 2
"""Seeds that choose a rate where the other seeds run at the chosen rate alone."""


@dataclass(frozen=True)
class Grid:
    """Arms and rates of trainings. An arm's best rate has the lowest mean score over seeds.

    Args:
        by: what tells arms apart: columns of tables -> columns of results.
        rate: column with the learning rate.
        score: column with the held-out loss, which chooses. Rows with NaN do not count.
        outcome: column that is NaN where a training diverged.
        rivals: values of the last of `by` -> the values that they are compared with, where the others are equal. Of a
            tuple, the one with the best score.
        choosing: the number of seeds that choose. More seeds at the chosen rate do not change the choice. None for all.
        ladder: further rates, for an arm whose best rate is its lowest or highest.
    """

    by: Mapping[str, str]
    rate: str = "lr"
    score: str = "val_loss"
    outcome: str = "train_loss"
    rivals: Mapping[Any, Any] = field(default_factory=dict)
    choosing: int | None = None
    ladder: Sequence[float] = ()

    def arms(self, results: Any) -> dict[tuple[Any, ...], Any]:
        """The results of each arm, by the values of `by`, in the order of the jobs."""
        return dict(list(results.groupby(list(self.by.values()), sort=False)))

    def choosing_results(self, results: Any) -> Any:
        """The results that choose the rates: by arm in the order of the jobs, and by rate."""
        if self.choosing is not None:
            results = results[results.seed < self.choosing]
        return pandas.concat([arm.sort_values(self.rate, kind="stable") for arm in self.arms(results).values()])

    def scores(self, results: Any) -> Any:
        """The mean score over the seeds that choose, by arm and rate: infinite where one of them diverged."""
        results = self.choosing_results(results)
        scores = results[self.score].astype(float).mask(results[self.outcome].isna(), inf)
        runs = results.assign(**{self.score: scores}).groupby([*self.by.values(), self.rate], sort=False)
        return runs[self.score].mean()

    def best(self, results: Any) -> Any:
        """The results at the best rate of each arm.

        A rate at which a seed diverged is chosen only if every rate has such a seed.
        """
        scores = self.scores(results).fillna(inf)
        chosen = scores.groupby(level=list(range(len(self.by))), sort=False).idxmin()
        arms = self.arms(results)
        return pandas.concat([arms[key[:-1]][arms[key[:-1]][self.rate] == key[-1]] for key in chosen])

    def rate_of(self, results: Any) -> str:
        """The rate of results at one rate; empty where no rate was chosen."""
        rate = results[self.rate].iloc[0]
        return label(rate) if rate else ""

    def differences(self, best: Any, value: str, form: str, *, lower_is_better: bool = False) -> Values:
        """Columns of a table that compare arms, each at one rate, with their rivals; empty without a rival."""
        arms = self.arms(best)

        def found(of: Any) -> list[str]:
            *same, arm = of[list(self.by.values())].iloc[0]
            named = self.rivals.get(arm)
            names = named if isinstance(named, tuple) else (named,)
            rivals = [arms[key] for name in names if (key := (*same, name)) in arms]
            rival = min(rivals, key=lambda other: self.scores(other).iloc[0], default=None)
            return comparison.against(of, rival, value, form, lower_is_better=lower_is_better)

        return {comparison.COLUMNS: found}

    def next_runs(
        self, results: Any, seeds: int, *, widen: bool
    ) -> Iterator[tuple[tuple[Any, ...], float, Sequence[int]]]:
        """Rates and seeds that each arm has to run next.

        The next rate of the ladder if its best rate is at an edge, and `widen` is set; otherwise the other seeds at the
        best rate.
        """
        choosing = range(self.choosing or seeds)
        best = self.arms(self.best(results))
        for arm, of in self.arms(results).items():
            rates, rate = of[self.rate].tolist(), float(best[arm][self.rate].iloc[0])
            step = 0
            if self.ladder and widen and min(rates) < max(rates):
                step = 1 if rate == max(rates) else -1 if rate == min(rates) else 0
            if step and 0 <= self.ladder.index(rate) + step < len(self.ladder):
                yield arm, self.ladder[self.ladder.index(rate) + step], choosing
            else:
                yield arm, rate, range(len(choosing), seeds)

    @property
    def choice(self) -> str:
        """How the best rates are chosen, in words."""
        seeds = f"{self.choosing} seeds; the other seeds run at it alone" if self.choosing else "all seeds"
        return f"by the loss on held-out images, mean over {seeds}"

    def tables(
        self, results: Any, title: str, notes: Sequence[str], *, form: str = "{:.2f}", more: Values | None = None,
        choice: str | None = None,
    ) -> list[Table]:  # fmt: skip
        """Test accuracy at the best rate of each arm, with differences from its rival; and all rates.

        Args:
            form: of the accuracy at the best rate.
            more: further columns of the first table.
            choice: how rates are chosen, in place of `Grid.choice`.
        """
        best = self.best(results)
        values: Values = {"best lr": self.rate_of, "test accuracy %": ("test_accuracy", form)}
        differences = self.differences(best, "test_accuracy", form.replace(":", ":+"))
        notes = [*notes, f"best lr: {choice or self.choice}", comparison.NOTE]
        compared = summary(title, best, self.by, {**values, **differences, **(more or {})}, notes)
        tried = {"held-out loss": ("val_loss", "{:.3f}"), "test accuracy %": ("test_accuracy", "{:.1f}")}
        return [compared, self.rates(results, "all learning rates", "lr", tried)]

    def rates(self, results: Any, title: str, name: str, values: Values) -> Table:
        """Values at all rates, of the seeds that choose; without arms that have no rate."""
        results = self.choosing_results(results[results[self.rate] != 0])
        return summary(f"{title}, {results.seed.nunique()} seeds", results, {**self.by, name: self.rate}, values)

    def draw(self, results: Any, *, of_rate: str = "learning rate", **options: Any) -> Figure:
        """Test accuracy over the rate, of the seeds that choose. Arguments as of `bands`."""
        results = self.choosing_results(results)
        return bands(results, x=self.rate, y="test_accuracy", labels=(of_rate, ACCURACY), **options)
