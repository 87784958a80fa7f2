"""Strides, alignment and gaps: results must not depend on the memory layout."""

import pytest
import torch
from tables import COLUMNS, HYPER, RULES, equal, having, make, twin
from tolerances import STATISTICS, same

from fused_lwlr.kernels import Row, triton

POISON = float("nan")
SHAPE = (4, 6, 5, 7)
OPERATIONS = ("sgd", "adamw", "statistics")


def layouts(tensor):
    """The same numbers in every layout: name -> (memory, view of the numbers in it). All else is poison."""

    def within(size, view):
        memory = tensor.new_full(size, POISON)
        view(memory).copy_(tensor)
        return memory, view(memory)

    a, b, c, d = tensor.shape
    yield "contiguous", within((a, b, c, d), lambda m: m)
    yield "channels_last", within((a, c, d, b), lambda m: m.permute(0, 3, 1, 2))
    yield "transposed", within((d, c, b, a), lambda m: m.permute(3, 2, 1, 0))
    yield "every other column", within((a, b, c, 2 * d), lambda m: m[..., ::2])
    yield "every third row", within((3 * a, b, c, d), lambda m: m[1::3])
    yield "inner rows", within((a, b, c + 2, d), lambda m: m[:, :, 1:-1])
    for offset in (1, 2, 3, 5):
        yield f"shifted by {offset}", within((offset + tensor.numel(),), lambda m: m[offset:].view(tensor.shape))  # noqa: B023


LAYOUTS = [name for name, _ in layouts(torch.zeros(SHAPE))]


def put(table, names, layout):
    """The table with some columns laid out, and the memory around each."""
    found = {name: dict(layouts(table.columns[name][0]))[layout] for name in names}
    return having(table, **{name: [laid_out] for name, (_, laid_out) in found.items()}), [m for m, _ in found.values()]


def run(operation, table):
    """The operation's result, or None; the reference is the same kernel on plain tensors."""
    return triton.step(RULES[operation], table, HYPER[operation]) if operation in RULES else triton.statistics(table)


def compare(operation, table, plain):
    results = run(operation, table), run(operation, plain)
    if operation == "statistics":
        # a row is summed in the storage order of its parameter
        magnitudes = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0], device=results[0].device) * results[1][:, :1]
        assert ((results[0] - results[1]).abs() <= STATISTICS * magnitudes).all()
    equal(table, plain, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("operation", "column"), [(o, c) for o in OPERATIONS for c in COLUMNS[o]])
def test_one_column_laid_out_otherwise(operation, column, layout, dtype, device):
    table = make(operation, [SHAPE], dtype, device)
    plain = twin(table)
    table, (memory,) = put(table, [column], layout)
    gaps = memory.isnan().sum()
    compare(operation, table, plain)
    assert memory.isnan().sum() == gaps == memory.numel() - table.columns[column][0].numel()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", ["sgd", "adamw"])
def test_all_columns_laid_out_alike(operation, layout, device):
    table = make(operation, [SHAPE], torch.float32, device)
    plain = twin(table)
    table, memories = put(table, COLUMNS[operation], layout)
    compare(operation, table, plain)
    assert all(m.isnan().sum() == m.numel() - table.columns["param"][0].numel() for m in memories)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", ["sgd", "adamw"])
def test_slices_of_any_layout(operation, layout, device):
    rows = [Row(0, 0, 1, 0.5), Row(0, 1, 3, 2.0), Row(0, 3, 4)]
    table = make(operation, [SHAPE], torch.float32, device, rows)
    plain = twin(table)
    table, (memory,) = put(table, ["param"], layout)
    compare(operation, table, plain)
    assert memory.isnan().sum() == memory.numel() - table.columns["param"][0].numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_of_slices_of_any_layout(layout, device):
    table = make("statistics", [SHAPE], torch.float32, device, [Row(0, 0, 1), Row(0, 1, 4)])
    plain = twin(table)
    table, _ = put(table, ["grad", "param"], layout)
    compare("statistics", table, plain)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_expanded_gradient(operation, device):
    table = make(operation, [(6, 50)], torch.float32, device)
    assert table.accept_gradients([table.columns["grad"][0][:1].expand(6, 50)])
    compare(operation, table, twin(table))
    assert table.columns["grad"][0].stride() == (0, 1)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_by_one_convolution(operation, device):
    # torch gives such weights either kind of strides; both walk memory in the same order
    table = make(operation, [(8, 16, 1, 1)], torch.float32, device)
    plain = twin(table)
    grad = table.columns["grad"][0]
    assert table.accept_gradients([torch.empty_strided(grad.shape, (16, 1, 16, 16), device=device).copy_(grad)])
    compare(operation, table, plain)


@pytest.mark.parametrize("operation", ["sgd", "adamw"])
@pytest.mark.parametrize("numel", [1, 3, 4, 1023, 1024, 1025, 2048])
def test_neighbours_in_one_buffer_are_untouched(operation, numel, device):
    table = make(operation, [(numel,)], torch.float32, device)
    plain = twin(table)
    buffers = {name: torch.full((numel + 16,), POISON, device=device) for name in table.columns}
    for name, buffer in buffers.items():
        buffer[4 : 4 + numel] = table.columns[name][0]
    table = having(table, **{name: [buffer[4 : 4 + numel]] for name, buffer in buffers.items()})
    compare(operation, table, plain)
    assert all(buffer.isnan().sum() == 16 for buffer in buffers.values())
