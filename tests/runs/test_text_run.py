"""A model of text is trained by the same command as a model of images, and measured in tokens."""

import signal

import pytest
import torch
from command_line import run
from interrupted import assert_equal_runs, forked, killing, records

from fused_lwlr.data import open_text, val_batches
from fused_lwlr.models.build import build
from fused_lwlr.runs.html_report import write_report
from fused_lwlr.training.trainer import Trainer

COMMAND = (
    "train --model {model} --model-args width=16 --model-args heads=2 --data text:text.txt --context 16 --steps 24 "
    "--optimizer adamw --lr 0.02 --batch-size 16 --device cpu --log-every 6 --checkpoint-minutes 1e-6 --ema 0.5 "
    "--calibration-steps 2 --out {out}"
)


def trained(out, model="gpt2", code=0, more=""):
    return run(f"{COMMAND.format(model=model, out=out)} {more}", code).output


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The current folder: a predictable text, and a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("".join(f"{i} bottles of beer on the wall, " for i in range(150)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "output").write_text(trained("straight"))
        yield folder


def test_the_loss_falls_and_is_reported_per_token(place):
    train = [r for r in records(place / "straight") if r["kind"] == "train"]
    assert [r["tokens"] for r in train] == [6 * 16 * 16] * 4
    assert train[0]["loss"] > 3.5
    assert train[-1]["loss"] < 2.6
    output = (place / "output").read_text()
    assert "tokens/s" in output
    assert "nats a token, perplexity" in output
    assert not any(word in output for word in ("top-1", "images"))
    for record in records(place / "straight"):
        assert not {"top1", "top5", "images"} & record.keys()


@pytest.mark.parametrize("weights", ["model", "ema"])
def test_validation_is_the_cross_entropy_of_every_token(place, weights):
    [*_, found] = [r for r in records(place / "straight") if r["kind"] == "validation" and r["weights"] == weights]
    data = open_text("text:text.txt", context=16)
    model = build("gpt2", context=16, classes=256, width=16, heads=2).double().eval()
    name = {"model": "model.pt", "ema": "model_ema.pt"}[weights]
    model.load_state_dict(torch.load(place / "straight" / name, weights_only=True))
    # one sequence after another, and a shorter one at the end
    content = (place / "text.txt").read_bytes()
    held_out = list(content[len(content) - int(0.08 * len(content)) :])
    total = 0.0
    for begin in range(0, len(held_out) - 1, 16):
        ids = torch.tensor(held_out[begin : begin + 17])
        chances = model(ids[None, :-1])[0].detach().log_softmax(-1)
        total -= sum(float(chances[i, ids[i + 1]]) for i in range(len(ids) - 1))
    assert found["tokens"] == len(held_out) - 1
    assert found["loss"] == pytest.approx(total / (len(held_out) - 1), rel=1e-5)
    assert found["perplexity"] == pytest.approx(torch.tensor(found["loss"]).exp().item(), rel=1e-5)
    assert (
        sum(int((b.targets >= 0).sum()) for b in val_batches(data.val, batch_size=3, device=torch.device("cpu")))
        == (found["tokens"])
    )


def test_a_killed_run_resumes_bit_identically(place):
    assert forked(lambda: (killing(Trainer, "update", 11), trained("killed"))) == -signal.SIGKILL
    assert "Going on after step 10 of 24." in trained("killed", more="--workers 1")
    assert_equal_runs(place / "straight", place / "killed")


def test_it_is_evaluated_every_so_many_steps(place):
    """And at the end; the training is the same to the bit."""
    output = trained("often", more="--eval-every 7")
    straight, often = records(place / "straight"), records(place / "often")
    tested = [r for r in often if r["kind"] == "validation"]
    assert [r["step"] for r in tested] == [step for step in (7, 14, 21, 24) for _ in ("model", "ema")]
    assert all(r["perplexity"] > 1 for r in tested)
    assert "test at step 7, epoch" in output
    assert [r for r in often if r["kind"] != "validation"] == [r for r in straight if r["kind"] != "validation"]
    assert tested[-2:] == [r for r in straight if r["kind"] == "validation"][-2:]


def test_another_text_is_refused(place):
    whole = (place / "text.txt").read_text()
    try:
        (place / "text.txt").write_text(whole * 2)
        assert "sequences: " in trained("straight", code=2)
    finally:
        (place / "text.txt").write_text(whole)


def test_the_report_and_other_screens_are_of_tokens(place):
    page = write_report(place / "straight").read_text()
    for text in ("lowest validation loss", "tokens a second", "perplexity"):
        assert text in page
    assert not any(text in page for text in ("top-1", "images a second", "images skipped"))
    evaluated = run("train --eval-only --out straight").output
    assert "perplexity" in evaluated
    assert "top-1" not in evaluated
    dry = trained("dry", model="postln2", more="--dry-run --model-args layernorm=every")
    assert "sequences to train" in dry
    assert "images" not in dry
    assert not (place / "dry").exists()


def test_gradinit_scales_a_model_of_text(place):
    """It takes second derivatives, which go through attention."""
    options = "--init gradinit --gradinit-steps 2"
    assert "perplexity" in trained("scaled", model="postln2", more=options)
    weights = torch.load(place / "scaled" / "model.pt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_rates_are_calibrated_on_text(place):
    output = run("calibrate --model postln1 --data text:text.txt --context 16 --steps 2").output
    assert "blocks.0.attention.qkv.weight[0:64]" in output
