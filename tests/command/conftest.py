import pytest


@pytest.fixture
def run(command):
    return command
