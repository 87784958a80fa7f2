"""Loads `setting.py`, except in the process that hands the tests to others, which needs no torch."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if not config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("setting")
