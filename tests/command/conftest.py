import pytest
from typer.testing import CliRunner

from fused_lwlr.command.main import app


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command in an empty folder, with a terminal wide enough not to break lines."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(line, code=0):
        result = CliRunner().invoke(app, line.split(), prog_name="fused-lwlr")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run
