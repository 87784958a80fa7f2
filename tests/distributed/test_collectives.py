"""How often processes talk in a step."""

import pytest
import torch
import torch.distributed as dist
from collectives import counted
from sharding import mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.ranks(4)


def test_what_counts_counts():
    with counted() as talk:
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        dist.all_gather([torch.ones(1) for _ in range(4)], torch.ones(1))
    assert talk.calls == [("all_reduce", (torch.float64, 2)), ("all_gather", None)]
    assert talk.total == 2
    with counted() as talk:
        # past the functions that users call
        distribute_tensor(torch.ones(4), mesh(4), [Shard(0)]).full_tensor()
    assert talk.total == 2
    with counted() as talk:
        torch.ones(1)
    assert (talk.calls, talk.total) == ([], 0)
