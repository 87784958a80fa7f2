"""Text: every batch follows from (seed, step), all of the text is used, and validation text is separate."""

import builtins
import hashlib
import os
import pickle

import numpy as np
import pytest
import torch

from fused_lwlr.data import MicroBatch, MicroBatchSampler, open_text, train_batches, val_batches
from fused_lwlr.papers.held_out import hold_out
from fused_lwlr.training.losses import flatten_predictions

CPU = torch.device("cpu")


def made(folder, size=1000, name="text.txt"):
    """A file in which no eight training bytes repeat, so that a sequence shows its position."""
    content = hashlib.shake_256(os.fsencode(name)).digest(size)
    (folder / name).write_bytes(content)
    return content


def batches(text, *, seed=0, start=0, steps=40, size=4, **options):
    sampler = MicroBatchSampler(
        len(text.train), seed=seed, batch_size=size, micro_batch=size, steps=steps, start_step=start
    )
    return list(train_batches(text.train, sampler, device=CPU, **options))


def found_at(content, batch):
    """Positions in the bytes of each sequence and of its targets."""
    for ids, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert targets[:-1] == ids[1:]
        at = content.find(bytes([*ids, targets[-1]]))
        assert at >= 0
        yield at


def test_the_last_8_percent_are_for_validation_and_never_trained_on(tmp_path):
    content = made(tmp_path, 1003)
    text = open_text(f"text:{tmp_path}/text.txt", context=16)
    cut = 1003 - 80
    ends = [at + 17 for batch in batches(text) for at in found_at(content, batch)]
    assert max(ends) <= cut
    tested = list(val_batches(text.val, batch_size=2, device=CPU))
    targets = torch.cat([batch.targets.flatten() for batch in tested])
    # each token of the validation text except its first, once and in order
    assert bytes(targets[targets >= 0].tolist()) == content[cut + 1 :]
    inputs = torch.cat([batch.inputs.flatten() for batch in tested])
    assert bytes(inputs[targets >= 0].tolist()) == content[cut:-1]


@pytest.mark.long
def test_epochs_cover_the_training_text_with_cuts_in_other_places(tmp_path):
    content = made(tmp_path, 440)
    text = open_text(f"text:{tmp_path}/text.txt", context=16)
    assert len(text.train) == 405 // 16 - 1
    per_epoch = len(text.train) // 4
    every = batches(text, steps=60 * per_epoch)
    epochs = [
        sorted(at for batch in every[e * per_epoch : (e + 1) * per_epoch] for at in found_at(content, batch))
        for e in range(60)
    ]
    for starts in epochs:
        assert len({at % 16 for at in starts}) == 1
        assert len(set(starts)) == 4 * per_epoch
    assert len({starts[0] % 16 for starts in epochs}) > 8
    seen = np.zeros(440, bool)
    for at in (at for starts in epochs for at in starts):
        seen[at : at + 17] = True
    assert seen[:405].all()
    assert not seen[405:].any()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_batch_depends_on_seed_and_step_alone(tmp_path, workers):
    made(tmp_path)
    text = open_text(f"text:{tmp_path}/text.txt", context=16)
    whole, later = batches(text), batches(text, start=25, workers=workers)
    assert len(later) == 15
    for a, b in zip(whole[25:], later, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)
    assert not torch.equal(whole[0].inputs, batches(text, seed=1)[0].inputs)


def test_files_of_a_folder_follow_one_another(tmp_path):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    (folder / "more").mkdir(parents=True)
    elsewhere.mkdir()
    parts = [made(folder, 50, "a.txt"), made(elsewhere, 300, "1.txt"), made(folder, 400, "more/b.txt")]
    parts.append(made(folder, 3, os.fsdecode(b"z\xff.txt")))
    (folder / "linked").symlink_to(elsewhere)
    (folder / "empty.txt").touch()
    (folder / "other.md").write_text("not this")
    (folder / "._a.txt").write_text("nor this, which a Mac makes")
    text = open_text(f"text:{folder}", context=8)
    tokens = text.train.tokens
    assert len(tokens) == 753
    for begin, end in [(0, 753), (45, 60), (349, 351), (50, 51), (740, 753), (0, 50)]:
        assert tokens[begin:end].tobytes() == b"".join(parts)[begin:end]


def test_bytes_are_memory_mapped(tmp_path):
    """A sparse file of 64 GiB: reading its middle is fast, and a copy for a worker is small."""
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.seek(64 << 30)
        file.write(b"the end")
    text = open_text(f"text:{path}", context=1 << 31)
    tokens = text.val.tokens
    assert len(text.val) == 3
    assert tokens[(64 << 30) - 2 :].tobytes() == b"\0\0the end"
    assert len(pickle.dumps(text.train)) < 2000


