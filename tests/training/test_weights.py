"""Files of weights: written whole, and loaded only into the same model."""

import errno

import pytest
import torch
from torch import nn

from fused_lwlr.training.weights import load_weights, save_weights


def net(*sizes, dtype=torch.float32):
    return nn.Sequential(*(nn.Linear(a, b) for a, b in sizes), nn.BatchNorm1d(2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_weights_are_loaded_in_the_dtype_of_the_model(dtype, tmp_path):
    saved, model = net((3, 4), (4, 2), dtype=dtype), net((3, 4), (4, 2))
    save_weights(saved, tmp_path / "a.pt")
    load_weights(str(tmp_path / "a.pt"), model)
    for name, value in model.state_dict().items():
        expected = saved.state_dict()[name]
        assert torch.equal(value, expected.to(value.dtype)), name
    assert model[0].weight.dtype == torch.float32


WRONG = {
    "nothing": (None, FileNotFoundError, "there is no such file; give a file such as model.pt of a run"),
    "text": (b"no weights", ValueError, "cannot be read: "),
    "list": ([1], ValueError, "does not hold tensors by name: give a file such as model.pt of a run"),
    "empty": ({}, ValueError, "does not hold tensors by name"),
    "checkpoint": ({"model": {"a": torch.ones(1)}}, ValueError, "does not hold tensors by name"),
    "shape": (
        net((3, 4), (4, 2)).state_dict(),
        ValueError,
        r"is for another model: 0\.weight is \(4, 3\) float32 there",
    ),
    "name": (net((3, 2)).state_dict(), ValueError, "is for another model: "),
}


@pytest.mark.parametrize("kind", WRONG)
def test_other_files_are_refused(kind, tmp_path):
    content, error, message = WRONG[kind]
    path = tmp_path / "a.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    model = net((3, 5), (5, 2))
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(error, match=rf"^--weights {path}:? {message}"):
        load_weights(str(path), model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))


def test_a_full_disk_is_an_error_of_the_system(tmp_path, monkeypatch):
    """torch.save reports it as a RuntimeError."""

    def full(content, file):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        finally:
            raise RuntimeError("unexpected pos")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left on device"):
        save_weights(net((3, 2)), tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())
