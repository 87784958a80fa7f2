import pytest
from tiny_run import network, run_of, train


@pytest.fixture
def run():
    made = run_of(network())
    train(made, range(1))
    return made
