"""Results as figures."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

SHOWN = {
    ("multipliers", "ours"): "fused_lwlr, a rate for each tensor",
    ("plain", "torch fused"): "torch.optim fused, one rate",
    ("multipliers", "torch fused"): "torch.optim fused, a rate for each tensor",
}


def throughput(gpu: dict[str, Any], path: Path) -> None:
    """GPU time of a step of each network and dtype for which all of `SHOWN` were timed with both rules."""
    times: dict[str, dict[Any, float]] = {}
    for row in gpu["rows"]:
        if "skipped" not in row and row["set"] != "2,000 tiny":
            found = times.setdefault(f"{row['set']}\n{row['dtype']}", {})
            found[row["rule"], row["method"], row["who"]] = row["cold"] * 1e6
    rules = {"sgd": "SGD with momentum", "adamw": "AdamW"}
    asked = {(rule, *step) for rule in rules for step in SHOWN}
    times = {name: found for name, found in times.items() if found.keys() >= asked}
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.8), sharey=True, layout="constrained")
    for axis, (rule, title) in zip(axes, rules.items(), strict=True):
        for at, (step, label) in enumerate(SHOWN.items()):
            places = [i + 0.27 * (at - 1) for i in range(len(times))]
            axis.bar(places, [found[(rule, *step)] for found in times.values()], 0.25, label=label)
        axis.set_xticks(range(len(times)), list(times), fontsize="small")
        axis.set_title(title)
        axis.set_yscale("log")
        axis.grid(visible=True, axis="y", alpha=0.3)
    axes[0].set_ylabel("GPU time of a step, µs")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def scaling(rows: list[dict[str, Any]], path: Path) -> None:
    """Host time and bytes of tables, against tensors and parameters; dotted lines are linear growth."""
    figure, axes = plt.subplots(2, 2, figsize=(7.2, 6), sharey="row", sharex="col", layout="constrained")
    for column, over in enumerate(("tensors", "parameters")):
        for name in dict.fromkeys(row["scaling"] for row in rows):
            found = [row for row in rows if (row["over"], row["scaling"]) == (over, name)]
            counts = [row["n"] for row in found]
            times, memory = axes[:, column]
            times.loglog(counts, [row["first"] * 1e3 for row in found], "--", label=f"{name}, first step")
            times.loglog(counts, [row["step"] * 1e3 for row in found], label=f"{name}, later steps")
            memory.loglog(counts, [row["table_bytes"] / 1e3 for row in found], label=name)
        last = next(row for row in reversed(rows) if row["over"] == over)
        for axis, key, unit in ((times, "step", 1e3), (memory, "table_bytes", 1e-3)):
            end = last[key] * unit
            axis.loglog([last["n"] / 100, last["n"]], [end / 100, end], ":", color="grey")
            axis.legend(fontsize="small")
        memory.set_xlabel(over)
    axes[0, 0].set_ylabel("host time of a step, ms")
    axes[1, 0].set_ylabel("tables on the device, kB")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def host(rows: list[dict[str, Any]], path: Path) -> None:
    """Host time of a step with a learning rate for each tensor, over the number of tensors, with new gradients."""
    figure, axes = plt.subplots(1, 2, figsize=(7.2, 3.4), sharey=True, layout="constrained")
    lines = (
        ("groups", "torch.optim, a rate for each tensor", "s-"), ("fused", "torch.optim, one rate", "o--"),
        ("ours", "fused_lwlr, a rate for each tensor", "D-"),
    )  # fmt: skip
    for axis, name in zip(axes, ("SGD", "AdamW"), strict=True):
        found = [row for row in rows if (row["optimizer"], row["gradients"]) == (name, "new")]
        for who, label, style in lines:
            axis.loglog([row["tensors"] for row in found], [row[who] * 1e3 for row in found], style, label=label)
        axis.set_title(name)
        axis.set_xlabel("tensors")
        counts = [row["tensors"] for row in found]
        axis.set_xticks(counts, [f"{count:,}" for count in counts])
        axis.minorticks_off()
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("host time of a step, ms")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def share(rows: list[dict[str, Any]], path: Path) -> None:
    """Percent of a training step that the optimizer takes, by model and batch, with images on the device."""
    rows = [row for row in rows if row["images"] == "on the device"]
    models, names = ([*dict.fromkeys(row[key] for row in rows)] for key in ("model", "optimizer"))
    figure, axes = plt.subplots(1, len(models), figsize=(7.2, 3.4), sharey=True, layout="constrained", squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        batches = [*dict.fromkeys(row["batch"] for row in rows if row["model"] == model)]
        for at, name in enumerate(names):
            found = [row for row in rows if (row["model"], row["optimizer"]) == (model, name)]
            places = [batches.index(row["batch"]) + (at - (len(names) - 1) / 2) * 0.16 for row in found]
            axis.bar(places, [100 * row["update_seconds"] / row["seconds"] for row in found], 0.15, label=name)
        axis.set_xticks(range(len(batches)), [f"{batch:,}" for batch in batches])
        axis.set_xlabel("images in a batch")
        axis.set_title(model)
    axes[0, 0].set_ylabel("optimizer, % of a training step")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def memory(rows: list[dict[str, Any]], path: Path) -> None:
    """Memory of parameters, state of AdamW and gradients at their peak, with steps after backward and during it."""
    figure, axis = plt.subplots(figsize=(7.2, 2.6), layout="constrained")
    names = [row["step"] for row in rows]
    left = [0.0] * len(rows)
    for key in ("parameters", "state", "gradients"):
        sizes = [row[key] / 2**20 for row in rows]
        axis.barh(names, sizes, left=left, label=f"{key}, at their peak" if key == "gradients" else key)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("MiB")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=150)
    plt.close(figure)
