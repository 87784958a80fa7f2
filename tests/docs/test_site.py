"""README and the pages of the site: their code runs, their links and commands exist, their figures are recorded."""

import importlib.util
import json
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RECORDED = ROOT / "bench" / "results"
BLOCK = re.compile(r"^```python *(?:title=\"(?P<title>[^\"]*)\")?\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_HERE = {
    "needs a GPU": not torch.cuda.is_available(),
    "needs timm": importlib.util.find_spec("timm") is None,
}
"""Titles of blocks that some machines cannot run, and whether this is one."""


SLOW = ("adding-a-rule", "adding-a-scaling", "layers", "rules", "sharding")
"""Pages with code that compiles kernels or draws a figure."""


def named(pages, slow=()):
    return pytest.mark.parametrize(
        "page",
        [pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=pytest.mark.long if page.stem in slow else ())
         for page in pages],
    )  # fmt: skip


def script(text):
    """The blocks of a page as one script, on the same lines, without blocks that cannot run here."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        title = block["title"]
        assert title is None or title in NOT_HERE, f"{title!r} is not a reason for a block that is not run"
        if title is None or not NOT_HERE[title]:
            start = text.count("\n", 0, block.start("code"))
            for i, line in enumerate(block["code"].splitlines()):
                lines[start + i] = line
    return "\n".join(lines)


@named([page for page in PAGES if "```python" in page.read_text()], slow=SLOW)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page, one after another: later ones use the names of earlier ones."""
    text = page.read_text()
    assert text.count("```python") == len(BLOCK.findall(text))
    # a file, not a string, since Triton reads the source of formulas
    file = tmp_path / f"{page.stem.replace('-', '_')}.py"
    file.write_text(script(text))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    runpy.run_path(str(file), run_name="__main__")


@named(PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def numbers_in(text):
    return set(re.findall(r"\d+(?:\.\d+)? ± \d+(?:\.\d+)?", text))


@cache
def known_numbers():
    return numbers_in(" ".join(file.read_text() for file in RECORDED.glob("studies/*/table.md")))


@named(PAGES)
def test_means_and_deviations_are_recorded(page):
    """Every `a ± b` of a page is in a table of a study."""
    assert not numbers_in(page.read_text()) - known_numbers()


@named(PAGES)
def test_a_number_beside_the_link_to_a_study_is_from_this_study(page):
    """`[images](studies/NAME.md), +a ± b` and `a ± b ... ([NAME](studies/NAME.md))`."""
    number, link = r"(\d+(?:\.\d+)? ± \d+(?:\.\d+)?)", r"\[[^\]]+\]\((?:docs/)?studies/([\w-]+)\.md\)"
    text = page.read_text().replace("\n", " ")
    beside = [found[::-1] for found in re.findall(rf"{link}, \D?{number}", text)]
    beside += re.findall(rf"{number}[^±()|]*\((?:[^()]*[, ])?{link}\)", text)
    tables = {study: (RECORDED / "studies" / study / "table.md").read_text() for _, study in beside}
    assert not [(found, study) for found, study in beside if found not in tables[study]]
    assert page.stem != "which-method" or len(beside) > 10


def test_times_of_the_readme_are_recorded():
    rows = {line.split("|")[1].strip(): line for line in PAGES[0].read_text().splitlines() if line.startswith("|")}
    recorded = json.loads((RECORDED / "bench-amd-epyc.json").read_text())
    for row in recorded["host"]:
        name = {"SGD": "SGD with momentum"}.get(row["optimizer"], row["optimizer"])
        if row["tensors"] == 161 and row["gradients"] == "new":
            columns = ("ours", "LARS", "groups", "fused")
            ours, lars, groups, one = (f"{row[who] * 1e6:,.0f} µs" for who in columns)
            told = f"| {ours}, with LARS {lars} | {groups}; at one rate {one} |"
            assert told in rows[f"host time of a step, {name}"]
    on_gpu = {
        (row["rule"], row["method"], row["who"]): f"{row['cold'] * 1e6:,.0f} µs"
        for row in json.loads((RECORDED / "bench-nvidia-h200.json").read_text())["gpu"]["rows"]
        if (row["set"], row["dtype"]) == ("ResNet-50", "fp32")
    }
    for name, rule, scaling in (("SGD with momentum", "sgd", "LARS"), ("AdamW", "adamw", "LAMB")):
        steps = (("multipliers", "ours"), (scaling, "ours"), ("multipliers", "torch fused"), ("plain", "torch fused"))
        ours, scaled, groups, one = (on_gpu[(rule, *step)] for step in steps)
        told = f"| {ours}; {scaling} at one rate {scaled} | {groups}; at one rate {one} |"
        assert told in rows[f"GPU time of a step on an H200, {name}"]
    ms = {
        row["step"]: f"{row['seconds'] * 1e3:.1f} ms"
        for row in recorded["cpu"]
        if (row["set"], row["threads"]) == ("ResNet-50", 2)
    }
    for name, ours, timm in (("LARS", "sgd LARS", "sgd LARS"), ("LAMB", "adamw LAMB", "adamw LAMB")):
        row = rows[f"{name} on two cores of a CPU, at one rate"]
        assert f"| {ms[f'{ours}, ours']} | no; timm {ms[f'{timm}, timm']} |" in row
    both = [", ".join(ms[f"{rule} plain, {who}"] for rule in ("sgd", "adamw")) for who in ("ours", "torch fused")]
    assert f"| {both[0]} | {both[1]} |" in rows["plain SGD, AdamW on two cores of a CPU, at one rate"]


@named(PAGES)
def test_commands_exist(page):
    """Targets of make, modules of bench, and options of fused-lwlr that shell blocks show."""
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shell = "\n".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))
    assert not set(re.findall(r"^make ([\w.-]+)", shell, re.MULTILINE)) - targets
    for module in re.findall(r"python -m bench\.?(\w*)", page.read_text()):
        assert (ROOT / "bench" / f"{module or '__main__'}.py").exists(), module
    for command in re.findall(r"(?:fused-lwlr|-m fused_lwlr) (.*)", shell.replace("\\\n", " ")):
        name, *words = command.split("#")[0].split()
        known = options_of(name)
        assert not {word.partition("=")[0] for word in words if word.startswith("--")} - known, command


def options_of(name):
    from fused_lwlr.command.group import command

    params = command(name).params
    return {"--help", *(text for param in params for text in (*param.opts, *param.secondary_opts))}
