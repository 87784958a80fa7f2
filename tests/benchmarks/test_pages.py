"""The results that pages of the site show."""

import itertools
from pathlib import Path

import pytest

# it needs Python 3.11
pytest.importorskip("mkdocs")
from bench import pages

DOCS = Path(__file__).parents[2] / "docs"
MARKED = [name for page in sorted(DOCS.glob("*.md")) for name in pages.MARKER.findall(page.read_text())]


@pytest.mark.parametrize("name", MARKED)
def test_a_marker_stands_for_a_table(name):
    lines = pages.tables(name).splitlines()
    assert lines
    for line, following in itertools.pairwise(lines):
        if line.startswith("|") and following.startswith("|"):
            assert line.count("|") == following.count("|"), line


def test_all_tables_and_studies_are_on_a_page():
    studies = {f"studies/{folder.name}/table" for folder in (pages.RESULTS / "studies").iterdir()}
    assert studies | set(pages.TABLES) <= set(MARKED)


def test_markers_and_links_are_replaced():
    text = "before\n<!-- include: about -->\n![A](../bench/results/a.png)"
    assert (
        pages.on_page_markdown(text, page=None)
        == f"before\n{pages.tables('about')}\n[![A](results/a.png)](results/a.png)"
    )


def test_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        pages.tables("nothing")
