"""The results that pages of the site show."""

import itertools
import re
from pathlib import Path

import pytest

# it needs Python 3.11
pytest.importorskip("mkdocs")
from mkdocs.config import load_config
from mkdocs.structure.files import Files

from bench import pages, report
from bench.targets import judge

DOCS = Path(__file__).parents[2] / "docs"
MACHINES = (pages.CPU, pages.GPU)
MARKED = [name for page in sorted(DOCS.rglob("*.md")) for name in pages.MARKER.findall(page.read_text())]


@pytest.mark.parametrize("name", MARKED)
def test_a_marker_stands_for_a_table(name):
    lines = pages.tables(name).splitlines()
    assert lines
    for line, following in itertools.pairwise(lines):
        if line.startswith("|") and following.startswith("|"):
            assert line.count("|") == following.count("|"), line


def test_all_tables_and_studies_are_on_a_page():
    text = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert set(pages.TABLES) <= set(MARKED)
    for folder in (pages.RESULTS / "studies").iterdir():
        assert f"studies/{folder.name}/table" in text


def test_markers_and_links_are_replaced():
    text = "before\n<!-- include: about -->\n![A](../bench/results/a.png)"
    assert (
        pages.on_page_markdown(text, page=None)
        == f"before\n{pages.tables('about')}\n[![A](results/a.png)](results/a.png)"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("![A](../../bench/results/a.png)", "[![A](../results/a.png)](../results/a.png)"),
        ("[all](../../bench/results/a.md)", "[all](../results/a.md)"),
        ("[both](notebooks/calibrate.ipynb)", "[both](notebooks/calibrate.md)"),
        ("(arXiv:2601.05049)", "([arXiv:2601.05049](https://arxiv.org/abs/2601.05049))"),
        ("(arXiv\n2601.05049, Table 1)", "([arXiv:2601.05049](https://arxiv.org/abs/2601.05049), Table 1)"),
    ],
)
def test_pages_in_folders_and_papers_are_linked(text, shown):
    assert pages.on_page_markdown(text, page=None) == shown


def test_notebooks_are_pages_with_their_output():
    config = load_config(str(DOCS.parent / "mkdocs.yml"))
    # as while a hook runs
    config.plugins._current_plugin = "pages"
    made = {file.src_uri: file for file in pages.on_files(Files([]), config)}
    page = made["notebooks/calibrate.md"].content_string
    assert "rates = fused_lwlr.calibrate(" in page
    assert "first 13 of 72 layers" in page
    assert re.search("layer +kind", page)
    [picture] = re.findall(r"!\[png\]\((.*)\)", page)
    assert made[f"notebooks/{picture}"].content_bytes.startswith(b"\x89PNG")


def test_missed_targets_are_told():
    judged = [target for machine in MACHINES for target in judge(pages.measured(machine))]
    told = pages.tables("missed")
    missed = [target.what for target in judged if target.verdict == "missed"]
    assert len(told.splitlines()) == 2 + len(missed)
    assert all(what in told for what in missed)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_report_of_a_machine_is_made_from_its_results(machine):
    assert (pages.RESULTS / f"bench-{machine}.md").read_text() == report.markdown(pages.measured(machine))


def test_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        pages.tables("nothing")
