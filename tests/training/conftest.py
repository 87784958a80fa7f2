import pytest
from tiny_run import network, run_of, train

from fused_lwlr.data import open_data


@pytest.fixture(scope="module")
def data():
    return open_data("digits", image_size=8, augmentation="none")


@pytest.fixture
def run():
    made = run_of(network())
    train(made, range(1))
    return made
