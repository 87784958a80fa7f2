"""Puts the results of `bench/results`, examples and notebooks on the site: a hook of MkDocs, see `mkdocs.yml`.

A page says `<!-- include: NAME -->` where a table belongs. NAME is one of `TABLES`, or a Markdown file under
`bench/results`, without its suffix. Pictures and files that a page links to by `../bench/results/` are copied.
Notebooks become pages with their recorded output.
"""

import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from nbconvert import MarkdownExporter

from bench import host
from bench.rows import RESULTS, table
from bench.targets import judge, values
from bench.training import HEAD, cells

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
NOTEBOOKS = EXAMPLES.with_name("notebooks")
NOTEBOOK = re.compile(r"\]\((notebooks/\w+)\.ipynb\)")
PICTURE = re.compile(r"^!\[(.*)\]\(((?:\.\./)+bench/results/.*)\)$", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./((?:\.\./)*)bench/results/")
PAPER = re.compile(r"arXiv[:\s]\s*(\d{4}\.\d{5})")
MARKER = re.compile(r"^<!-- include: (\S+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds the files that pages may link to."""
    for path in sorted(path for path in RESULTS.rglob("*") if path.suffix in (".csv", ".md", ".png", ".txt")):
        if path.name == "table.md":
            continue  # a part of the page of its study
        uri = f"results/{path.relative_to(RESULTS).as_posix()}"
        files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, resources = MarkdownExporter().from_filename(str(path), resources={"unique_key": path.stem})
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replaces markers by tables, links papers, makes pictures links to their full size, and finds results."""
    markdown = NOTEBOOK.sub(r"](\1.md)", markdown)
    markdown = MARKER.sub(lambda match: tables(match[1]), markdown)
    markdown = PAPER.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", markdown)
    # docs/ becomes the root of the site, and bench/results/ its folder results/
    return LINK.sub(r"](\1results/", PICTURE.sub(r"[![\1](\2)](\2)", markdown))


def tables(name: str) -> str:
    """The Markdown for a marker.

    Raises:
        ValueError: there are no results of this name.
    """
    if name in TABLES:
        return "\n".join(TABLES[name]())
    file = RESULTS / f"{name}.md"
    if not file.is_file():
        raise ValueError(f"include: {name}: it is neither a file in {RESULTS.name} nor one of {', '.join(TABLES)}")
    return file.read_text(encoding="utf-8")


CPU, GPU = "amd-epyc", "nvidia-h200"
"""Machines of the recorded results, by the names of their files."""


def measured(machine: str = CPU) -> dict[str, Any]:
    """The recorded results of `make bench` on a machine."""
    return json.loads((RESULTS / f"bench-{machine}.json").read_text(encoding="utf-8"))


def about() -> Iterator[str]:
    """Devices, versions and dates of the measurements."""
    for machine in (CPU, GPU):
        facts = measured(machine)["about"]
        versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "triton"))
        yield f"- {facts['device']}, with {versions}, on {facts['date'][:10]}"


STEPS = {
    "sgd plain": "SGD, one rate",
    "sgd multipliers": "SGD, a rate for each tensor",
    "sgd ELR": "SGD with ELR",
    "sgd LARS": "SGD with LARS",
    "sgd clip": "SGD with clipping",
    "adamw plain": "AdamW, one rate",
    "adamw multipliers": "AdamW, a rate for each tensor",
    "adamw LAMB": "AdamW with LAMB",
    "adamw clip": "AdamW with clipping",
    "statistics": "statistics of all layers",
}


def compared(machine: str, columns: dict[str, str]) -> Iterator[str]:
    """Times of `STEPS`: ours, and the implementation that is the fastest other one by the first quantity.

    Args:
        columns: quantities of `targets.values` -> their names.
    """
    steps: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for quantity, case, step, seconds in values(measured(machine)):
        name, _, who = step.rpartition(", ")
        if quantity in columns and name in STEPS and not case.startswith("2,000 tiny"):
            steps.setdefault((case, name), {}).setdefault(who, {})[quantity] = seconds
    first, cells = next(iter(columns)), []
    for (case, name), by in steps.items():
        ours = by.pop("ours", None)
        if ours and by:
            who, other = min(by.items(), key=lambda of: of[1][first])
            times = (f"{of[quantity] * 1e6:,.0f}" for quantity in columns for of in (ours, other))
            cells.append((case, STEPS[name], who, *times, f"{other[first] / ours[first]:.2f}"))
    times = [text for name in columns.values() for text in (f"{name}: ours, µs", "other, µs")]
    yield from table(("parameters of", "step", "other", *times, f"{columns[first]}: other / ours"), cells)


def missed() -> Iterator[str]:
    """The targets that the measurements miss, one a line."""
    judged = [target for machine in (CPU, GPU) for target in judge(measured(machine)) if target.verdict == "missed"]
    yield from table(("target", "bound", "worst found"), ((t.what, t.limit, t.found) for t in judged))


def gradient_memory() -> Iterator[str]:
    """Memory with steps after backward and during it."""
    rows = json.loads((RESULTS / "gradient-memory.json").read_text(encoding="utf-8"))["rows"]
    keys = ("parameters", "state", "gradients", "resident")
    yield from table(
        ("step", "parameters, MiB", "state, MiB", "gradients, MiB", "resident memory of the process, MiB"),
        ((row["step"], *(f"{row[key] / 2**20:,.0f}" for key in keys)) for row in rows),
    )


def loader() -> Iterator[str]:
    """The least and the most images that a core loads in a second, of all repetitions."""
    content = json.loads((RESULTS / "loader.json").read_text(encoding="utf-8"))
    speeds: dict[str, list[float]] = {}
    for row in content["rows"]:
        speeds.setdefault(row["augmentation"], []).append(row["worker"])
    yield from table(
        (f"Pictures of 520 x 350 pixels to 224 x 224, on one core ({content['about']['device']})", "images a second"),
        ((f"`--augmentation {name}`", f"{min(found):.0f}–{max(found):.0f}") for name, found in speeds.items()),
    )


def training(machine: str) -> Iterator[str]:
    """The optimizer's share of training steps on a machine."""
    rows = json.loads((RESULTS / f"training-{machine}.json").read_text(encoding="utf-8"))["rows"]
    yield from table(HEAD, map(cells, rows))


def examples() -> Iterator[str]:
    """The examples, each with its first sentence as the heading."""
    for path in sorted(EXAMPLES.glob("*.py")):
        code = path.read_text(encoding="utf-8")
        title = code.removeprefix('"""').partition("\n")[0].removesuffix('"""').rstrip(".")
        yield f"## {title}\n\n[`{path.name}`](examples/{path.name})\n\n```python\n{code.rstrip()}\n```\n"


def options() -> Iterator[str]:
    """The options of the optimizers, and the values that each may have."""
    from fused_lwlr.optim.option_table import OPTIONS
    from fused_lwlr.optim.options import StepOptions

    given = {
        "group": "constructor, param group", "shared": "constructor", "flag": "constructor", "layer": "`layers=`",
    }  # fmt: skip
    defaults = {field.name: f"`{field.default!r}`" for field in fields(StepOptions) if field.default is not None}
    yield from table(
        ("option", "given to", "must be", "default"),
        ((f"`{name}`", given[of.scope], of.must_be, defaults.get(name, "")) for name, of in OPTIONS.items()),
    )


def commands() -> Iterator[str]:
    """The commands, and the options of each under the headings of its help."""
    import typer

    from fused_lwlr.command.group import COMMANDS, command

    for name, (_, text) in COMMANDS.items():
        yield from ("", f"## fused-lwlr {name}", "", text)
        for title, options in command(name).sections(typer.Context(command(name), info_name=name)).items():
            yield from ("", f"**{title}**", "")
            cells = ((f"<code>{_html(option)}</code>", _html(meaning)) for option, meaning in options)
            yield from table(("option", "meaning"), cells)


def _html(text: str) -> str:
    """Returns text for a cell of a table, in which no character has a meaning for Markdown."""
    return re.sub(r"[|*_`\[\]]", lambda found: f"&#{ord(found[0])};", html.escape(text, quote=False))


TABLES: dict[str, Callable[[], Iterable[str]]] = {
    "about": about, "commands": commands, "options": options, "examples": examples, "missed": missed,
    "gpu": partial(compared, GPU, {"cold": "GPU", "wall": "whole step"}), "cpu": partial(compared, CPU, {"CPU": "CPU"}),
    "host": lambda: table(host.HEAD, map(host.cells, measured()["host"])),
    "gradient-memory": gradient_memory, "training": partial(training, "cpu"), "training-gpu": partial(training, GPU),
    "loader": loader,
}  # fmt: skip
"""Markers -> lines of their tables."""
