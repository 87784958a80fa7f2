"""Broken image files, or images of an unusual kind: refused by name, skipped and counted, or decoded correctly."""

import multiprocessing
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from small_photos import make

from fused_lwlr.data import MicroBatchSampler, open_data, train_batches, val_batches
from fused_lwlr.data.decode import RGB_MEAN, RGB_STD, open_rgb
from fused_lwlr.data.sources import HOPELESS

# from Python 3.12 on, where another test has started a thread
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
CPU = torch.device("cpu")


def truncate(file):
    file.write_bytes(file.read_bytes()[:1000])


def empty(file):
    file.write_bytes(b"")


def text(file):
    file.write_text("an error page of a web server")


def bomb(file):
    """The header of a PNG says how large the image is."""
    Image.new("1", (1, 1)).save(file, "PNG")
    content = file.read_bytes()
    header = b"IHDR" + struct.pack(">II", 20_000, 10_000) + content[24:29]
    file.write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])


def dangling(file):
    file.unlink()
    file.symlink_to("nowhere.jpg")


def float_pixels(file):
    Image.fromarray(np.ones((9, 9), np.float32)).save(file, "TIFF")


def exif(*entries):
    """EXIF data of entries of (tag, type, count, value), the value as 4 bytes."""
    fields = b"".join(struct.pack(">HHI4s", *entry) for entry in entries)
    return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", len(entries)) + fields + b"\0\0\0\0"


def broken_exif(file):
    """Pillow decodes it, but fails when it rotates it: the resolution is not a number."""
    image = Image.open(file).convert("RGB")
    image.save(file, "JPEG", exif=exif((0x0112, 3, 1, b"\0\6\0\0"), (0x011A, 2, 3, b"abc\0")))


BAD = {
    truncate: "truncated",
    empty: "Pillow does not know its format",
    text: "Pillow does not know its format",
    bomb: "decompression bomb",
    dangling: "No such file",
    float_pixels: "mode F",
    broken_exif: "abs",
}
BY_WORKERS = truncate, dangling
"""The fast tests have workers read these alone: an error of Pillow, and one of the system."""


def bad(workers):
    """Each kind without workers, and with this number of them."""
    return pytest.mark.parametrize(
        ("spoil", "why", "workers"),
        [pytest.param(*row, count, id=f"{row[0].__name__}-{count}",
                      marks=pytest.mark.long if count and row[0] not in BY_WORKERS else ())
         for row in BAD.items() for count in (0, workers)],
    )  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made") / "photos", classes=2, images=4)


@pytest.fixture(scope="module")
def whole(made):
    """The batches of all images."""
    return loaded(open_data(made, image_size=8, augmentation="none").train)


@pytest.fixture
def photos(made, tmp_path):
    return shutil.copytree(made, tmp_path / "photos")


def loaded(images, **options):
    sampler = MicroBatchSampler(len(images), seed=0, batch_size=8, micro_batch=4, steps=2)
    return list(train_batches(images, sampler, device=CPU, **options))


@bad(workers=1)
def test_a_bad_file_is_refused_in_one_line_that_names_it(spoil, why, workers, photos):
    file = photos / "train" / "flower-00" / "00002.jpg"
    spoil(file)
    before = multiprocessing.active_children()
    with pytest.raises(ValueError, match=rf"^cannot read the image {file}: .*{why}.*; mend .* corrupt='skip'$") as info:
        loaded(open_data(photos, image_size=8, augmentation="none").train, workers=workers)
    assert "\n" not in str(info.value)
    assert set(multiprocessing.active_children()) <= set(before)


@bad(workers=2)
def test_a_bad_file_is_replaced_by_the_next_one_when_training(spoil, why, workers, photos, whole):
    spoiled = [photos / "train" / "flower-00" / f"0000{i}.jpg" for i in (2, 3)]
    for file in spoiled:
        spoil(file)
    images = open_data(photos, image_size=8, augmentation="none", corrupt="skip").train
    order = MicroBatchSampler(8, seed=0, batch_size=8, micro_batch=4, steps=2)
    at = {index: (b, i) for b, m in enumerate(order) for i, index in enumerate(m.indices) if b < 2}
    found = loaded(images, workers=workers)
    skipped = sorted(path for batch in found[:2] for path in batch.skipped)
    assert skipped == sorted(map(str, (spoiled[0], spoiled[1], spoiled[1])))
    for index, (b, i) in at.items():
        wanted_b, wanted_i = at[4 if index in (2, 3) else index]  # an image of the next class, with its label
        assert torch.equal(found[b].inputs[i], whole[wanted_b].inputs[wanted_i])
        assert found[b].targets[i] == whole[wanted_b].targets[wanted_i]


