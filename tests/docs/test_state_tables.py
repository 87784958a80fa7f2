"""The tables of docs/precision.md with bytes of state, computed from `optimizer.state`."""

import re
from pathlib import Path

import pytest
import torch

import fused_lwlr
from fused_lwlr import public

PAGE = (Path(__file__).parents[2] / "docs" / "precision.md").read_text()
HEADS = {
    "SGD": (fused_lwlr.SGD, {}),
    "SGD, momentum": (fused_lwlr.SGD, {"momentum": 0.9}),
    "AdamW": (fused_lwlr.AdamW, {}),
    "AdamW, amsgrad": (fused_lwlr.AdamW, {"amsgrad": True}),
    "Lion": (fused_lwlr.Lion, {}),
}


def rows_of(first_head):
    """The rows of the table with this first head, as texts and numbers."""
    table = re.search(rf"^\| {first_head} \|(.*)\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert [head.strip() for head in table[1].strip("|").split("|")] == list(HEADS)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2].splitlines()]
    return [(row[0], list(map(int, row[1:]))) for row in rows]


def measured(text, dtype, device):
    """Bytes of state, for each optimizer: of entries with an element for each parameter, and of all others."""
    code = re.search("`(.*)`", text)
    options = eval(f"dict({code[1]})", {"torch": torch, **vars(public)}) if code else {}
    found = []
    for cls, own in HEADS.values():
        param = torch.nn.Parameter(torch.randn(8, 16, dtype=dtype, device=device))
        optimizer = cls([param], lr=0.1, backend="torch", **own, **options)
        param.grad = torch.ones_like(param)
        optimizer.step()
        state = optimizer.state[param].values()
        large = sum(value.nbytes for value in state if value.shape == param.shape)
        found.append((large // param.numel(), sum(value.nbytes for value in state if value.shape != param.shape)))
    return found


@pytest.mark.parametrize(("text", "told"), rows_of("Parameters and options"))
def test_bytes_of_a_parameter(text, told, device):
    dtype = getattr(torch, text.partition(",")[0])
    assert [large for large, _ in measured(text, dtype, device)] == told
    if dtype == torch.bfloat16:
        assert [large for large, _ in measured(text, torch.float16, device)] == told


@pytest.mark.parametrize(("text", "told"), rows_of("Options"))
def test_bytes_of_a_tensor(text, told, device):
    assert [small for _, small in measured(text, torch.bfloat16, device)] == told


@pytest.mark.parametrize("text", ["`clip_global_norm=1.0`", "`scaling=ClipByLayer(1.0)`", "`scaling=RadialBrake()`"])
def test_options_without_state(text, device):
    assert measured(text, torch.float32, device) == measured("none", torch.float32, device)
