"""The device image of a table: tiles of huge tensors, stale addresses, and the data uploaded in each step."""

import importlib
import sys
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tables import ADAMW, HYPER, SGD, after, agree, make, sgd_hyper, uniform

from fused_lwlr import NormalizedGradient
from fused_lwlr.kernels import Row, Table, triton
from fused_lwlr.kernels.triton.device_table import DeviceTable
from fused_lwlr.kernels.triton.hyper_rows import HyperRows
from fused_lwlr.kernels.triton.work import tile_list

# the modules: the package exports functions of these names
step, device_table, launch = (
    importlib.import_module(f"fused_lwlr.kernels.triton.{name}") for name in ("step", "device_table", "launch")
)
BLOCK = 1024


@pytest.mark.parametrize(
    ("numel", "block"),
    [
        ([7, 2**31 + 5, 0, 10**9], BLOCK),
        *((numel, 16 * BLOCK) for numel in ([2**31 + 5], [10**9], [7, 2**31 + 5, 0, 10**9], [2**31, 1], [2**33])),
    ],
)
def test_tiles_of_huge_tensors(numel, block):
    tiles = tile_list(np.array(numel, dtype=np.int64), block)
    assert tiles.dtype == np.int32
    for row, size in enumerate(numel):
        index = np.sort(tiles[tiles[:, 0] == row, 1].astype(np.int64))
        # consecutive from 0, and the last one is the first to reach the end: covered exactly once
        assert (index == np.arange(len(index))).all()
        assert len(index) * block >= size > (len(index) - 1) * block or size == len(index) == 0


