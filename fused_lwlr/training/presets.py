"""Recipes by name, which `presets.toml` holds: of the LWLR paper, references for ImageNet, and large batches."""

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fused_lwlr.training import mlperf
from fused_lwlr.training.defaults import implied_defaults, is_pretrained, small_model_defaults
from fused_lwlr.training.recipe import Recipe, is_in_memory, is_text, without_effect
from fused_lwlr.training.recipe_file import tomllib


class Preset(NamedTuple):
    """A recipe with a name.

    Attributes:
        source: paper or code that it comes from.
        reported: top-1 accuracy on ImageNet in the source.
        fields: fields that differ from the defaults.
        single_lr: the learning rate with one rate for all layers (`--rates single`), if the source has another one.
    """

    source: str
    reported: str
    fields: dict[str, Any]
    single_lr: float | None = None


def _fields(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of a table of `presets.toml`, with the fields that it takes over."""
    table = tables[name]
    fields: dict[str, Any] = {}
    for other in table.get("like", ()):
        fields |= _fields(tables, other)
    for field in table.get("without", ()):
        del fields[field]
    return fields | {field: value for field, value in table.items() if field not in ABOUT}


def _read() -> dict[str, Preset]:
    """The presets of `presets.toml`, in its order."""
    tables = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
    return {
        name: Preset(table["source"], table["reported"], _fields(tables, name), table.get("single_lr"))
        for name, table in tables.items()
        if "source" in table
    }


ABOUT = ("like", "without", "source", "reported", "single_lr")
"""Keys of a table that are not fields of a recipe."""
PRESETS = _read()
BASELINE = "Nesterov momentum and Adam were reported to match it (arXiv:2102.06356)"


def listing() -> Iterator[str]:
    """A line for each preset, and one for all."""
    width = max(map(len, PRESETS))
    for name, preset in PRESETS.items():
        scaling = preset.fields.get("scaling")
        more = f". {BASELINE}" if scaling in ("lars", "lamb") else ""
        yield f"{name:{width}}  {preset.source}; reported: {preset.reported}{more}"
    yield "Accuracies are those that the sources report for ImageNet. None of the presets was trained here."


def resolve(
    preset: str | None,
    overrides: Mapping[str, Any],
    *,
    where: Mapping[str, str] | None = None,
    note: Callable[[str], object] = lambda text: None,
) -> Recipe:
    """Return a recipe: a preset, or the defaults, with some fields replaced.

    A learning rate in `overrides` is not scaled with the batch size, unless `overrides` also has `lr_scaling`.

    Args:
        preset: a name of `PRESETS`, or None.
        where: as for `Recipe.from_dict`.
        note: called with a sentence for each decision that is not obvious.
    """
    if preset is not None and preset not in PRESETS:
        close = difflib.get_close_matches(preset, PRESETS, n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(PRESETS)}"
        raise ValueError(f"there is no preset {preset!r}: {hint}")
    fields = dict(PRESETS[preset].fields) if preset is not None else small_model_defaults(overrides)
    if preset is not None and PRESETS[preset].single_lr is not None and overrides.get("rates") == "single":
        fields["lr"] = PRESETS[preset].single_lr
    if "lr" in overrides and "lr_scaling" not in overrides:
        fields["lr_scaling"] = "none"
    by_table = fields.get("scaling") == "lars" and preset is not None
    if by_table and (batch_size := _batch_size({**fields, **overrides})):
        of_table, text = mlperf.fields_of(batch_size, overrides)
        fields |= of_table
        if text:
            note(text)
    elif preset is not None and _fixed_rate(fields, overrides):
        note(
            f"--preset {preset} has --lr {fields['lr']:g} for batches of {fields['batch_size']:,} and does not scale "
            f"it: give --lr-scaling linear or sqrt to scale it to --batch-size {overrides['batch_size']}, or --lr."
        )
    # options that follow from the user's choice override the preset
    merged = {**fields, **implied_defaults(overrides), **overrides}
    if "init" not in overrides and is_pretrained(merged.get("pretrained"), merged.get("model_args", ())):
        merged["init"] = "model"
        note("The weights are pretrained: training starts from them as they are (--init model).")
    if merged.get("model") in ("resnet50", "resnet152"):
        name = merged["model"]
        note(f"--model {name} is a net for small images, of three stages: ImageNet's is --model timm:{name}.")
    data = str(overrides.get("data"))
    if preset is not None and (is_in_memory(data) or is_text(data)):
        note(f"--preset {preset} is for photographs: replace its options that have no meaning for --data {data}.")
    # fields of the preset that belong to another choice than the user's
    for name in without_effect(merged):
        if name not in overrides:
            del merged[name]
    return Recipe.from_dict(merged, where)


def _fixed_rate(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Whether the rate of a preset is for one batch size, and the user has given another one, but no rate."""
    given = "lr" in overrides or "lr_scaling" in overrides
    batch_size = _batch_size({**fields, **overrides})
    return not given and "lr_scaling" not in fields and batch_size not in (0, fields["batch_size"])


def _batch_size(fields: Mapping[str, Any]) -> int:
    try:
        return int(fields["batch_size"])
    except (OverflowError, TypeError, ValueError):
        return 0  # validation refuses the value in the user's spelling