def test_characters_are_numbered_in_their_order(tmp_path):
    written = "añ€😀\r\n" * 40
    (tmp_path / "text.txt").write_bytes(written.encode("utf-8-sig"))  # a byte order mark is no character of it
    text = open_text(f"text:{tmp_path}/text.txt", context=8, vocabulary="characters")
    assert text.classes == tuple(sorted(set(written)))
    tokens = text.train.tokens
    assert "".join(text.classes[i] for i in tokens[:]) == written
    assert tokens.dtype == np.uint8
    (tmp_path / "wide.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 300))))
    assert open_text(f"text:{tmp_path}/wide.txt", context=8, vocabulary="characters").train.tokens[-1] == 299


@pytest.mark.parametrize("vocabulary", ["bytes", "characters"])
def test_the_reference_of_python(vocabulary):
    topics = pytest.importorskip("pydoc_data.topics").topics
    text = open_text("python-docs", context=64, vocabulary=vocabulary)
    tokens = text.train.tokens
    ids = tokens[:]
    if vocabulary == "bytes":
        told = ids.tobytes().decode()
    else:
        told = "".join(text.classes[i] for i in ids)
        assert len(text.classes) == len(set(told))
    for topic in topics.values():
        assert topic in told
    assert text.name.startswith("python-docs of Python 3.")


def test_padding_is_no_target(tmp_path):
    made(tmp_path)
    loaded = open_text(f"text:{tmp_path}/text.txt", context=8).val[MicroBatch(0, 0, 0, 0, (0, -1))]
    assert (loaded.targets[0] >= 0).all()
    assert (loaded.targets[1] == -1).all()
    assert (loaded.inputs[1] == 0).all()


def test_a_file_that_shrinks_or_goes_away_ends_the_batches(tmp_path):
    content = made(tmp_path)
    text = open_text(f"text:{tmp_path}/text.txt", context=8)
    (tmp_path / "text.txt").write_bytes(content[:100])
    with pytest.raises(ValueError, match="the text is shorter than it was when the run began"):
        batches(text)
    (tmp_path / "text.txt").unlink()
    with pytest.raises(ValueError, match=r"the text cannot be read any more: .*text\.txt"):
        batches(text)


def test_predictions_in_a_row():
    logits, targets = torch.randn(2, 3, 5), torch.arange(6).reshape(2, 3)
    outputs, flat = flatten_predictions(logits, targets)
    assert torch.equal(outputs[4], logits[1, 1])
    assert flat[4] == targets[1, 1]
    images, mixed = torch.randn(4, 5), torch.rand(4, 5)
    assert all(torch.equal(a, b) for a, b in zip(flatten_predictions(images, mixed), (images, mixed), strict=True))


WRONG = {
    "no file": ("text:nowhere.txt", {}, FileNotFoundError, "there is no file or folder nowhere.txt: give the path"),
    "empty file": ("text:empty.txt", {}, ValueError, "empty.txt is empty: give a text"),
    "folder without text": ("text:folder", {}, FileNotFoundError, r"folder has no file \*.txt"),
    "no name": ("text:", {}, FileNotFoundError, "there is no file or folder : give the path of a text"),
    "broken link": ("text:broken", {}, ValueError, "broken/gone.txt is not a file, nor a link to one: remove it"),
    "pipe": ("text:pipe", {}, ValueError, "pipe/a.txt is not a file, nor a link to one: remove it"),
    "loop": ("text:loop", {}, ValueError, r"loop/loop links to .*loop, and is within it: remove the link"),
    "short": ("text:text.txt", {"context": 461}, ValueError, "context=461 is too much for .* with 1000 bytes"),
    "not UTF-8": ("text:text.txt", {"vocabulary": "characters"}, ValueError, "text.txt is not UTF-8 .*: convert it"),
    "context": ("text:text.txt", {"context": 0}, ValueError, "context=0 is not positive"),
    "vocabulary": ("text:text.txt", {"vocabulary": "words"}, ValueError, "vocabulary='words' is unknown: choose from"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refused(case, tmp_path, monkeypatch):
    source, options, kind, message = WRONG[case]
    monkeypatch.chdir(tmp_path)
    made(tmp_path)
    (tmp_path / "empty.txt").touch()
    for name in ("folder", "broken", "pipe", "loop"):
        (tmp_path / name).mkdir()
        made(tmp_path / name, name="text.txt" if name != "folder" else "text.md")
    (tmp_path / "broken" / "gone.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe" / "a.txt")
    (tmp_path / "loop" / "loop").symlink_to(".")
    with pytest.raises(kind, match=message):
        open_text(source, **{"context": 8, **options})
    assert len(open_text("text:text.txt", context=460).train) == 1


def test_python_without_its_reference(monkeypatch):
    whole = builtins.__import__

    def without(name, *args, **options):
        if name.startswith("pydoc_data"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return whole(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FileNotFoundError, match=r"pydoc_data/topics.py of Python, which this installation lacks"):
        open_text("python-docs", context=8)


@pytest.mark.parametrize("size", [1000, 1003, 1013])
def test_halves_of_validation_share_no_target_and_leave_none_out(tmp_path, size):
    content = made(tmp_path, size)
    text = open_text(f"text:{tmp_path}/text.txt", context=16)
    rest, first_half = hold_out(text)
    halves = first_half, rest.val
    assert sum(map(len, halves)) == len(text.val)
    targets = [
        torch.cat([batch.targets.flatten() for batch in val_batches(half, batch_size=2, device=CPU)]) for half in halves
    ]
    first, second = (bytes(each[each >= 0].tolist()) for each in targets)
    assert first + second == content[size - int(0.08 * size) + 1 :]
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    inputs = torch.cat([batch.inputs for half in halves for batch in val_batches(half, batch_size=1, device=CPU)])
    whole = torch.cat([batch.inputs for batch in val_batches(text.val, batch_size=1, device=CPU)])
    assert torch.equal(inputs, whole)
