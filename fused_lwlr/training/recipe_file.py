"""Options of a training from a file."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def read_recipe(file: str | Path) -> dict[str, Any]:
    """The fields of a TOML or YAML file, not checked; hyphens in names count as underscores."""
    path = Path(file)
    if path.suffix not in READERS:
        raise ValueError(f"--config {path}: must end in {', '.join(READERS)}")
    if not path.is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--config {path} is not UTF-8 ({error.reason}): convert it") from error
    found = READERS[path.suffix](path, text)
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"--config {path}: must be a table of options, such as batch_size")
    for name in found:
        if "-" in name and name.replace("-", "_") in found:
            raise ValueError(f"--config {path} has {name} twice, also with underscores: give it once")
    return {name.replace("-", "_"): value for name, value in found.items() if value is not None}


def _toml(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"--config {path}: {error}") from error


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(f"--config {path} needs PyYAML: pip install pyyaml, or write it as TOML") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from error


READERS: dict[str, Callable[[Path, str], Any]] = {".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
