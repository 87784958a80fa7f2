"""The command `fused-lwlr`."""

from typing import Annotated

try:
    import typer
except ModuleNotFoundError:
    raise SystemExit(
        "fused-lwlr needs typer: pip install '.[cli]' in the folder of the sources of fused_lwlr"
    ) from None

from fused_lwlr.command.group import Group

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def main() -> None:
    """Run the command line."""
    app(prog_name="fused-lwlr")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

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

    Start with fused-lwlr demo: it trains small Transformers on text, which
    takes about four minutes on two cores.
    """
