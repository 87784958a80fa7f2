"""A process group of one process, for models that several processes share."""

import pytest
import torch.distributed as dist


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
