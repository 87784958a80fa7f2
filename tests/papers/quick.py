"""Studies in seconds: with --quick, or with trainings that were not run; and what tables say of their jobs."""

import json

import numpy as np
from command_line import run
from idx_files import arrays, save

from fused_lwlr.papers.tables import label as label_of
from fused_lwlr.papers.training import Trained

COMMON = {"data": "digits", "epochs": 1, "device": "cpu"}
FEW = ("--set", "batch_size=256")
"""Options for few steps."""
DONE = Trained(train_loss=1.0, accuracies=[50.0], val_loss=1.0)


def quick(name, folder, *options):
    """The rows of each table, by column, and the jobs, of a study with --quick."""
    run(f"study {name} --quick --jobs 1 --device cpu --out {folder} {' '.join(options)}")
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    tables = []
    for text in (folder / "table.md").read_text(encoding="utf-8").split("### ")[1:]:
        head, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
        tables.append([dict(zip(head, row, strict=False)) for row in rows])
    return tables, json.loads((folder / "results.json").read_text())["jobs"]


def quick_on_files(name, folder, *options):
    """The same on a small data set."""
    save(folder / "small", arrays(train=100))
    return quick(name, folder / "out", "--data", f"idx:{folder / 'small'}", *options)


def spread(values, digits):
    return f"{np.mean(values):.{digits}f} ± {np.std(values, ddof=1):.{digits}f}"


def change(ours, theirs, digits):
    """The difference of two arms, seed by seed."""
    gain = np.subtract(ours, theirs)
    return f"{np.mean(gain):+.{digits}f} ± {np.std(gain, ddof=1):.{digits}f}"


def asked(study, module, monkeypatch, *, result=DONE, **settings):
    """For each job its parameters, the recipe that it trains, and its values after a training with this result."""
    found = []

    def untrained(recipe, *, tuned, **options):
        assert tuned
        recipes.append(recipe)
        return result

    monkeypatch.setattr(module, "train", untrained)
    for job in study.jobs(study.settings(**settings)):
        recipes = []
        values = job.function(**job.parameters)
        assert values["test_accuracy"] == result.last["test_accuracy"]
        [recipe] = recipes
        found.append((job.parameters, recipe, values))
    return found


def check(table, jobs, columns, rivals, *, best="best lr", label=lambda of: f"{of['lr']:g}"):
    """Each row has the accuracy at the setting with the lowest held-out loss, and its difference from a rival.

    Args:
        columns: the columns that name an arm, each with its parameter of a job. The last one is the name of the arm.
        rivals: by the name of the arm; of a tuple, the one with the lowest held-out loss.
        best: the column of the chosen setting.
        label: the name of a job's setting in the table.

    Returns:
        The values of jobs, by arm and setting.
    """
    found, chosen, losses = {}, {}, {}
    for job in jobs:
        arm = tuple(label_of(job["parameters"][name]) for name in columns.values())
        found.setdefault(arm, {}).setdefault(label(job["parameters"]), []).append(job["values"])
    assert [tuple(row[column] for column in columns) for row in table] == list(found)
    for row, (arm, of) in zip(table, found.items(), strict=True):
        setting = min(of, key=lambda name, of=of: np.mean([values["val_loss"] for values in of[name]]))
        assert row[best] == setting
        chosen[arm] = [values["test_accuracy"] for values in of[setting]]
        losses[arm] = np.mean([values["val_loss"] for values in of[setting]])
        assert row["test accuracy %"] == spread(chosen[arm], 2)
    for row, arm in zip(table, found, strict=True):
        rival = rivals.get(arm[-1])
        if isinstance(rival, tuple):
            rival = min(rival, key=lambda name, same=arm[:-1]: losses[(*same, name)])
        wanted = change(chosen[arm], chosen[(*arm[:-1], rival)], 2) if rival else ""
        assert row.get("difference", "").strip() == wanted
    return found
