"""`python -m bench`."""

from bench.cli import app

if __name__ == "__main__":
    app()
