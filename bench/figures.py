"""Results as figures."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

SHOWN = (("multipliers", "ours"), ("plain", "torch fused"), ("plain", "torch foreach"))


def throughput(gpu: dict[str, Any], path: Path) -> None:
    """Percent of copy bandwidth that steps reach, by parameter set; sets that fit into L2 may exceed 100."""
    rows = [row for row in gpu["rows"] if "skipped" not in row and row["dtype"] == "fp32"]
    bandwidth = max(gpu["copy_bytes_per_second"])
    figure, axes = plt.subplots(2, 1, figsize=(7.2, 6.5), sharey=True, layout="constrained")
    for axis, rule in zip(axes, ("sgd", "adamw"), strict=True):
        sets = list(dict.fromkeys(row["set"] for row in rows if row["rule"] == rule))
        for at, (method, who) in enumerate(SHOWN):
            found = {r["set"]: r for r in rows if (r["rule"], r["method"], r["who"]) == (rule, method, who)}
            bars = [(i, found[name]) for i, name in enumerate(sets) if name in found]
            bars = [(i, row) for i, row in bars if row["bytes_per_second"] is not None]
            heights = [100 * row["bytes_per_second"] / bandwidth for _, row in bars]
            axis.bar([i + 0.27 * (at - 1) for i, _ in bars], heights, 0.25, label=f"{method}, {who}")
        axis.axhline(100, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(sets)), sets, rotation=25, ha="right")
        axis.set_title(f"{rule}, float32, L2 flushed")
        axis.set_ylabel("% of copy bandwidth")
    axes[0].legend(fontsize="small")
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
