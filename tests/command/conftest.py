import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small gain nothing from a second thread, and lose much when the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
