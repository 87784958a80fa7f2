"""A run with --loader trains on the batches of that loader; a warning says if its order is not reproducible."""

import dataclasses
import os
import signal
from itertools import islice

import pytest
import torch
from torch.utils.data import TensorDataset

from fused_lwlr.data import Stream, open_data
from fused_lwlr.runs import run as running
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.training import trainer
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.setup import load_data

BASE = Recipe(rates="single", lr=0.02, steps=6, batch_size=32, micro_batch=16, device="cpu", workers=0, log_every=1)
MODULE = """
from dataclasses import replace
from fused_lwlr.data import Split, Stream, open_data

asked = []

def load(data, **options):
    digits = open_data(data, **options)
    inputs, targets = digits.train.inputs, digits.train.targets

    def train(part):
        asked.append((part.start, options["image_size"]))
        for first in range(part.start * 16, part.start * 16 + 64, 16):
            yield inputs[first : first + 16], targets[first : first + 16]

    def val(part):
        yield digits.val.inputs, digits.val.targets

    return replace(digits, train=Stream(len(targets), train), val=Stream(360, val))

def short(data, **options):
    return replace(load(data, **options), val=Stream(400, lambda part: load(data, **options).val.batches(part)))

def by_index(data, **options):
    return open_data(data, **options)

class Pairs(Split):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, wanted):
        return self.images[wanted][:2]

def pairs_by_index(data, **options):
    digits = open_data(data, **options)
    return replace(digits, train=Pairs(digits.train), val=Pairs(digits.val))

def nothing(data, **options):
    return data
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "own_loader.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_run_resumes_at_its_place_in_the_stream(monkeypatch, capsys):
    whole = trainer.Trainer.update

    def update(self):
        whole(self)
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    recipe = dataclasses.replace(BASE, loader="own_loader:load", out="run")
    monkeypatch.setattr(trainer.Trainer, "update", update)
    assert running.run(recipe) == 143
    monkeypatch.setattr(trainer.Trainer, "update", whole)
    assert running.run(recipe) == 0
    from own_loader import asked

    # two passes a step; the batches of a call are four
    assert asked == [(0, 8), (4, 8), (6, 8), (10, 8)]
    told = capsys.readouterr().out
    assert "--loader own_loader:load decides order and augmentation" in " ".join(told.split())
    kinds = [record["kind"] for record in read_records("run/metrics.jsonl")]
    assert (kinds.count("train"), kinds.count("validation")) == (6, 1)


@pytest.mark.parametrize("name", ["by_index", "pairs_by_index"])
def test_images_by_index_lose_nothing(name, capsys):
    assert running.run(dataclasses.replace(BASE, out="plain")) == 0
    capsys.readouterr()
    assert running.run(dataclasses.replace(BASE, loader=f"own_loader:{name}", out="mine")) == 0
    assert "order" not in capsys.readouterr().out
    losses = [[record["loss"] for record in read_records(f"{out}/metrics.jsonl")] for out in ("plain", "mine")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "--loader own_loader:nothing returned str, and not fused_lwlr.data.Splits"),
        ("short", "the loader made 360 images to test, and not 400: each counts once, and one that comes again needs"),
    ],
)
def test_refused_loaders(name, message):
    with pytest.raises(ValueError, match=message):
        running.run(dataclasses.replace(BASE, loader=f"own_loader:{name}", steps=1, out="refused"))


BATCHES = {
    "dict": (lambda x, t: {"images": x, "classes": t}, "a batch of type dict: give a pair, images and classes"),
    "images alone": (lambda x, t: x, "a batch of type Tensor: give a pair"),
    "list": (lambda x, t: (x.tolist(), t), r"images as list: give a tensor of shape \(images, 1, 8, 8\), in float32"),
    "array": (lambda x, t: (x.numpy(), t), r"images as ndarray of shape \(16, 1, 8, 8\) and dtype float32"),
    "float64": (lambda x, t: (x.double(), t), r"images as Tensor of shape \(16, 1, 8, 8\) and dtype torch.float64"),
    "channels last": (lambda x, t: (x.permute(0, 2, 3, 1), t), r"images as Tensor of shape \(16, 8, 8, 1\)"),
    "flat": (lambda x, t: (x.flatten(1), t), r"images as Tensor of shape \(16, 64\)"),
    "in color": (lambda x, t: (x.expand(-1, 3, -1, -1), t), r"images as Tensor of shape \(16, 3, 8, 8\)"),
    "uint8 in gray": (lambda x, t: (x.byte(), t), "uint8 images of 1 channels, but their Split has statistics of 3"),
    "larger": (lambda x, t: (x.repeat(1, 1, 2, 2), t), r"images as Tensor of shape \(16, 1, 16, 16\)"),
    "not square": (lambda x, t: (x[..., :7], t), r"images as Tensor of shape \(16, 1, 8, 7\)"),
    "int32": (lambda x, t: (x, t.int()), r"classes as Tensor of shape \(16,\) and dtype torch.int32: give .* in int64"),
    "list of classes": (lambda x, t: (x, t.tolist()), r"classes as list: give a tensor of shape \(16,\), in int64"),
    "column": (lambda x, t: (x, t[:, None]), r"classes as Tensor of shape \(16, 1\)"),
    "too few": (lambda x, t: (x, t[1:]), r"classes as Tensor of shape \(15,\)"),
    "from 1": (lambda x, t: (x, t + 1), "an image of class 10, but its data set has 10 classes: give"),
    "negative": (lambda x, t: (x, t - 12), "an image of class -"),
}  # fmt: skip


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize(
    # DataLoader makes a tensor of an array
    ("case", "kind"), [(case, kind) for case in BATCHES for kind in ("stream", "by index")[: 2 - (case == "array")]]
)  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused(case, kind, part, number, monkeypatch):
    import own_loader

    change, message = BATCHES[case]

    class Changed(own_loader.Pairs):
        made = 0

        def __getitem__(self, wanted):
            self.made += 1
            pair = super().__getitem__(wanted)
            return change(*pair) if self.made == number else pair

    def bad(data, **options):
        digits = open_data(data, **options)
        images = getattr(digits, part)
        pair = images.inputs[:16], images.targets[:16]
        made = [*[pair] * (number - 1), change(*pair)]
        split = Stream(len(images), lambda asked: iter(made)) if kind == "stream" else Changed(images)
        return dataclasses.replace(digits, **{part: split})

    monkeypatch.setattr(own_loader, "bad", bad, raising=False)
    recipe = dataclasses.replace(BASE, loader="own_loader:bad")
    training = trainer.Trainer(recipe, World(0, 1, torch.device("cpu")), load_data(recipe))
    training.val_batch = 16
    training.prepare_to_resume()
    with pytest.raises(ValueError, match=f"^batch {number}: the loader made {message}"):
        list(islice(training.batches(), number)) if part == "train" else training.evaluate()


@pytest.mark.parametrize("part", ["train", "val"])
def test_images_without_a_class_are_for_tests_alone(part, monkeypatch):
    import own_loader

    def some(data, **options):
        digits = open_data(data, **options)
        images = getattr(digits, part)
        inputs, targets = torch.cat([images.inputs[:16]] * 2), torch.cat([images.targets[:16], torch.full((16,), -1)])
        return dataclasses.replace(digits, **{part: Stream(16, lambda asked: [(inputs, targets)])})

    monkeypatch.setattr(own_loader, "some", some, raising=False)
    recipe = dataclasses.replace(BASE, loader="own_loader:some", micro_batch=None, batch_size=16)
    training = trainer.Trainer(recipe, World(0, 1, torch.device("cpu")), load_data(recipe))
    training.prepare_to_resume()
    if part == "val":
        assert training.evaluate()["model"].count == 16
        return
    with pytest.raises(
        ValueError, match=r"image of class -1, but its data set has 10 classes: give numbers from 0 to 9$"
    ):
        next(training.batches())


IMAGES = torch.zeros(9, 1, 8, 8)
SPLITS = {
    "a data set of torch": (
        {"train": TensorDataset(IMAGES)},
        r"'train' is <.*TensorDataset.*: give a Split or a Stream",
    ),
    "tensors": ({"val": IMAGES}, r"'val' is tensor\(.*: give a Split or a Stream of at least one image"),
    "no images": ({"val": Stream(0, lambda part: [])}, "'val' is <.*Stream.*of at least one image"),
    "count": ({"train": Stream("9", lambda part: [])}, "'train' is <.*Stream.*of at least one image"),
    "plain": ({"plain": IMAGES}, r"'plain' is tensor\(.*, or None"),
    "number of classes": ({"classes": 10}, "'classes' is 10: give a tuple of names, one for each class"),
    "list": ({"classes": list("ab")}, r"'classes' is \['a', 'b'\]: give a tuple"),
    "numbers": ({"classes": (0, 1)}, r"'classes' is \(0, 1\): give a tuple of names"),
    "no classes": ({"classes": ()}, r"'classes' is \(\): give a tuple of names"),
    "channels": ({"channels": 0}, "'channels' is 0: give an int, at least 1"),
    "two sides": ({"image_size": (8, 8)}, r"'image_size' is \(8, 8\): give an int, at least 1"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_refused_splits(case, monkeypatch):
    import own_loader

    fields, message = SPLITS[case]
    bad = lambda data, **options: dataclasses.replace(open_data(data, **options), **fields)  # noqa: E731
    monkeypatch.setattr(own_loader, "bad", bad, raising=False)
    with pytest.raises(ValueError, match=f"--loader own_loader:bad returned Splits whose {message}"):
        load_data(dataclasses.replace(BASE, loader="own_loader:bad"))
