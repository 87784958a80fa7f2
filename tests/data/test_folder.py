"""Folders of images: the files found, their order, and messages for folders that cannot be used."""

import os
import shutil

import pytest
from PIL import Image

from fused_lwlr.data import open_data
from fused_lwlr.data.folder import scan
from fused_lwlr.runs.run import run
from fused_lwlr.training.recipe import Recipe


@pytest.fixture
def folder(tmp_path):
    """Three classes of five images, one of them in a sub-folder, and other files."""
    for split, count in (("train", 5), ("val", 2)):
        for name in ("n02", "n01", "n10"):
            (tmp_path / split / name / "more").mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (9, 9)).save(tmp_path / split / name / ("more" if i == 1 else ".") / f"{9 - i}.JPEG")
            (tmp_path / split / name / "notes.txt").touch()
            (tmp_path / split / name / ".hidden.jpg").touch()
        (tmp_path / split / "stray.jpg").touch()
    return tmp_path


def opened(path, **options):
    return open_data(path, **{"image_size": 8, "augmentation": "none", **options})


def test_files_and_classes_equal_torchvisions(folder, third_party):
    wanted = third_party("torchvision").datasets.ImageFolder(folder / "train", is_valid_file=_is_image)
    data = opened(folder)
    assert data.classes == tuple(wanted.classes) == ("n01", "n02", "n10")
    files = data.train.pictures
    assert len(data.train) == len(files) == 15
    found = [(files.path(i), files.target(i)) for i in range(15)]
    assert sorted(found) == sorted(wanted.samples)
    assert found == sorted(found)
    assert len(data.val) == 6


def _is_image(path):
    return path.endswith(".JPEG")


def test_without_val_every_fifth_image_is_for_validation(folder):
    data = opened(folder / "train")
    parts = [[os.path.basename(s.pictures.path(i)) for i in range(len(s))] for s in (data.train, data.val)]
    assert parts == [["5.JPEG", "6.JPEG", "7.JPEG", "9.JPEG"] * 3, ["8.JPEG"] * 3]


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["validation"], "validation"),
        (["test"], "test"),
        (["val", "test"], "val"),
        (["validation", "test"], "validation"),
    ],
)
def test_the_folder_for_validation_may_have_other_names(names, taken, folder):
    (folder / "val").rename(folder / "kept")
    for name in names:
        shutil.copytree(folder / "kept", folder / name)
    data = opened(folder)
    assert data.val_source == str(folder / taken)
    assert {os.path.relpath(data.val.pictures.path(i), folder).split(os.sep)[0] for i in range(len(data.val))} == {
        taken
    }


def test_two_names_for_the_same_are_refused(folder):
    shutil.copytree(folder / "val", folder / "validation")
    with pytest.raises(ValueError, match=r"has val and validation: remove one of them, or rename it"):
        opened(folder)


@pytest.mark.long
def test_where_images_for_validation_are_from_is_said(folder, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("fused_lwlr.runs.run.write_report", lambda folder: folder)
    options = {"model": "noshort", "image_size": 8, "rates": "single", "device": "cpu", "steps": 1, "batch_size": 2}
    for data, where in (
        (folder, folder / "val"),
        (folder / "train", f"every fifth image of each class in {folder}/train"),
    ):
        run(Recipe(data=str(data), out=str(tmp_path / f"out-{data.name}"), **options))
        assert f"images for validation are from {where}." in capfd.readouterr().out


def test_links_are_followed_and_names_may_be_any_bytes(folder, tmp_path_factory):
    linked = tmp_path_factory.mktemp("linked")
    (linked / "train").symlink_to(folder / "train")
    (linked / "val").symlink_to(folder / "train")
    odd = os.fsdecode(b"\xff\xe9.jpg")
    Image.new("RGB", (9, 9)).save(folder / "train" / "n01" / "x.jpg")
    os.rename(folder / "train" / "n01" / "x.jpg", folder / "train" / "n01" / odd)
    data = opened(linked)
    assert (len(data.train), len(data.val)) == (16, 16)
    assert data.train.pictures.path(5) == os.path.join(str(linked), "train", "n01", odd)
    assert data.train.pictures.open(5).size == (9, 9)


def _flat_val(folder):
    for name in ("n01", "n02", "n10"):
        (folder / "val" / name).rename(folder / f"gone-{name}")


def _empty_class(folder):
    (folder / "train" / "n03").mkdir()
    (folder / "val" / "n03").mkdir()


def _lost_class(folder):
    (folder / "train" / "n03").symlink_to(folder / "nowhere")


def _one_class(folder):
    for name in ("n02", "n10"):
        (folder / "train" / name).rename(folder / f"gone-{name}")


def _other_names(folder):
    (folder / "train").rename(folder / "Train")
    (folder / "val").rename(folder / "validation")


def _other_val(folder):
    (folder / "val").rename(folder / "Valid")


def _loop(folder):
    (folder / "train" / "n01" / "loop").symlink_to(folder / "train" / "n01")


def _loops(folder):
    _loop(folder)
    (folder / "train" / "n01" / "other").symlink_to(folder / "train")


def _itself(folder):
    (folder / "train").rename(folder / "gone")
    (folder / "train").symlink_to("train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: (f / "val" / "n03").mkdir(),
            r"train and .*val have other classes: n03; both need images of all classes",
        ),
        (lambda f: (f / "val" / "n01").rename(f / "gone"), r"train and .*val have other classes: n01; both need"),
        (_flat_val, r"val has no sub-folders: sort its images into folders of their classes"),
        (_empty_class, r"n03 holds no images .*: add some, or move it away"),
        (_lost_class, r"n03 is a link to nothing: mend it, or remove it"),
        (_one_class, r"train has 1 sub-folder\(s\): images of two classes at least are needed"),
        (_other_names, "has Train and validation: name these folders train and val"),
        (_other_val, "has train and Valid: name the folder for validation val"),
        (_loop, r"loop links to .*n01, and is within it: remove the link"),
        (_loops, r"loop links to .*n01, and is within it: remove the link"),
        (_itself, r"cannot list .*train.*: Too many levels of symbolic links"),
    ],
)
def test_folders_that_will_not_do(folder, change, message):
    opened(folder)
    change(folder)
    with pytest.raises(ValueError, match=message):
        opened(folder)


def test_paths_that_are_no_folder(folder, tmp_path_factory):
    with pytest.raises(
        FileNotFoundError,
        match=r"data=.*nowhere is not a folder of images: give one, digits, glyphs, fashion-mnist, idx:FOLDER, synth",
    ):
        opened(folder / "nowhere")
    with pytest.raises(ValueError, match=r"stray.jpg is a file: give the folder"):
        opened(folder / "train" / "stray.jpg")
    with pytest.raises(ValueError, match=r"0 sub-folder\(s\)"):
        opened(tmp_path_factory.mktemp("empty"))


def test_a_folder_that_may_not_be_read_is_named(folder, monkeypatch):
    listed = os.scandir

    def scandir(path):  # root, who may run this test, can read any folder
        if str(path).endswith("n02"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ValueError, match=r"cannot list .*n02: Permission denied"):
        scan(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"random_erasing": 0.1}, "random_erasing=0.1 needs augmentation='basic' or another"),
        ({"interpolation": "random"}, "interpolation=random needs augmentation='basic' or another"),
        ({"path": "digits", "augmentation": "basic"}, "the digits take augmentation='none'"),
    ],
)
def test_options_without_effect(folder, options, message):
    with pytest.raises(ValueError, match=message):
        opened(**{"path": folder, **options})
