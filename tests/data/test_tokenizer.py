"""Text through a trained tokenizer, and data sets of the package datasets, from folders: no network is asked."""

import os
import sys

import numpy as np
import pytest

from fused_lwlr.data import open_text
from fused_lwlr.data.vocabulary import TOGETHER, Tokenizer

LINES = [f"{i} bottles of beer on the wall, {i} bottles of beer" for i in range(60)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Writes nothing outside the test folder, and downloads nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "fused_lwlr" / "tokens"


@pytest.fixture
def tokenizer(tmp_path):
    """Byte-pair encoding, saved with settings that would truncate, pad and add special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, special_tokens=["<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator(LINES, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(4)
    made.enable_padding(length=50)
    made.save(str(tmp_path / "tokenizer.json"))
    return made


def written(tokenizer, tokens):
    return tokenizer.decode(tokens[:].tolist())


@pytest.mark.parametrize(
    ("given", "name"), [("tokenizer.json", "text.txt"), (".", "text.txt"), (".", os.fsdecode(b"\xff.txt"))]
)
def test_a_file_comes_back_whole_from_its_tokens(given, name, tokenizer, tmp_path, cache):
    # more text than one call encodes, in several scripts, without a newline at the end
    text = "\r\n".join([*LINES, "ünï €"] * 40) + "\n" * 5 + "end"
    (tmp_path / name).write_bytes(text.encode())
    data = open_text(f"text:{tmp_path}/{name}", context=8, tokenizer=str(tmp_path / given))
    tokens = data.train.tokens
    assert written(tokenizer, tokens) == text
    assert len(tokens) < len(text) / 2
    assert len(data.classes) == tokenizer.get_vocab_size() == 300
    assert tokens.dtype == np.uint16
    [file] = cache.glob("*.bin")
    assert file.stat().st_size == 2 * len(tokens)


def test_tokens_are_made_once_and_again_after_a_change(tokenizer, tmp_path, cache, monkeypatch):
    calls = []
    whole = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, documents: calls.append(1) or whole(self, documents))

    def opened():
        return open_text(f"text:{tmp_path}/text.txt", context=8, tokenizer=str(tmp_path / "tokenizer.json"))

    (tmp_path / "text.txt").write_text("\n".join(LINES))
    first, second = opened(), opened()
    assert len(calls) == 1
    assert first.train.tokens.paths == second.train.tokens.paths
    (tmp_path / "text.txt").write_text("\n".join(LINES * 2))
    assert written(tokenizer, opened().train.tokens) == "\n".join(LINES * 2)
    assert len(calls) == len(list(cache.glob("*.bin"))) == 2
    # as `cp -p` does
    status = (tmp_path / "text.txt").stat()
    (tmp_path / "text.txt").write_text("\n".join(reversed(LINES * 2)))
    os.utime(tmp_path / "text.txt", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert written(tokenizer, opened().train.tokens) == "\n".join(reversed(LINES * 2))


@pytest.mark.usefixtures("tokenizer")
def test_documents_are_read_as_they_are_needed(tmp_path):
    """In pieces, since all of the text at once would not fit in memory."""
    read = iter(range(10 * TOGETHER))
    found = Tokenizer(str(tmp_path / "tokenizer.json")).encode(f"{i} bottles" for i in read)
    next(found)
    assert next(read) == TOGETHER
    assert len(list(found)) == 10 * TOGETHER - 2


def test_pairs_are_tokenized_one_by_one(tokenizer, tmp_path):
    pairs = list(zip(LINES, LINES[::-1], strict=True))
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs))
    data = open_text(f"pairs:{tmp_path}/pairs.tsv", context=40, tokenizer=str(tmp_path / "tokenizer.json"))
    assert data.classes[:4] == ("<pad>", "<begin>", "<end>", "<s>")
    for i, pair in enumerate(pairs):
        for side, text in zip((data.train.source, data.train.target), pair, strict=True):
            assert tokenizer.decode([token - 3 for token in side[i][:-1]]) == text


@pytest.mark.parametrize("kind", ["folder of files", "saved", "saved split"])
def test_data_sets_of_a_folder(kind, tokenizer, tmp_path):
    datasets = pytest.importorskip("datasets")
    name = f"hf:{tmp_path}/data"
    if kind == "folder of files":
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "train.txt").write_text("\n".join(LINES))
        (tmp_path / "data" / "validation.txt").write_text("\n".join(LINES[:9]))
    else:
        train = datasets.Dataset.from_dict({"text": LINES, "id": range(len(LINES))})
        val = train.select(range(9))
        made = datasets.DatasetDict({"train": train, "test": val}) if kind == "saved" else train
        made.save_to_disk(str(tmp_path / "data"))
    data = open_text(name, context=8, tokenizer=str(tmp_path / "tokenizer.json"))
    assert written(tokenizer, data.train.tokens) == "".join(f"{line}\n" for line in LINES)
    tokens = data.val.tokens
    if kind == "saved split":
        assert tokens is data.train.tokens
        assert data.val.begin == len(tokens) - int(0.08 * len(tokens))
    else:
        assert written(tokenizer, tokens) == "".join(f"{line}\n" for line in LINES[:9])
        assert (data.train.begin, data.train.end) == (0, len(data.train.tokens))


def test_a_folder_with_the_name_of_a_file_format(tokenizer, tmp_path, monkeypatch):
    """load_dataset("text") would load all text files of the current folder."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "some.txt").write_text("\n".join(LINES))
    (tmp_path / "other.txt").write_text("something else")
    data = open_text("hf:text", context=8, tokenizer="tokenizer.json")
    assert written(tokenizer, data.train.tokens) == "".join(f"{line}\n" for line in LINES)


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf:owner/name", ("owner/name",)), ("hf:owner/name/config", ("owner/name", "config")),
        ("hf:name", ("name",)),
    ],
)  # fmt: skip
def test_names_of_the_hub(source, asked, tokenizer, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    found = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": LINES})})
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given: calls.append(given) or found)
    data = open_text(source, context=8, tokenizer=str(tmp_path / "tokenizer.json"))
    assert calls == [asked]
    assert data.name == source
    assert written(tokenizer, data.train.tokens).startswith(LINES[0])


