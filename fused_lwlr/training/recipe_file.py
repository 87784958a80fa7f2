"""Options of a training from a file."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def read_recipe(file: str | Path) -> dict[str, Any]:
    """The fields of a TOML or YAML file, not checked; hyphens in names count as underscores, ~ is the home folder.

    The recipe of a run has the folder where it is now as `out`, so that a run that was moved continues there.
    """
    path = Path(file)
    if path.suffix not in (".toml", ".yaml", ".yml"):
        of_run = f"; a run's is {path / 'recipe.toml'}" if path.is_dir() else ""
        raise ValueError(f"--config {path}: must end in .toml, .yaml, .yml{of_run}")
    if not path.is_file():
        raise FileNotFoundError(f"--config {path}: there is no such file")
    # a run writes recipe.toml with the names of its folders, which may be any bytes; an editor may put a mark first
    fields = _parsed(path, path.read_text(encoding="utf-8-sig", errors="surrogateescape"))
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ValueError(f"--config {path}: must be a table of options, such as 'batch_size'")
    for name in fields:
        if "-" in name and name.replace("-", "_") in fields:
            raise ValueError(f"--config {path} has {name} twice, also with underscores: give it once")
    if path.name == "recipe.toml" and (path.parent / "run.json").exists():
        fields["out"] = str(path.parent)
    return {
        name.replace("-", "_"): os.path.expanduser(value) if isinstance(value, str) else value
        for name, value in fields.items() if value is not None
    }  # fmt: skip


def _parsed(path: Path, text: str) -> Any:
    parse: Any = tomllib.loads
    errors: tuple[type[Exception], ...] = (ValueError, RecursionError)
    if path.suffix != ".toml":
        try:
            import yaml
        except ImportError as error:
            raise ImportError(f"--config {path} needs PyYAML: pip install pyyaml, or write it as TOML") from error
        parse, errors = yaml.safe_load, (yaml.YAMLError, *errors)  # ValueError: a date that does not exist
    try:
        content = parse(text)
        if path.suffix != ".toml" and isinstance(content, dict):
            names = [name.value for name, _ in yaml.compose(text).value]
            for name in names:
                if names.count(name) > 1:  # the last value would count
                    raise ValueError(f"{name} is given twice: give it once")
        return content
    except errors as error:
        if any("\udc80" <= letter <= "\udcff" for letter in text):
            raise ValueError(f"--config {path} is not UTF-8: convert it") from error
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from error
