"""The notebooks of the documentation run from their first cell to their last."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def read(path):
    return pytest.importorskip("nbformat").read(path, 4)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["calibrate", "telemetry"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_were_executed(path):
    """In order, without an error, with pictures that are small."""
    notebook = read(path)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert {output.output_type for output in outputs(notebook)} == {"stream", "execute_result"}
    assert {output.name for output in outputs(notebook) if output.output_type == "stream"} == {"stdout"}
    assert path.stat().st_size < 300_000


@pytest.mark.long
# raised by the kernel's event loop and sockets
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    """The notebook prints the same number of lines, and draws the same number of pictures, as the committed one."""
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    committed, notebook = read(path), read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    def kinds(notebook):
        # the output of one cell may come in several pieces
        return [
            (
                sum(output.text.count("\n") for output in cell.outputs if output.output_type == "stream"),
                [sorted(output.data) for output in cell.outputs if output.output_type != "stream"],
            )
            for cell in notebook.cells
            if cell.cell_type == "code"
        ]

    assert kinds(notebook) == kinds(committed)