def test_after_the_last_image_comes_the_first(photos):
    text(photos / "train" / "temple-00" / "00003.jpg")
    images = open_data(photos, image_size=8, augmentation="none", corrupt="skip").train
    request = next(iter(MicroBatchSampler(8, seed=0, batch_size=1, micro_batch=1, steps=1)))
    last, first = (images[request._replace(indices=(i,))] for i in (7, 0))
    assert torch.equal(last.inputs, first.inputs)
    assert (last.targets.tolist(), len(last.skipped)) == ([0], 1)


def test_in_validation_a_bad_file_is_not_counted(photos):
    for i in range(5):
        (photos / "val" / "temple-00" / f"{i}.jpg").write_bytes(
            (photos / "train" / "temple-00" / "00000.jpg").read_bytes()
        )
    text(photos / "val" / "temple-00" / "1.jpg")
    images = open_data(photos, image_size=8, augmentation="none", corrupt="skip").val
    (batch,) = val_batches(images, batch_size=10, device=CPU)
    assert batch.targets.tolist() == [0, 1, 1, -1, 1, 1, 1, -1, -1, -1]
    assert batch.skipped == (str(photos / "val" / "temple-00" / "1.jpg"),)
    assert batch.inputs[3].amax((1, 2)).tolist() == (-RGB_MEAN / RGB_STD).tolist()
    refusing = open_data(photos, image_size=8, augmentation="none").val
    with pytest.raises(ValueError, match=r"cannot read the image .*1\.jpg"):
        list(val_batches(refusing, batch_size=10, device=CPU, workers=1))


def test_where_nothing_can_be_read_the_run_ends(photos):
    for file in (photos / "train").glob("*/*.jpg"):
        empty(file)
    images = open_data(photos, image_size=8, augmentation="none", corrupt="skip").train
    with pytest.raises(ValueError, match=rf"{HOPELESS} images in a row cannot be read, from .*\.jpg on: can the disk"):
        loaded(images)


def gradient():
    """Dark at the top left, bright at the right, green at the bottom; 64 x 48."""
    x, y = np.meshgrid(np.linspace(0, 1, 64), np.linspace(0, 1, 48))
    return np.stack([x, y, x / 2], axis=-1)


def rgb():
    return Image.fromarray((gradient() * 255).astype(np.uint8))


def grey_16_bits(file):
    Image.fromarray((gradient()[..., 0] * 65535).astype(np.uint16)).save(file, "PNG")
    return np.repeat(gradient()[..., :1], 3, axis=-1)


def cmyk(file):
    rgb().convert("CMYK").save(file, "JPEG", quality=95)


def palette(file):
    rgb().quantize(256).save(file, "PNG")


def transparent_palette(file):
    rgb().quantize(256).save(file, "PNG", transparency=bytes(range(256)))


def alpha(file):
    image = rgb().convert("RGBA")
    image.putalpha(100)
    image.save(file, "PNG")


def animation(file):
    rgb().save(file, "GIF", save_all=True, append_images=[Image.new("RGB", (64, 48), "red")])


def turned(file):
    """An image that is stored rotated, with the EXIF orientation that turns it back."""
    clockwise = exif((0x0112, 3, 1, b"\0\6\0\0"))
    rgb().transpose(Image.Transpose.ROTATE_90).save(file, "JPEG", exif=clockwise, quality=95)


def wrong_name(file):
    rgb().save(file, "PNG")


def bits(file):
    image = Image.new("1", (64, 48))
    ImageDraw.Draw(image).rectangle((32, 0, 63, 47), fill=1)
    image.save(file, "PNG")
    return np.repeat(np.repeat(np.arange(64)[None, :, None] >= 32, 48, axis=0), 3, axis=-1)


@pytest.mark.parametrize(
    "save", [grey_16_bits, cmyk, palette, transparent_palette, alpha, animation, turned, wrong_name, bits]
)
def test_rarer_images_are_read_as_they_look(save, photos):
    file = photos / "train" / "flower-00" / "00000.jpg"
    wanted = save(file)
    wanted = gradient() if wanted is None else wanted
    images = open_data(photos, image_size=48, augmentation="none").train
    request = next(iter(MicroBatchSampler(8, seed=0, batch_size=1, micro_batch=1, steps=1)))
    (found,) = images[request._replace(indices=(0,))].inputs
    pixels = found.permute(1, 2, 0).numpy() / 255
    # quantization to a palette, and compression, are off by some 2 % here; every error looked for is far more
    assert np.abs(pixels - wanted[:, 8:-8]).mean() < 0.02


def test_broken_metadata_are_no_reason_to_warn_or_to_fail_otherwise(photos):
    """As in a few files of ImageNet; warnings are errors here."""
    file = photos / "train" / "flower-00" / "00000.jpg"
    image = Image.open(file).convert("RGB")
    image.save(file, exif=exif((0x010E, 2, 0xFFFF, b"\0\0\xff\xff")))  # a description that lies beyond the end
    with pytest.warns(UserWarning, match="EXIF|larger than file|Truncated"):
        open_rgb(file)
    assert len(loaded(open_data(photos, image_size=8, augmentation="none").train)) == 4
