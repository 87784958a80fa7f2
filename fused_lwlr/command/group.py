"""The group of commands: help that fits a narrow terminal, and errors as one line in terms of the command line."""

import errno
import functools
import importlib
import io
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from fused_lwlr.training.recipe_rules import OTHER_WORDS

COMMANDS = {
    "calibrate": ("calibrate", "Measure the learning-rate multiplier of every layer of a model."),
    "demo": ("study", "Show the effect of the methods on small Transformers, in minutes."),
    "train": ("train", "Train a model, small or of ImageNet's size."),
    "report": ("report", "Write the report of a run, as one HTML file."),
    "study": ("study", "Reproduce a figure or table of a paper."),
}
"""Name -> the module with the function of this name, imported on use; and its description."""

EXTRA_CLI = ("filelock", "jinja2", "matplotlib", "pandas", "PIL", "pydantic", "scipy", "seaborn", "sklearn", "tomli")
"""The modules of the extra `cli`, except typer."""
PACKAGES = {"PIL": "Pillow", "sklearn": "scikit-learn"}
"""The packages of modules that have another name."""
GIVE_WAY = 10
"""Seconds that ranks other than the first wait before they print an error: the first may print the same one."""
TOO_LARGE = re.compile("can't allocate memory|Storage size calculation overflowed")
"""The messages of torch for a tensor that does not fit in memory."""
LEFT = re.compile("Connection (closed|reset) by peer")
"""The message of gloo when another process has ended."""
INSTALL = "pip install '.[cli]' in the folder of the sources of fused_lwlr"
UsageError: Any = typer.BadParameter.__mro__[1]
"""The class of click, or of its copy in newer versions of typer."""


class Command(TyperCommand):
    """A command whose help shows options under headings. A value that begins with ~ is a path in the home folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # shells replace ~ in `--out ~/x` alone, and not in --out=~/x
        split = [re.fullmatch(r"(--[\w-]+=|)(.*)", arg, re.DOTALL) for arg in args]
        return super().parse_args(ctx, [found[1] + os.path.expanduser(found[2]) for found in split if found])

    def sections(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Returns heading -> its options, each with its help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            title = "Arguments" if param.param_type_name == "argument" else "Options"
            if record is not None:
                sections.setdefault(getattr(param, "rich_help_panel", None) or title, []).append(record)
        return sections

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, records in self.sections(ctx).items():
            with formatter.section(title):
                formatter.write_dl(records)


@functools.cache
def command(name: str) -> Any:
    """A command of `COMMANDS`."""
    module = importlib.import_module(f"fused_lwlr.command.{COMMANDS[name][0]}")
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]}
    )  # fmt: skip
    app.command(name, cls=Command)(getattr(module, name))
    return typer.main.get_command(app)


class Group(TyperGroup):
    """All commands.

    Errors that the user can correct are shown as one line, with exit code 2, and a diverged training with 1. Any
    other error is a bug, and keeps its traceback.
    """

    def __init__(self, **options: Any) -> None:
        # typer lists and suggests these names; `get_command` imports the commands
        super().__init__(**options | {"commands": dict.fromkeys(COMMANDS)})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def main(self, *args: Any, **options: Any) -> NoReturn:
        """Run a command, and end the process."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            # names of files, or η, that the terminal cannot show
            sys.stdout.reconfigure(errors="replace")
        try:
            code = super().main(*args, **options | {"standalone_mode": False}) or 0
        except Exception as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
                raise SystemExit(2) from None
            typed = args[0] if args else options.get("args")
            message, code = self._message(error, sys.argv[1:] if typed is None else typed)
            if os.environ.get("LOCAL_RANK", "0") != "0":
                # the first process of the machine may show the same error, and then torchrun ends this process
                time.sleep(GIVE_WAY)
            Console(stderr=True).print(Text(f"Error: {message}", style="red"), soft_wrap=True)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # threads of gloo may abort one of several processes while Python shuts down
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        raise SystemExit(code)

    def _message(self, error: Exception, typed: Sequence[str]) -> tuple[str, int]:
        """The line for an error, and the exit code; a bug is raised again."""
        if isinstance(error, UsageError):
            return self._usage(error, typed), 2
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRA_CLI:
            return f"{PACKAGES.get(error.name, error.name)} is not installed: {INSTALL}", 2
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{error}: make room on the disk, and type the command again", 2
        if isinstance(error, OSError) and error.errno in (errno.EAGAIN, errno.EMFILE) and error.filename is None:
            return f"{error}: start fewer processes (train: --workers, study: --jobs), or raise the limits (ulimit)", 2
        if isinstance(error, OSError) and error.filename is not None:
            return f"{error.filename}: {error.strerror}", 2
        if isinstance(error, (OSError, ValueError)) or type(error) is ImportError:
            return self._in_options(str(error)), 2
        kind = type(error).__name__
        if kind == "OutOfMemoryError" or (isinstance(error, RuntimeError) and TOO_LARGE.search(str(error))):
            line = str(error).splitlines()[0].rstrip(". ")
            return f"{line}. Take fewer images at a time (train: --micro-batch), or smaller ones", 2
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker"):
            line = str(error).splitlines()[0].rstrip(". ")
            return f"{line}: if memory ran out, take fewer of them (train: --workers) and type the command again", 2
        if os.environ.get("WORLD_SIZE", "1") != "1" and isinstance(error, RuntimeError) and LEFT.search(str(error)):
            return "another process of the training ended: its message, or that of torchrun, has the reason", 1
        if kind in ("DivergedError", "JobError"):
            return self._in_options(str(error)), 1
        raise error

    def _in_options(self, message: str) -> str:
        """A message of the library with command-line spelling: --batch-size 0 instead of batch_size=0."""
        params = [param for name in COMMANDS for param in command(name).params]
        options = {param.name: param.opts[0] for param in params if param.opts[0].startswith("--")}
        names = "|".join(sorted(options, key=len, reverse=True))
        spaced = "|".join(name for name in options if "_" in name)
        message = re.sub(
            rf"(?<![\w.-])(?<!--set )({names})=(?:'([^'\n]+)'|\(([^()\n]+)\)|([^\s,;:')]+))",
            lambda m: f"{options[m[1]]} {m[2] or (m[3] or '').replace(', ', ',') or m[4]}",
            message,
        )
        return re.sub(rf"(?<![\w./'-])(?<!--set )({spaced})\b", lambda m: options[m[1]], message)

    def _usage(self, error: Any, typed: Sequence[str]) -> str:
        """The parser's message, with the value that it refuses, or the name that the option has here."""
        option = next((opt for opt in getattr(getattr(error, "param", None), "opts", ()) if opt in typed), None)
        if option is not None and isinstance(error, typer.BadParameter):
            value = next(iter(typed[typed.index(option) + 1 :]), "")
            return f"{option} {value}: {error.message.rstrip('.')}"
        here = OTHER_WORDS.get(getattr(error, "option_name", ""))
        if here is not None and any(here in param.opts for param in error.ctx.command.params):
            return f"{error.message}. Did you mean {here}?"
        needed = getattr(getattr(error, "param", None), "help", None) if "Missing" in type(error).__name__ else None
        return str(error.format_message()).rstrip(".") + (f": {needed}" if needed else "")