def wrong_column(folder, datasets):
    datasets.Dataset.from_dict({"sentence": LINES}).save_to_disk(str(folder / "data"))


def no_training(folder, datasets):
    data = datasets.Dataset.from_dict({"text": LINES})
    datasets.DatasetDict({"test": data}).save_to_disk(str(folder / "data"))


def no_text(folder, datasets):
    datasets.Dataset.from_dict({"text": [*LINES * 20, None]}).save_to_disk(str(folder / "data"))


def no_json(folder, datasets):
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text('{"text": "beer"}\n{"text"')


def words(folder, datasets):
    tokenizers = pytest.importorskip("tokenizers")
    for name, known in (("none", {}), ("one", {"beer": 0})):
        tokenizers.Tokenizer(tokenizers.models.WordLevel(known)).save(str(folder / f"{name}.json"))


def latin(folder, datasets):
    (folder / "latin.txt").write_bytes("ümlaut".encode("latin-1"))


WRONG = {
    "no text": (no_text, "hf:data", "tokenizer.json", ValueError, "^document 1200 .the first is 0. is None, and"),
    "torn": (no_json, "hf:data", "tokenizer.json", FileNotFoundError, r"^data=hf:data cannot be loaded: .*JSON parse"),
    "no name": (None, "hf:", "tokenizer.json", ValueError, "^data=hf: lacks a name: give hf:OWNER/NAME"),
    "no tokens": (words, "text:text.txt", "none.json", ValueError, "^tokenizer=none.json has no tokens: train it"),
    "unknown": (words, "text:text.txt", "one.json", ValueError, r"^tokenizer=one.json does not fit the text"),
    "no tokenizer": (None, "hf:data", None, ValueError, "data=hf:data needs a tokenizer: tokenizer=NAME or FILE"),
    "not there": (None, "hf:no/where", "tokenizer.json", FileNotFoundError, "data=hf:no/where cannot be loaded"),
    "column": (wrong_column, "hf:data", "tokenizer.json", ValueError, "hf:data has no column 'text' but sentence"),
    "training": (no_training, "hf:data", "tokenizer.json", ValueError, "hf:data has no split 'train' but test"),
    "tokenizer": (None, "text:text.txt", "no/such", ValueError, "tokenizer=no/such cannot be loaded: give a file"),
    "no json": (None, "text:text.txt", "text.txt", ValueError, "tokenizer=text.txt cannot be loaded: give a file"),
    "not UTF-8": (latin, "text:latin.txt", "tokenizer.json", ValueError, "latin.txt is not UTF-8 .* and no tokenizer$"),
    "short": (None, "text:text.txt", "tokenizer.json", ValueError, "context=8 is too much for .* with 15 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.usefixtures("tokenizer")
def test_refused(case, tmp_path, monkeypatch):
    make, source, tokenizer, kind, message = WRONG[case]
    datasets = pytest.importorskip("datasets")
    # huggingface_hub reads the environment on import, so set its constant
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("beer on the wall, ümlaut")
    if make is not None:
        make(tmp_path, datasets)
    with pytest.raises(kind, match=message) as caught:
        open_text(source, context=8, tokenizer=tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("missing", "source"), [("tokenizers", "python-docs"), ("datasets", "hf:some/data")])
def test_a_missing_package_is_named_with_its_extra(missing, source, tmp_path, monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{missing} is not installed: pip install '\.\[hf\]'"):
        open_text(source, context=8, tokenizer=str(tmp_path / "tokenizer.json"))
