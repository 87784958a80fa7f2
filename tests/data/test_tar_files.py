"""Tar files of WebDataset equal a folder of the same images, bit for bit, in any order and from any worker."""

import io
import tarfile

import pytest
import torch
from small_photos import make

from fused_lwlr.data import MicroBatchSampler, open_data, train_batches, val_batches
from fused_lwlr.data.tar_files import expand

# from Python 3.12 on, where another test has started a thread
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
CPU = torch.device("cpu")


def pack(path, members):
    with tarfile.open(path, "w") as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))


def shards(folder, out, split, count=2):
    """The images of a split in tar files: the first of each class in the first of them."""
    parts = [[] for _ in range(count)]
    for target, of_class in enumerate(sorted((folder / split).iterdir())):
        images = sorted(of_class.iterdir())
        for i, image in enumerate(images):
            key = f"{split}/{i:02}-{target}"
            members = [(f"{key}.jpg", image.read_bytes()), (f"{key}.json", b"{}"), (f"{key}.cls", b"%d\n" % target)]
            parts[i * count // len(images)] += members if i % 2 else members[::-1]
    for number, members in enumerate(parts):
        pack(out / f"{split}-{number:03}.tar", members)
    return str(out / f"{split}-{{000..{count - 1:03}}}.tar")


@pytest.fixture
def photos(tmp_path):
    return make(tmp_path / "photos", classes=3, images=10)


def batches(images, **options):
    sampler = MicroBatchSampler(len(images), seed=1, batch_size=6, micro_batch=3, steps=7)
    return list(train_batches(images, sampler, device=CPU, **options))


def same(found, wanted):
    assert len(found) == len(wanted) > 1
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 2])
def test_as_a_folder_with_val(workers, photos, tmp_path, timm):
    options = {"image_size": 20, "augmentation": "basic"}
    of_folder = open_data(photos, **options)
    train, val = (shards(photos, tmp_path, split) for split in ("train", "val"))
    found = open_data(train, val_data=val, **options)
    assert (found.classes, found.channels) == (("0", "1", "2"), 3)
    same(batches(found.train, workers=workers), batches(of_folder.train))
    of_val = [val_batches(data.val, batch_size=4, device=CPU, workers=workers) for data in (found, of_folder)]
    same(*map(list, of_val))


def test_as_a_folder_without_val(photos, tmp_path):
    options = {"image_size": 20, "augmentation": "none"}
    of_folder = open_data(photos / "train", **options)
    found = open_data(shards(photos, tmp_path, "train", count=3), **options)
    assert (len(found.train), len(found.val)) == (24, 6)
    same(batches(found.train), batches(of_folder.train))
    same(*(list(val_batches(data.val, batch_size=4, device=CPU)) for data in (found, of_folder)))


def test_a_bad_image_is_named_or_skipped(photos, tmp_path):
    image = next((photos / "train").glob("*/*.jpg")).read_bytes()
    good = [(f"{i}.{kind}", content) for i in range(5) for kind, content in (("jpg", image), ("cls", b"%d" % (i % 2)))]
    pack(tmp_path / "a.tar", [*good, ("x/bad.png", image[:500]), ("x/bad.cls", b"1")])
    options = {"val_data": str(tmp_path / "a.tar"), "image_size": 8, "augmentation": "none"}
    refusing, skipping = (open_data(tmp_path / "a.tar", corrupt=how, **options) for how in ("refuse", "skip"))
    with pytest.raises(ValueError, match=rf"^cannot read the image {tmp_path}/a.tar/x/bad.png: .*; mend it"):
        batches(refusing.train)
    (batch,) = val_batches(skipping.val, batch_size=6, device=CPU)
    assert batch.targets.tolist() == [0, 0, 0, 1, 1, -1]
    assert batch.skipped == (f"{tmp_path}/a.tar/x/bad.png",)
    (tmp_path / "a.tar").unlink()
    with pytest.raises(ValueError, match=r"^cannot read the image .*\.jpg: No such file"):
        batches(refusing.train)


