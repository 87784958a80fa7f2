"""Pairs for translation: every pair is there, padding is no target, and validation is apart."""

import pytest
import torch

from fused_lwlr.data import MicroBatch, MicroBatchSampler, open_text, train_batches, val_batches
from fused_lwlr.data.pairs import BEGIN, END, PAD, SPECIAL, read_pairs
from fused_lwlr.models.build import build

CPU = torch.device("cpu")
# the format of Multi30k
MULTI30K = [
    ("Zwei junge weiße Männer sind im Freien.", "Two young, White males are outside."),
    ("Ein Mann schläft.", "A man sleeps on a bench, wrapped in a blue blanket."),
    ("Hunde!", "Dogs!"),
]


def made(folder, pairs, name="pairs.tsv"):
    # a byte order mark is no character of the text
    (folder / name).write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8-sig")
    return f"pairs:{folder / name}"


def told(data, ids):
    """The sentence that numbers stand for."""
    names = [data.classes[i] for i in ids if i >= len(SPECIAL)]
    if names and names[0].startswith("b'"):
        return b"".join(map(eval, names)).decode()
    return "".join(names)


def sentences(data, batches):
    """Source and target of each row, after a check of how they are laid out."""
    for batch in batches:
        for (source, target), wanted in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            if wanted[0] < 0:
                continue
            end, last = source.index(END), wanted.index(END)
            assert set(source[end + 1 :]) <= {PAD}
            assert set(wanted[last + 1 :]) <= {-1}
            assert target[: last + 1] == [BEGIN, *wanted[:last]]
            assert set(target[last + 1 :]) <= {PAD}
            yield told(data, source[:end]), told(data, wanted[:last])


@pytest.mark.parametrize("vocabulary", ["bytes", "characters"])
def test_every_pair_is_there(vocabulary, tmp_path):
    pairs = [(f"{i} {source}", f"{target} {i}") for i in range(9) for source, target in MULTI30K]
    data = open_text(made(tmp_path, pairs), context=64, vocabulary=vocabulary)
    assert (len(data.train), len(data.val)) == (25, 2)
    sampler = MicroBatchSampler(25, seed=0, batch_size=5, micro_batch=5, steps=5)
    assert sorted(sentences(data, train_batches(data.train, sampler, device=CPU))) == sorted(pairs[:25])
    assert list(sentences(data, val_batches(data.val, batch_size=5, device=CPU))) == pairs[25:]
    letters = set("".join(a + b for a, b in pairs))
    assert len(data.classes) == 3 + (256 if vocabulary == "bytes" else len(letters))


def test_two_files_and_pairs_to_test_on(tmp_path):
    one = open_text(made(tmp_path, MULTI30K), context=64)
    for side, name in enumerate(("a.de", "a.en")):
        (tmp_path / name).write_text("\n".join(pair[side] for pair in MULTI30K), encoding="utf-8")
    two = open_text(f"pairs:{tmp_path}/a.de,{tmp_path}/a.en", context=64)
    every = MicroBatch(0, 0, 0, 0, (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.train[every][:2], two.train[every][:2], strict=True))
    apart = open_text(made(tmp_path, MULTI30K), context=64, val_data=made(tmp_path, MULTI30K[::-1], "val.tsv"))
    assert (len(apart.train), len(apart.val)) == (3, 3)
    assert list(sentences(apart, val_batches(apart.val, batch_size=2, device=CPU))) == MULTI30K[::-1]


def test_a_row_without_a_pair_is_no_target_and_computes(tmp_path):
    data = open_text(made(tmp_path, MULTI30K), context=64)
    loaded = data.val[MicroBatch(0, 0, 0, 0, (0, -1))]
    assert (loaded.targets[1] == -1).all()
    model = build("seq2seq1", classes=len(data.classes), width=8, **data.sizes)
    assert model(loaded.inputs).isfinite().all()


def test_a_line_ends_at_a_newline_alone(tmp_path):
    """A carriage return before it belongs to it, and the last sentences may be empty."""
    (tmp_path / "a.de").write_bytes(b"one\rtwo\n\n")
    (tmp_path / "a.en").write_bytes(b"eins\r\n\r\n")
    assert read_pairs(f"{tmp_path}/a.de,{tmp_path}/a.en") == [("one\rtwo", "eins"), ("", "")]


WRONG = {
    "no file": ("nowhere.tsv", {}, FileNotFoundError, "there is no file nowhere.tsv: give pairs:FILE.tsv or pairs:SO"),
    "no tab": ("three.txt", {}, ValueError, "line 2 of three.txt needs exactly one tab: give SOURCE, a tab, TARGET"),
    "two tabs": ("tabs.txt", {}, ValueError, "line 1 of tabs.txt needs exactly one tab"),
    "long": ("pairs.tsv", {"context": 51}, ValueError, "context=51 is less than the longest sentence of pairs:pairs.t"
             "sv, of 52 tokens with its end: give 52 or more"),
    "lines": ("three.txt,tabs.txt", {}, ValueError, "three.txt has 3 lines, but tabs.txt 1: give one for each"),
    "one pair": ("one.tsv", {}, ValueError, "one.tsv has 1 pair: give more"),
    "not UTF-8": ("latin", {}, ValueError, "latin is not UTF-8 .*: convert it"),
    "both": ("pairs.tsv", {"tokenizer": "x", "vocabulary": "characters"}, ValueError, "tokenizer=x and vocabulary=char"
             "acters exclude each other: give one"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refused(case, tmp_path, monkeypatch):
    source, options, kind, message = WRONG[case]
    monkeypatch.chdir(tmp_path)
    made(tmp_path, MULTI30K)
    made(tmp_path, MULTI30K[:1], "one.tsv")
    (tmp_path / "three.txt").write_text("a\tb\nb\nc\n")
    (tmp_path / "tabs.txt").write_text("a\tb\tc\n")
    (tmp_path / "latin").write_bytes("ä\tö\n".encode("latin-1"))
    with pytest.raises(kind, match=message):
        open_text(f"pairs:{source}", **{"context": 64, **options})
