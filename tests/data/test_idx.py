"""Files in the IDX format, and Fashion-MNIST where it is installed."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from idx_files import NAMES, SIDE, arrays, save

from fused_lwlr.data import MicroBatch, idx, open_data
from fused_lwlr.papers.held_out import MOST, hold_out
from fused_lwlr.training.presets import resolve
from fused_lwlr.training.setup import load_data


def every(images, epoch=0, seed=0):
    loaded = images[MicroBatch(seed, epoch, 0, 0, tuple(range(len(images))))]
    return loaded.inputs, loaded.targets


@pytest.mark.parametrize("compressed", [False, True])
def test_images_are_those_of_the_files(tmp_path, compressed):
    content = save(tmp_path, arrays(), compressed=compressed, dtypes={("train", "labels"): ">i4"})
    data = open_data(f"idx:{tmp_path}", image_size=None, augmentation="none")
    assert data.sizes == {"image_size": SIDE, "channels": 1}
    assert data.classes == ("0", "1", "2")
    for part, images in (("train", data.train), ("train", data.plain), ("test", data.val)):
        inputs, targets = every(images)
        assert torch.equal(inputs[:, 0], torch.from_numpy(content[part, "images"]))
        assert torch.equal(targets, torch.from_numpy(content[part, "labels"]))
    pixels = content["train", "images"] / 255
    assert data.train.statistics[0].item() == pytest.approx(pixels.mean(), rel=1e-6)
    assert data.val.statistics[1].item() == pytest.approx(pixels.std(), rel=1e-6)
    padding = data.val[MicroBatch(0, 0, 0, 0, (3, -1))]
    assert padding.targets.tolist() == [0, -1]
    assert not padding.inputs[1].any()


def test_files_may_lie_beside_their_compressed_originals(tmp_path):
    save(tmp_path, arrays(), compressed=True)
    save(tmp_path, arrays())
    assert len(open_data(f"idx:{tmp_path}", image_size=None).train) == 60
    (tmp_path / "emnist-train-images-idx3-ubyte").write_bytes(b"")
    idx._read.cache_clear()
    with pytest.raises(ValueError, match="emnist-train-images-idx3-ubyte and train-images-idx3-ubyte: leave one"):
        open_data(f"idx:{tmp_path}", image_size=None)


def test_augmented_images_are_shifted_and_flipped_parts_of_the_originals(tmp_path):
    content = save(tmp_path, arrays())
    data = open_data(f"idx:{tmp_path}", image_size=None, augmentation="basic")
    inputs, _ = every(data.train)
    found = set()
    for image, original in zip(inputs[:, 0].numpy(), content["train", "images"], strict=True):
        padded = np.pad(original, 2)  # an eighth of 16
        crops = {
            (y, x, flip): padded[y : y + SIDE, x : x + SIDE][:, :: -1 if flip else 1]
            for y in range(5) for x in range(5) for flip in (False, True)
        }  # fmt: skip
        [which] = [key for key, crop in crops.items() if np.array_equal(crop, image)]
        found.add(which)
    assert {y for y, _, _ in found} == {x for _, x, _ in found} == set(range(5))
    assert {flip for _, _, flip in found} == {False, True}
    # random numbers follow from seed, epoch, index and copy, and not from the rest of the batch
    assert torch.equal(data.train[MicroBatch(0, 0, 5, 1, (7,))].inputs[0], inputs[7])
    assert torch.equal(data.train[MicroBatch(0, 0, 5, 1, (7,), (0,))].inputs[0], inputs[7])
    others = [every(data.train, epoch=1)[0], every(data.train, seed=1)[0]]
    others.append(data.train[MicroBatch(0, 0, 0, 0, tuple(range(60)), (1,) * 60)].inputs)
    assert not any(torch.equal(inputs, other) for other in others)
    # neither the images to test on, nor those to choose by
    assert torch.equal(every(data.val)[0][:, 0], torch.from_numpy(content["test", "images"]))
    assert torch.equal(every(data.plain)[0][:, 0], torch.from_numpy(content["train", "images"]))


def test_another_size_is_the_one_of_pillow(tmp_path):
    from PIL import Image

    content = save(tmp_path, arrays())
    found = open_data(f"idx:{tmp_path}", image_size=8, augmentation="none")
    assert found.image_size == 8
    small = Image.fromarray(content["test", "images"][0]).resize((8, 8), Image.Resampling.BILINEAR)
    assert (every(found.val)[0][0, 0].int() - torch.from_numpy(np.array(small)).int()).abs().max() <= 1


def test_what_is_held_out_is_not_augmented_and_at_most_5000(tmp_path, monkeypatch):
    monkeypatch.setattr("fused_lwlr.papers.held_out.MOST", 9)
    content = save(tmp_path, arrays())
    fit, held = hold_out(open_data(f"idx:{tmp_path}", image_size=None, augmentation="basic"))
    assert MOST == 5000
    assert (len(fit.train), len(held), len(fit.val)) == (51, 9, 12)
    kept = {image.tobytes() for image in every(held)[0].numpy()}
    assert len(kept & {image.tobytes() for image in content["train", "images"]}) == 9


def broken(folder, what):
    """A data set with one thing wrong."""
    content = arrays()
    dtypes = {}
    if what == "labels":
        content["train", "labels"] = content["train", "labels"][:-1]
    elif what == "classes":
        content["test", "labels"] = content["test", "labels"] + 1
    elif what == "one class":
        content |= {(part, "labels"): np.zeros_like(content[part, "labels"]) for part in ("train", "test")}
    elif what == "bytes":  # in the wrong order
        content["train", "labels"] = content["train", "labels"].astype(np.int32).byteswap()
        dtypes["train", "labels"] = ">i4"
    elif what == "floats":
        dtypes["train", "images"] = ">f4"
    elif what == "wide":
        content["test", "images"] = content["test", "images"][:, :, 1:]
    elif what == "black":
        content["train", "images"] = np.zeros_like(content["train", "images"])
    elif what == "no pixels":
        content |= {(part, "images"): content[part, "images"][:, :0, :0] for part in ("train", "test")}
    save(folder, content, dtypes=dtypes)
    path = folder / NAMES["train", "images"]
    if what == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif what == "text":
        path.write_text("<html>not found</html>")
    elif what == "gzip":
        path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes())[:-9])
        path.unlink()
    elif what == "absent":
        path.unlink()


@pytest.mark.parametrize(
    ("what", "message"),
    {
        "labels": "labels of train are uint8 of shape (59,); there must be one integer from 0 for each of 60 images",
        "bytes": "labels of train go up to 33554432, for 60 images: number the classes from 0",
        "one class": "all labels of train are 0: images of two classes at least are needed",
        "classes": "images for testing have other sizes or classes than for training",
        "floats": "images of train are float32 of shape (60, 16, 16); they must be square, of one channel of unsigned",
        "wide": "images of t10k are uint8 of shape (12, 16, 15); they must be square",
        "short": "is damaged (15375 bytes instead of 15376): fetch it again",
        "text": "is not in the IDX format, or is damaged",
        "gzip": "is not in the IDX format, or is damaged",
        "absent": "has no file *train-images*",
        "black": "all pixels of the training images are equal: fetch the files again",
        "no pixels": "all pixels of the training images are equal: fetch the files again",
    }.items(),
)
def test_files_that_cannot_be_used_are_refused(tmp_path, what, message):
    broken(tmp_path, what)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        open_data(f"idx:{tmp_path}", image_size=None)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augmentation": "strong"}, "augmentation='strong' is for photographs: data=idx:"),
        ({"mean": (0.5, 0.5, 0.5)}, "mean=(0.5, 0.5, 0.5) is for photographs: leave it out"),
        ({"crop_pct": 0.9}, "crop_pct=0.9 is for photographs: leave it out"),
        ({"interpolation": "bilinear"}, "interpolation=bilinear is for photographs: leave it out"),
        ({"augmentation": "basic", "random_erasing": 0.1}, "random_erasing=0.1 is for photographs: leave it out"),
        ({"test_size": 32}, "test_size=32 is for photographs"),
    ],
)
def test_options_of_photographs_are_refused(tmp_path, options, message):
    save(tmp_path, arrays())
    with pytest.raises(ValueError, match="is for photographs") as error:
        open_data(f"idx:{tmp_path}", **{"image_size": None, "augmentation": "none"} | options)
    assert message in str(error.value)


def test_fashion_mnist_is_found_in_its_folders_and_otherwise_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "FOLDERS", (str(tmp_path / "debian"), "data/FashionMNIST/raw"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="install Debian's package dataset-fashion-mnist, or give data=idx:"):
        open_data("fashion-mnist", image_size=None)
    with pytest.raises(FileNotFoundError, match="there is no folder nowhere"):
        open_data("idx:nowhere", image_size=None)
    save(tmp_path / "data/FashionMNIST/raw", arrays())
    data = load_data(resolve(None, {"data": "fashion-mnist", "model": "vit"}))
    assert data.classes[9] == "Ankle boot"
    assert data.train.augmented


@pytest.mark.long
def test_the_real_fashion_mnist():
    if not any(Path(folder).is_dir() for folder in idx.FOLDERS):
        pytest.skip(f"Fashion-MNIST is not installed: apt-get install {idx.PACKAGE}")
    data = open_data("fashion-mnist", image_size=None, augmentation="basic")
    assert (len(data.train), len(data.val), data.image_size) == (60_000, 10_000, 28)
    assert every(data.val)[1].bincount().tolist() == [1000] * 10
    # the data set is commonly normalized by these numbers
    assert [round(value.item(), 3) for value in data.train.statistics] == [0.286, 0.353]
    fit, held = hold_out(data)
    assert (len(fit.train), len(held)) == (55_000, 5_000)
