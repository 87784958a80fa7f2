"""Batches of other loaders: the calls to a loader, resumption, and refusals."""

import pytest
import torch

from fused_lwlr.data import MicroBatchSampler, Part, Stream, loader_throughput, train_batches, val_batches
from fused_lwlr.data.decode import RGB_MEAN, RGB_STD
from fused_lwlr.data.sources import Tensors
from fused_lwlr.data.streams import imported

CPU = torch.device("cpu")


def numbered(first, count, size=3):
    return [(torch.full((size, 3, 4, 4), float(i)), torch.full((size,), i)) for i in range(first, first + count)]


def test_a_stream_that_ends_is_called_again():
    asked = []

    def epochs_of_four(part):
        asked.append(part)
        return numbered(part.start, 4 - part.start % 4)

    sampler = MicroBatchSampler(100, seed=5, batch_size=12, micro_batch=3, steps=6, world_size=2, rank=1, start_step=1)
    found = list(train_batches(Stream(100, epochs_of_four), sampler, device=CPU, workers=7))
    assert [int(batch.targets[0]) for batch in found] == list(range(2, 12))
    assert {tuple(batch.inputs.shape) for batch in found} == {(3, 3, 4, 4)}
    assert [part.start for part in asked] == [2, 4, 8]
    assert asked[0] == Part(batch_size=3, start=2, seed=5, rank=1, world_size=2, device=CPU, workers=7)


def test_validation_goes_through_its_part_once():
    asked = []

    def batches(part):
        asked.append(part)
        return [*numbered(0, 2), (torch.zeros(1, 3, 4, 4), torch.tensor([-1]))]

    found = list(val_batches(Stream(6, batches), batch_size=3, device=CPU, workers=2, world_size=3, rank=2))
    assert [len(batch.targets) for batch in found] == [3, 3, 1]
    assert asked == [Part(batch_size=3, start=0, seed=0, rank=2, world_size=3, device=CPU, workers=2)]


def test_pixels_are_normalized_and_the_rest_is_left_alone():
    def one(pixels):
        sampler = MicroBatchSampler(2, seed=0, batch_size=2, micro_batch=2, steps=1)
        [batch] = train_batches(Stream(2, lambda part: [(pixels, torch.zeros(2).long())]), sampler, device=CPU)
        return batch.inputs

    pixels = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = RGB_MEAN[:, None, None], RGB_STD[:, None, None]
    torch.testing.assert_close(one(pixels) * std + mean, pixels / 255)
    assert torch.equal(one(pixels.float()), pixels.float())


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (numbered(0, 1, size=2), "batch 1: the loader made 2 images and 2 targets, not 3: give every batch the size"),
        ([*numbered(0, 1), (torch.zeros(3, 1), torch.zeros(2))], "batch 2: the loader made 3 images and 2 targets"),
        ([], "the loader made no batch of 3 images"),
    ],
)
def test_batches_that_do_not_fit_are_refused(batches, message):
    sampler = MicroBatchSampler(9, seed=0, batch_size=3, micro_batch=3, steps=5)
    with pytest.raises(ValueError, match=message):
        list(train_batches(Stream(9, lambda part: batches), sampler, device=CPU))


@pytest.mark.parametrize(
    "images", [Stream(9, lambda part: numbered(0, 2)), Tensors(torch.rand(9, 1, 4, 4), torch.arange(9))]
)
def test_each_batch_is_checked(images):
    """As it was loaded: a stream gives pairs, and a split by index `Loaded`."""
    sampler, seen = MicroBatchSampler(9, seed=0, batch_size=3, micro_batch=3, steps=5), []
    found = list(train_batches(images, sampler, device=CPU, check=lambda *batch: seen.append(batch)))
    assert [number for _, number in seen] == [1, 2, 3, 4, 5]
    assert all(torch.equal(batch[0], made.inputs) for (batch, _), made in zip(seen, found, strict=True))
    tested = list(val_batches(images, batch_size=3, device=CPU, check=lambda *batch: seen.append(batch)))
    assert [number for _, number in seen[5:]] == list(range(1, len(tested) + 1))


def test_a_split_by_index_gives_as_many_images_as_it_is_asked_for():
    class Fewer(Tensors):
        def __getitem__(self, wanted):
            found = super().__getitem__(wanted)
            return found.inputs[1:], found.targets[1:]

    sampler = MicroBatchSampler(9, seed=0, batch_size=3, micro_batch=3, steps=1)
    with pytest.raises(ValueError, match="batch 1: the loader made 2 images and 2 targets, not 3: give every batch"):
        list(train_batches(Fewer(torch.rand(9, 1, 4, 4), torch.arange(9)), sampler, device=CPU))


def test_throughput_is_that_of_the_stream():
    assert loader_throughput(Stream(9, lambda part: numbered(0, 4)), batch_size=3, workers=0, batches=5) > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("there", "--loader there is not a function: give module:function"),
        (":f", r"--loader :f cannot be imported \(invalid format: ':f'\): give module:function"),
        ("mine:f", r"--loader mine:f cannot be imported \(No module named 'mine'\)"),
        ("there:f", "module 'there' has no attribute 'f'"),
        ("there:number", "--loader there:number is not a function"),
    ],
)
def test_functions_that_there_are_not(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "there.py").write_text("number = 1\n")
    with pytest.raises(ValueError, match=message):
        imported(name)
