"""Pairs for translation, and text and models of Hugging Face, through the commands."""

import json
import random

import pytest
import torch
from command_line import run
from torch.nn.functional import cross_entropy

from fused_lwlr.data import MicroBatch, MicroBatchSampler, open_text
from fused_lwlr.models.build import build
from fused_lwlr.runs.metrics import read_records
from fused_lwlr.training.losses import flatten_predictions

PAIRS = "--data pairs:pairs.tsv --context 6 --vocabulary characters --model seq2seq1 --model-args width=16"
HF = (
    "--data hf:data --tokenizer tokenizer.json --context 8 --model hf:gpt2 --model-args n_layer=1 "
    "--model-args n_embd=16 --model-args n_head=2"
)
OPTIONS = "--device cpu --steps 30 --log-every 10 --eval-every 10 --batch-size 16 --optimizer adamw --lr 0.01"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcd", k=drawn.randint(2, 5))) for _ in range(400)]
    (tmp_path / "pairs.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    return tmp_path


@pytest.fixture
def hub(place, monkeypatch, third_party):
    """A tokenizer and a data set in the current folder."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("datasets")
    third_party("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place / "cache"))
    text = "".join(f"{i} bottles of beer on the wall\n" for i in range(300))
    (place / "data").mkdir()
    (place / "data" / "train.txt").write_text(text)
    (place / "data" / "test.txt").write_text(text[-900:])
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator([text], trainer)
    made.save(str(place / "tokenizer.json"))
    return place


def test_a_model_of_pairs(place):
    output = run(f"train {PAIRS} {OPTIONS} --out run --calibration-steps 2 --micro-batch 8").output
    assert "tokens/s" in output
    assert "test at step 10, epoch" in output
    records = read_records(place / "run" / "metrics.jsonl")
    data = open_text("pairs:pairs.tsv", context=6, vocabulary="characters")
    sampler = MicroBatchSampler(len(data.train), seed=0, batch_size=16, micro_batch=16, steps=30)
    tokens = [(data.train[wanted].targets >= 0).sum().item() for wanted in sampler]
    assert [r["tokens"] for r in records if r["kind"] == "train"] == [sum(tokens[i : i + 10]) for i in (0, 10, 20)]
    tested = [r for r in records if r["kind"] == "validation"]
    assert [r["step"] for r in tested] == [10, 20, 30]
    # the last one is the cross entropy of exactly the tokens of the targets
    model = build("seq2seq1", classes=len(data.classes), width=16, **data.sizes).eval()
    model.load_state_dict(torch.load(place / "run" / "model.pt", weights_only=True))
    every = data.val[MicroBatch(0, 0, 0, 0, tuple(range(len(data.val))))]
    losses = cross_entropy(*flatten_predictions(model(every.inputs), every.targets), ignore_index=-1, reduction="none")
    assert tested[-1]["tokens"] == (every.targets >= 0).sum()
    assert tested[-1]["loss"] == pytest.approx(losses.sum().item() / tested[-1]["tokens"], rel=1e-5)
    assert tested[-1]["loss"] < tested[0]["loss"]
    assert "perplexity" in run("train --eval-only --out run").output
    dry = run(f"train {PAIRS} {OPTIONS} --out dry --dry-run").output
    assert "368 pairs to train, 32 to test" in dry


def test_the_methods_before_training_take_pairs(place):
    options = "--init gradinit --gradinit-steps 2 --model-args layernorm=every --label-smoothing 0.1"
    assert "perplexity" in run(f"train {PAIRS} {OPTIONS} --out run --calibration-steps 2 {options}").output
    line = "calibrate --model seq2seq1 --model-args width=16 --data pairs:pairs.tsv --context 6 --steps 2 --out r.json"
    assert "decoder.0.cross.proj.weight" in run(line).output
    layers = json.loads((place / "r.json").read_text())["layers"]
    shapes = {layer["name"]: layer["numel"] for layer in layers}
    assert shapes["encoder.0.attention.qkv.weight[0:16]"] == 256


def test_a_model_of_transformers_on_a_data_set_and_a_tokenizer(hub):
    output = run(f"train {HF} {OPTIONS} --out run --calibration-steps 2").output
    assert "test at step 10, epoch" in output
    tested = [r for r in read_records(hub / "run" / "metrics.jsonl") if r["kind"] == "validation"]
    data = open_text("hf:data", context=8, tokenizer="tokenizer.json")
    assert tested[-1]["tokens"] == len(data.val.tokens) - 1
    assert tested[-1]["loss"] < tested[0]["loss"] - 0.3
    rates = json.loads((hub / "run" / "rates.json").read_text())["layers"]
    assert "transformer.h.0.attn.c_attn.weight[16:32]" in {layer["name"] for layer in rates}
    weights = torch.load(hub / "run" / "model.pt", weights_only=True)
    assert weights["transformer.wte.weight"].shape == (280, 16)
    assert "The training in run is done" in run(f"train {HF} {OPTIONS} --out run --calibration-steps 2").output
    assert "perplexity" in run("train --eval-only --out run").output
    line = HF.replace("--data hf:data", "--data text:data/train.txt")
    assert "transformer.h.0.mlp.c_fc.weight" in run(f"calibrate {line} --steps 2").output


def test_gradinit_scales_a_model_of_transformers(hub):
    options = "--init gradinit --gradinit-steps 2 --rates single"
    assert "perplexity" in run(f"train {HF} {OPTIONS} --out run {options}").output
