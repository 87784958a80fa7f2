"""Rows of results, as JSON and as tables, and the options of the commands that measure them.

As a plugin of pytest (`-p bench.rows`) this module selects the tests that run on the device.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def folder(text: str) -> Path:
    """Returns the path of a folder, which is made. Raises an error of argparse if it cannot be made."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}: give another folder") from error
    return Path(text)


OPTIONS: dict[str, dict[str, Any]] = {
    "--quick": {"action": "store_true", "help": "fewer sets and rounds"},
    "--rehearsal": {"action": "store_true", "help": "small tensors on any machine: no measurement"},
    "--out": {"type": folder, "default": RESULTS, "help": "folder for results"},
}


def command(doc: str | None, *names: str) -> argparse.ArgumentParser:
    """Returns the parser of a module's command line, with its first line of documentation and some of `OPTIONS`."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    for name in names:
        parser.add_argument(name, **OPTIONS[name])
    return parser


def show(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Prints a table, each row when it is measured."""
    for line in table(head, rows):
        print(line, flush=True)


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Yields the lines of a table in Markdown."""
    head = tuple(head)
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def write(row: dict[str, Any]) -> None:
    """Prints a row as one line of JSON."""
    print(json.dumps(row), flush=True)


def save(path: Path, content: dict[str, Any]) -> Path:
    """Writes results to a file as JSON, and returns the path of the file."""
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out tests that run elsewhere."""
    kept = [item for item in items if "device" in item.fixturenames or item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