@pytest.mark.parametrize("numel", [[0], [0, 0, 5], [BLOCK, 0, BLOCK + 1], []])
def test_tiles_of_empty_rows(numel):
    sizes = np.array(numel, dtype=np.int64)
    assert len(tile_list(sizes, BLOCK)) == sum(-(-n // BLOCK) for n in numel)
    assert len(tile_list(sizes, BLOCK, short_first=True)) == len(tile_list(sizes, BLOCK))


@pytest.mark.gpu
def test_beyond_int32_offsets(device):
    numel = 2**31 + 5
    param = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    table = Table({"param": [param], "grad": [torch.ones_like(param)], "momentum_buffer": [None]})
    triton.step(SGD, table, [sgd_hyper(lr=0.5)])
    assert (table.columns["param"][0][-2048:] == -0.5).all()
    assert (table.columns["param"][0][:2048] == -0.5).all()
    assert triton.statistics(table)[0, 0] == numel


def test_gradient_at_another_address(device):
    table = make("sgd", [(5,), (40, 3)], torch.float32, device)
    keep = []
    for _ in range(3):
        agree("sgd", table, HYPER["sgd"])
        keep.append(table.columns["grad"])
        assert table.accept_gradients([uniform(p.shape, p.dtype, device) for p in table.columns["param"]])


def test_gradient_at_the_same_address_with_other_strides(device):
    table = make("sgd", [(6, 10)], torch.float32, device)
    memory = uniform((60,), torch.float32, device)
    for view in (memory.view(6, 10), memory.view(10, 6).T, memory[:10].expand(6, 10), memory.view(6, 10)):
        assert table.accept_gradients([view])
        assert view.data_ptr() == memory.data_ptr()
        agree("sgd", table, HYPER["sgd"])


@pytest.mark.parametrize("counts", [(1, 3, 2), (3, 1), (2, 2, 1)])
def test_number_of_hyper_rows_changes(counts, device):
    table = make("adamw", [(5,), (40,), (3, 4)], torch.float32, device)
    for step, count in enumerate(counts, 1):
        table.hyper_index = [i % count for i in range(3)]
        agree("adamw", after(table, step), [ADAMW._replace(lr=0.01 * (i + 1)) for i in range(count)])


def refreshed(table, columns, numbers):
    found = table.device_tables.setdefault(columns, DeviceTable(table, columns, numbers.values.shape, tile=4))
    found.refresh(table, numbers)
    return found


def test_one_upload_has_all_of_it(device, monkeypatch):
    table = make("sgd", [(5,), (40, 3), (7,)], torch.float32, device)
    numbers = HyperRows(np.float32([[0.1, 0.2]]), np.zeros((2, 3), np.float32), False, 0)
    columns = ("param", "grad", "momentum_buffer")
    found, sizes = refreshed(table, columns, numbers), []
    module = sys.modules["fused_lwlr.kernels.triton.upload"]
    copy_async_ = module.copy_async_
    monkeypatch.setattr(
        module, "copy_async_", lambda device, host: sizes.append(len(host)) or copy_async_(device, host)
    )
    for change, more in [
        (lambda: table.accept_gradients([t.clone() for t in table.columns["grad"]]), {}),
        (lambda: None, {"values": np.float32([[0.3, 0.2]])}),
        (lambda: None, {"coefficients": np.arange(6, dtype=np.float32).reshape(2, 3)}),
        (lambda: setattr(table, "hyper_index", np.array([0, 0, 1])), {}),
    ]:
        change()
        before = found.buffer.clone()
        assert refreshed(table, columns, numbers._replace(**more)) is found
        assert not torch.equal(found.buffer, before)
        assert torch.equal(found.buffer.cpu(), torch.from_numpy(found._upload.host))
    assert sizes == [len(found.buffer)] * 4


def test_tiles_with_fewer_elements_come_first():
    """Their loops take longest, so no program must start one last."""
    items = tile_list(np.array([10, 3, 0, 8]), 4, short_first=True)
    assert items.tolist() == [[0, 2], [1, 0], [0, 0], [0, 1], [3, 0], [3, 1]]
    assert tile_list(np.array([5, 0, 3]), 4).tolist() == [[0, 0], [0, 1], [2, 0]]


def test_every_launch_keeps_its_memory(monkeypatch):
    """Tables that were made on one stream may be freed while a launch on another stream still reads them.

    The results of a launch and the scratch tensors of gradients with other strides are memory too.
    """
    table = make("sgd", [(5,), (4, 3)], torch.float32, torch.device("cpu"), [Row(0, scaled=True), Row(1, scaled=True)])
    plain = [uniform(shape, torch.float32, "cpu") for shape in ((5,), (4, 3))]
    wide = [plain[0], uniform((4, 6), torch.float32, "cpu")[:, ::2]]
    kept, used, make_arguments = [], [], launch._arguments

    def arguments(*args):
        found = make_arguments(*args)
        used.append({t.untyped_storage().data_ptr() for t in found if isinstance(t, torch.Tensor)})
        return found

    monkeypatch.setattr(launch, "_arguments", arguments)
    monkeypatch.setattr(
        launch, "record_streams", lambda of: kept.append({t.untyped_storage().data_ptr() for t in of.memory()})
    )
    # both have the same width, so that the device table stays
    first = NormalizedGradient().factor_formula(SGD)
    second = first._replace(target="decayed")
    for grads, scale in (
        (plain, None), (plain, first), (plain, second), (plain, first),
        (wide, first), ([None, plain[1]], first), ([None, plain[1]], None),
    ):  # fmt: skip
        assert table.accept_gradients(grads)
        step.step(SGD, table, HYPER["sgd"], scale)
        assert used[-1] <= kept[-1]
        if grads is wide:
            scratch = next(iter(table.device_tables.values()))._scratch["grad"][1]
            assert scratch.data_ptr() in kept[-1]
    assert len(kept) == 7
    sums = triton.statistics(table, weight=False)
    assert used[-1] - {sums.untyped_storage().data_ptr()} <= kept[-1]


def test_memory_is_kept_by_the_allocator_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    here, there = Mock(is_cuda=False), Mock(is_cuda=True, device="cuda:1")
    launch.record_streams(Mock(buffer=here, memory=lambda: [here]))
    launch.record_streams(Mock(buffer=there, memory=lambda: [there]))
    here.record_stream.assert_not_called()
    there.record_stream.assert_called_once_with("stream of cuda:1")


@pytest.mark.gpu
def test_memory_of_a_table_outlives_a_launch_on_another_stream():
    """The memory is freed while the other stream sleeps, and must not be reused by the next allocation.

    It is freed at once, without the garbage collector, which may take longer than the sleep.
    """
    table = make("sgd", [(1000,)], torch.float32, torch.device("cuda"))
    step.step(SGD, table, HYPER["sgd"])
    torch.cuda.synchronize()
    address = next(iter(table.device_tables.values())).buffer.data_ptr()
    size = next(iter(table.device_tables.values())).buffer.numel()
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)
        step.step(SGD, table, HYPER["sgd"])
        done.record()
    freed = weakref.ref(next(iter(table.device_tables.values())))
    table.device_tables.clear()
    assert freed() is None
    other = torch.zeros(size, dtype=torch.int64, device="cuda")
    assert not done.query(), "the sleep ended before the allocation"
    assert other.data_ptr() != address
    # the columns belong to this test, which may not free them before the step
    done.synchronize()
