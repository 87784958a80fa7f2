"""The figures of studies: their size on a page, and trainings that diverged."""

import json
import math
from itertools import product
from pathlib import Path

import pandas
import pytest

from fused_lwlr.papers import language, methods
from fused_lwlr.papers.figures import WIDTH, bands, panels
from fused_lwlr.papers.store import load_recorded
from fused_lwlr.papers.studies import find

RECORDED = Path(__file__).parents[2] / "bench" / "results" / "studies"


@pytest.mark.parametrize(("count", "rows", "width"), [(1, 1, 0.6 * WIDTH), (2, 1, WIDTH), (3, 2, WIDTH), (4, 2, WIDTH)])
def test_panels_are_in_two_columns(count, rows, width):
    figure, axes = panels(count, height=2.0)
    assert len(axes) == count
    assert tuple(figure.get_size_inches()) == pytest.approx((width, 2.0 * rows))
    assert sum(each.axison for each in figure.axes) == count


def test_a_line_marks_losses_of_perceptrons_that_diverged():
    losses = {("2x32", 0.1): (0.5, 0.6), ("2x32", 1.0): (0.5, math.nan), ("2x64", 0.1): (0.2, 0.3)}
    rows = [
        {"method": method, "size": size, "lr": lr, "train_loss": loss}
        for method in ("single", "LARS")
        for (size, lr), of_seeds in losses.items()
        for loss in (of_seeds if method == "single" else (0.4, 0.5))
    ]
    figure = methods.draw(pandas.DataFrame(rows))
    level = methods.DIVERGED
    drawn = {axes.get_title(): [list(line.get_ydata()) for line in axes.lines] for axes in figure.axes}
    assert drawn["single"][0] == pytest.approx([0.55, (0.5 + level) / 2])
    assert drawn["LARS"][0] == pytest.approx([0.45, 0.45])
    assert all(lines[-1] == [level, level] for lines in drawn.values())
    assert figure.get_size_inches()[0] == WIDTH


def test_a_line_marks_the_losses_of_trainings_that_diverged():
    rows = [
        {"task": "SGD", "arm": "plain", "lr": lr, "seed": 0, "loss": loss, "val_loss": loss}
        for lr, loss in ((0.1, 2.0), (1.0, math.nan))
    ]
    (axes,) = language.draw(pandas.DataFrame(rows), panel=("task",), hue="arm", palette={"plain": "C0"}).axes
    assert [text.get_text() for text in axes.texts] == ["diverged"]
    assert list(axes.lines[0].get_ydata()) == [2.0, language.DIVERGED]
    assert set(axes.lines[-1].get_ydata()) == {language.DIVERGED}


@pytest.mark.parametrize("name", ["lwlr-adam", "gradinit", "lwlr-methods", "elr-warmup", "large-batch"])
def test_a_study_whose_trainings_all_diverged(name, tmp_path):
    """Recorded results without any value, as after `--set weight_decay=1e9`."""
    recorded = json.loads((RECORDED / name / "results.json").read_text(encoding="utf-8"))
    for job in recorded["jobs"]:
        job["values"] = dict.fromkeys(job["values"])
    (tmp_path / "results.json").write_text(json.dumps(recorded))
    study = find(name)
    settings, results = load_recorded(tmp_path / "results.json", study)
    assert study.tables(settings, results)
    assert study.draw(results).axes


def test_a_legend_has_a_row_for_colors_and_a_row_for_styles():
    """And whole numbers on an axis of steps."""
    rows = [
        {"epoch": epoch, "loss": 1.0, "setup": setup, "warm-up": warmup}
        for epoch, setup, warmup in product((1, 2), ("a", "b", "c"), ("no", "yes"))
    ]
    figure = bands(
        pandas.DataFrame(rows), x="epoch", y="loss", log="", labels=("epoch", "loss"), hue="setup", style="warm-up"
    )
    (legend,) = figure.legends
    # a legend fills one column after the other
    assert [text.get_text() for text in legend.get_texts()] == ["setup", "warm-up", "a", "no", "b", "yes", "c", ""]
    dashes = [line.get_linestyle() for line in legend.get_lines()]
    assert dashes[3] != dashes[5]
    assert all(tick == round(tick) for tick in figure.axes[0].get_xticks())
