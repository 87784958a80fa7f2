"""The command `fused-lwlr`: every command is in a file of its own.

What takes long to import is imported inside the commands, so that --help is quick.
"""

from importlib.metadata import version
from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit("fused-lwlr needs typer, which is not installed: pip install 'fused_lwlr[cli]'") from None

from fused_lwlr.command import balance, calibrate, demo, elr, report, study, train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(calibrate.calibrate)
app.command()(demo.demo)
app.add_typer(elr.app, name="elr")
app.command()(balance.balance)
app.command()(study.study)
app.command()(train.train)
app.command()(report.report)


def main() -> None:
    """Run the command line."""
    app(prog_name="fused-lwlr")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fused-lwlr {version('fused_lwlr')}")
        raise typer.Exit


@app.callback()
def _common(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Layer-wise learning rates (LWLR): measure them for a model, and train with them.

    Each layer gets a multiplier on the learning rate: the smaller its gradient
    is at initialization, the higher.

    Start with [bold]fused-lwlr demo[/bold]: it trains three small models on real images
    in a few minutes.
    """
