"""What the command line says when something cannot be done."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

EXTRA_CLI = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "PIL": "Pillow"}


@contextmanager
def errors_in_red() -> Iterator[None]:
    """Show what the user can put right as one line (exit code 2); anything else is a bug and keeps its traceback."""
    try:
        yield
        return
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_CLI:
            raise
        message, code = f"{EXTRA_CLI[error.name]} is not installed: pip install 'fused_lwlr[cli]'", 2
    except (ImportError, OSError, ValueError) as error:
        message, code = str(error), 2
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            message += ": make room on the disk, and type the command again"
    except RuntimeError as error:
        import torch

        from fused_lwlr.training.loop import DivergedError

        if isinstance(error, torch.OutOfMemoryError):
            message, code = f"{str(error).splitlines()[0]} Take fewer images at a time (train: --micro-batch)", 2
        elif isinstance(error, DivergedError):
            message, code = str(error), 1
        else:
            raise
    Console(stderr=True).print(Text(f"Error: {message}", style="red"), soft_wrap=True)
    raise typer.Exit(code)