def test_patterns():
    assert expand("a-{08..10}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert expand("{0..1}/{1..2}.tar") == ["0/1.tar", "0/2.tar", "1/1.tar", "1/2.tar"]
    assert expand("a.tar") == ["a.tar"]
    with pytest.raises(ValueError, match=r"range that goes backward: give \{1\.\.3\}"):
        expand("{3..1}.tar")


REFUSED = {
    "class": ([("a.jpg", b"x"), ("b.cls", b"0")], {}, "has no class for a.jpg: a.cls, with a number from 0 in it"),
    "number": ([("a.jpg", b"x"), ("a.cls", b"cat")], {}, r"a.tar/a.cls holds b'cat', and not the number of a class"),
    "large": ([("a.jpg", b"x"), ("a.cls", b"1000000000")], {}, "a.tar has class 1000000000 for a.jpg, but a.tar has 1"),
    "digits": ([("a.jpg", b"x"), ("a.cls", b"1" * 5000)], {}, "a.tar/a.cls holds b'1{20}', and not the number of a cl"),
    "images": ([("a.txt", b"x")], {}, r"a.tar holds no images \(.*\) with their classes \(.cls\)"),
    "few": ([("a.jpg", b"x"), ("a.cls", b"0"), ("b.jpg", b"x"), ("b.cls", b"1")], {}, "no class of five images"),
    "folder": ([], {"source": "photos", "val_data": "a.tar"}, "val_data='a.tar' goes with tar files, but the data are"),
    "two images": ([("a.jpg", b"x"), ("a.png", b"x"), ("a.cls", b"0")], {}, "a.tar has a.jpg and a.png for a.cls"),
    "upper case": ([("a.JPG", b"x"), ("a.CLS", b"cat")], {}, r"a.tar/a.CLS holds b'cat', and not the number"),
    "compressed": (None, {}, "not an uncompressed tar file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_files(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    members, options, message = REFUSED[kind]
    if members is None:
        (tmp_path / "a.tar").write_bytes(b"\x1f\x8b" + bytes(1000))
    else:
        pack("a.tar", members)
    with pytest.raises(ValueError, match=message):
        open_data(**{"source": "a.tar", "image_size": 8, "augmentation": "none", **options})


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (tarfile.LNKTYPE, r"a.tar has a link for a.jpg: pack the file itself"),
        (tarfile.SYMTYPE, r"a.tar has a link for a.jpg: pack the file itself"),
        (tarfile.GNUTYPE_SPARSE, r"a.tar has a.jpg as a sparse file: pack it without --sparse"),
    ],
)
def test_images_whose_bytes_are_not_there_are_refused(kind, message, tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        link = tarfile.TarInfo("a.jpg")
        link.type, link.linkname = kind, "b.jpg"
        file.addfile(link)
    with pytest.raises(ValueError, match=message):
        open_data(tmp_path / "a.tar", image_size=8, augmentation="none")


DAMAGES = {
    "damaged header": lambda whole, begin: whole[:begin] + b"\xff" * 50 + whole[begin + 50 :],
    "cleared header": lambda whole, begin: whole[:begin] + bytes(512) + whole[begin + 512 :],
    "cut off in a header": lambda whole, begin: whole[: begin + 200],
    "cut off between members": lambda whole, begin: whole[:begin],
    "two in one": lambda whole, begin: whole + whole,
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_file_that_is_read_in_part_is_refused(kind, tmp_path):
    pack(tmp_path / "a.tar", [(f"{i:02}.{kind}", b"%d" % (i % 2)) for i in range(40) for kind in ("jpg", "cls")])
    with tarfile.open(tmp_path / "a.tar") as file:
        begin = file.getmember("20.jpg").offset
    (tmp_path / "a.tar").write_bytes(DAMAGES[kind]((tmp_path / "a.tar").read_bytes(), begin))
    with pytest.raises(ValueError, match=r"a.tar does not end after its last readable member, at byte \d+: it is dama"):
        open_data(tmp_path / "a.tar", image_size=8, augmentation="none")


def test_validation_has_the_classes_of_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, classes in (("one", 1), ("two", 2), ("three", 3)):
        pack(f"{name}.tar", [(f"{c}.{kind}", b"%d" % c) for c in range(classes) for kind in ("jpg", "cls")])
    options = {"image_size": 8, "augmentation": "none"}
    with pytest.raises(ValueError, match=r"three.tar has class 2, but two.tar only classes up to 1"):
        open_data("two.tar", val_data="three.tar", **options)
    with pytest.raises(ValueError, match=r"one.tar has images of 1 class\(es\): two at least"):
        open_data("one.tar", val_data="one.tar", **options)
    assert len(open_data("three.tar", val_data="two.tar", **options).val) == 2
    with pytest.raises(FileNotFoundError, match=r"x-2.tar"):
        open_data("x-{2..4}.tar", **options)
