import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from fused_lwlr.data.datasets import Batches, digits, load, synthetic

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Crops of scikit-learn's two photographs: a class of roofs and one of petals, 12 images each."""
    root = tmp_path_factory.mktemp("photos")
    for name, pixels in zip(("temple", "flower"), load_sample_images().images, strict=True):
        (root / name).mkdir()
        for i in range(12):
            y, x = 100 * (i // 4), 150 * (i % 4)
            Image.fromarray(pixels[y : y + 100, x : x + 140]).save(root / name / f"{i:02}.png")
    return root


def test_digits_are_the_real_ones_split_the_same_way_every_time():
    data = digits()
    inputs, targets = data.train.tensors
    assert (data.channels, data.image_size, len(data.classes)) == (1, 8, 10)
    assert inputs.shape == (1437, 1, 8, 8)
    assert len(data.test) == 360
    assert abs(inputs.mean()) < 1e-5
    assert abs(inputs.std() - 1) < 1e-5
    assert min(data.test.tensors[1].bincount()) >= 34  # stratified
    digits.cache_clear()
    assert torch.equal(digits().train.tensors[1], targets)
    assert digits(16).train[0][0].shape == (1, 16, 16)


def test_folder_of_photographs(photos):
    data = load(photos, 32)
    assert data.classes == ("flower", "temple")
    assert (data.channels, data.image_size, len(data.train), len(data.test)) == (3, 32, 20, 4)
    inputs, targets = next(iter(Batches(data.train, 20, CPU)))
    assert inputs.shape == (20, 3, 32, 32)
    assert targets.tolist() == [0] * 10 + [1] * 10
    assert -2.2 < inputs.min() < inputs.max() < 2.7
    assert inputs[:10].std() > 0.5  # pictures, not padding
    assert {file.name for file, _ in data.test.samples} == {"04.png", "09.png"}


def test_the_central_square_is_what_is_kept(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        wide = Image.new("RGB", (60, 20), "black")
        wide.paste("white", (20, 0, 40, 20))
        for i in range(5):
            wide.save(tmp_path / name / f"{i}.png")
    image, _ = load(tmp_path, 8).train[0]
    assert torch.allclose(
        image[:, 2:6, 2:6],
        ((1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])).reshape(3, 1, 1),
    )


def test_folder_with_train_and_val(photos, tmp_path):
    (tmp_path / "train").symlink_to(photos)
    (tmp_path / "val" / "flower").mkdir(parents=True)
    (tmp_path / "val" / "temple").symlink_to(photos / "temple")
    with pytest.raises(ValueError, match="flower holds no images"):
        load(tmp_path)
    (tmp_path / "val" / "flower").rmdir()
    (tmp_path / "val" / "flower").symlink_to(photos / "flower")
    data = load(tmp_path)
    assert (len(data.train), len(data.test)) == (24, 24)
    (tmp_path / "val" / "house").mkdir()
    with pytest.raises(ValueError, match="house"):
        load(tmp_path)


def test_errors_name_what_is_wrong(photos, tmp_path):
    with pytest.raises(FileNotFoundError, match="digitz is not a folder"):
        load("digitz")
    with pytest.raises(ValueError, match=r"0 sub-folder\(s\)"):
        load(tmp_path)
    (tmp_path / "only").mkdir()
    with pytest.raises(ValueError, match="two classes"):
        load(tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="only holds no images"):
        load(tmp_path)
    for name in ("only", "other"):
        (tmp_path / name / "1.png").write_bytes((photos / "temple" / "01.png").read_bytes()[:999])
    with pytest.raises(ValueError, match="no class of five images"):
        load(tmp_path)
    for i in range(2, 6):
        (tmp_path / "only" / f"{i}.png").symlink_to(photos / "temple" / "01.png")
    with pytest.raises(ValueError, match=r"cannot read the image .*only.1\.png"):
        list(Batches(load(tmp_path).train, 4, CPU))


def test_the_order_of_batches_depends_on_seed_and_epoch_alone():
    data = digits().train
    before = torch.get_rng_state()

    def order(seed, epoch):
        return torch.cat([targets for _, targets in Batches(data, 64, CPU, seed=seed, epoch=epoch)])

    assert len(order(0, 0)) == 1437 // 64 * 64
    assert torch.equal(order(3, 1), order(3, 1))
    assert not torch.equal(order(3, 1), order(3, 2))
    assert not torch.equal(order(3, 1), order(4, 1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("seed", "sizes"), [(None, [600, 600, 237]), (0, [600, 600])])
def test_only_shuffled_batches_leave_an_incomplete_one_out(seed, sizes):
    batches = Batches(digits().train, 600, CPU, seed=seed)
    assert [len(targets) for _, targets in batches] == sizes
    assert len(batches) == len(sizes)


def test_a_batch_is_never_larger_than_the_data_set():
    assert [len(targets) for _, targets in Batches(digits().test, 1000, CPU, seed=0)] == [360]


def test_synthetic_images_say_so_and_repeat():
    data = synthetic(6, 16)
    first, again = (next(iter(Batches(data.train, 6, CPU, seed=0))) for _ in range(2))
    assert "random" in data.name
    assert first[0].shape == (6, 3, 16, 16)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0][0], first[0][1])
