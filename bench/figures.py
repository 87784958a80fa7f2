"""Results as figures."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd

mpl.use("Agg")
from matplotlib import pyplot as plt

SHOWN = {
    ("multipliers", "ours"): "fused_lwlr, a rate for each tensor",
    ("plain", "torch fused"): "torch.optim fused, one rate",
    ("multipliers", "torch fused"): "torch.optim fused, a rate for each tensor",
}


def draw(
    path: Path, panels: dict[str, pd.DataFrame], kind: str, *, height: float, form: str = "", **options: Any
) -> None:
    """Draws a table for each title, side by side, with a legend of their columns below.

    Args:
        form: the format of the numbers above bars, or "" for no numbers.
        options: of `pandas.DataFrame.plot`.
    """
    figure = plt.figure(figsize=(7.2, height), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axis, (title, table) in zip(axes[0], panels.items(), strict=True):
        table.plot(ax=axis, kind=kind, title=title, legend=False, width=0.8, rot=0, **options)
        for bars in axis.containers if form else ():
            axis.bar_label(bars, fmt=form, fontsize="xx-small", padding=1)
    lines, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=3, fontsize="small", columnspacing=1.0)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def throughput(gpu: dict[str, Any], path: Path) -> None:
    """GPU time of a step of each network and dtype for which all of `SHOWN` were timed with both rules."""
    timed = [row for row in gpu["rows"] if "skipped" not in row and row["set"] != "2,000 tiny"]
    if not timed:
        return
    rows = pd.DataFrame(timed)
    rows["step"] = [SHOWN.get(step) for step in zip(rows["method"], rows["who"], strict=True)]
    rows["case"], rows["ms"] = rows["set"] + "\n" + rows["dtype"], rows["cold"] * 1e3
    rules = {"SGD with momentum": "sgd", "AdamW": "adamw"}
    steps = pd.MultiIndex.from_product([rules.values(), SHOWN.values()])
    times = rows.pivot_table("ms", "case", ["rule", "step"], sort=False).reindex(columns=steps).dropna()
    panels = {title: times[rule] for title, rule in rules.items()}
    if len(times):
        labels = {"xlabel": "", "ylabel": "GPU time of a step, ms", "fontsize": "small"}
        draw(path, panels, "bar", height=3.8, form="{:.2f}", **labels)


def share(rows: list[dict[str, Any]], path: Path) -> None:
    """Percent of a training step that the optimizer takes, by model and batch, with images on the device."""
    found = pd.DataFrame([row for row in rows if row["images"] == "on the device"])
    found["share"] = 100 * found["update_seconds"] / found["seconds"]
    panels = {
        model: some.pivot_table("share", "batch", "optimizer", sort=False)
        for model, some in found.groupby("model", sort=False)
    }
    draw(path, panels, "bar", height=3.4, xlabel="images in a batch", ylabel="optimizer, % of a training step")


def memory(rows: list[dict[str, Any]], path: Path) -> None:
    """Memory of parameters, state of AdamW and gradients at their peak, with steps after backward and during it."""
    sizes = pd.DataFrame(rows).set_index("step")[["parameters", "state", "gradients"]] / 2**20
    sizes = sizes.rename(columns={"gradients": "gradients, at their peak"}).iloc[::-1]
    draw(path, {"": sizes}, "barh", height=2.6, stacked=True, xlabel="MiB", ylabel="")
