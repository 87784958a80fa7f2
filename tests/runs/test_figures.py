"""The folder of real pictures that bench/pictures.py makes."""

import subprocess
import sys
from pathlib import Path

import pytest
from sklearn.linear_model import LogisticRegression

from bench import pictures
from fused_lwlr.data import MicroBatch, open_data

ROOT = Path(pictures.__file__).parents[1]


def test_a_net_can_learn_the_written_pictures(tmp_path):
    folder = pictures.make(tmp_path / "made", classes=4, images=8)
    data = open_data(folder, image_size=8, augmentation="none")
    assert (len(data.classes), len(data.train), len(data.val)) == (4, 32, 8)
    loaded = [s[MicroBatch(0, 0, 0, 0, tuple(range(len(s))))] for s in (data.train, data.val)]
    (x, y), (x_val, y_val) = ((part.inputs.flatten(1).numpy(), part.targets.numpy()) for part in loaded)
    assert LogisticRegression(max_iter=1000).fit(x, y).score(x_val, y_val) > 0.5  # chance: 0.25
    assert len({part.tobytes() for part in x}) == 32
    assert len({data.train.pictures.open(i).size for i in range(32)}) > 16


def test_the_command_writes_the_same_files_every_time(tmp_path):
    for name in ("first", "second"):
        result = subprocess.run(
            [sys.executable, "-m", "bench.pictures", tmp_path / name, "--classes", "3", "--images", "2"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.splitlines() == [
            f"{tmp_path / name / 'train'}: 6 images of 3 classes",
            f"{tmp_path / name / 'val'}: 3 images of 3 classes",
        ]
    first, second = (
        {str(f.relative_to(tmp_path / name)): f.read_bytes() for f in (tmp_path / name).rglob("*.jpg")}
        for name in ("first", "second")
    )
    assert first == second
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("", {}, "exists: remove it, or name a new folder"),
        ("new", {"classes": 1}, "classes=1, images=64: give 2 classes"),
        ("new", {"images": 0}, "classes=4, images=0: give 2 classes"),
        ("new", {"classes": 2000}, "classes=2000: .* are too small for this number"),
    ],
)
def test_refusals_leave_no_files(name, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        pictures.make(tmp_path / name, **options)
    assert list(tmp_path.iterdir()) == []
