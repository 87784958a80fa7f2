"""Host time of single calls, for comparison with earlier runs; ratios are taken by `bench.host`, in turns.

CUDA_VISIBLE_DEVICES= python -m pytest bench --benchmark-autosave --benchmark-compare
"""

import pytest
import torch

from bench import host
from bench.without_launch import without_launch
from fused_lwlr.layers import named_layers
from fused_lwlr.statistics import StatisticsPass


@pytest.fixture(autouse=True)
def _no_launch():
    torch.set_num_threads(1)
    with without_launch():
        yield


@pytest.mark.parametrize("count", host.COUNTS)
@pytest.mark.parametrize("who", host.COLUMNS)
@pytest.mark.parametrize("name", host.OPTIONS)
def test_step(benchmark, name, who, count):
    """A step with the gradients of the one before."""
    optimizer = host.contestants(name, count)[who]
    optimizer.step()
    benchmark(optimizer.step)


@pytest.mark.parametrize("count", host.COUNTS)
@pytest.mark.parametrize("name", host.OPTIONS)
def test_first_step(benchmark, name, count):
    """Which builds state and tables."""
    benchmark.pedantic(
        lambda optimizer: optimizer.step(), setup=lambda: ((host.contestants(name, count)["ours"],), {}), rounds=5
    )


@pytest.mark.parametrize("count", host.COUNTS)
def test_statistics(benchmark, count):
    """Of all layers, with tables that are kept."""
    statistics = StatisticsPass(named_layers(host.parameters(count)), "triton")
    benchmark(statistics)
