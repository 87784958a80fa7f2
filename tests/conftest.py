"""Where the tests run: on the GPU where there is one, else through Triton's interpreter."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # read once, when triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not HAS_GPU:
        pytest.skip("needs a GPU")
