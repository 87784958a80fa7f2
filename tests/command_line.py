"""The command of the library in this process."""

from typer.testing import CliRunner

from fused_lwlr.command.main import app


def run(line, code=0):
    """The result of a line, which ends with this exit code; an exception without an answer is raised."""
    result = CliRunner().invoke(app, line.split(), prog_name="fused-lwlr")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
