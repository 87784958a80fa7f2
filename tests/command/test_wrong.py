"""A wrong command line is answered by one line, in terms of the command line."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import get_worker_info

import fused_lwlr
from fused_lwlr import LayerRates
from fused_lwlr.command.calibrate import _can_be_written
from fused_lwlr.command.group import EXTRA_CLI, PACKAGES, Group
from fused_lwlr.data.sources import Tensors
from fused_lwlr.methods.lwlr.rates import LayerRate
from fused_lwlr.training.setup import check_out

WRONG = [
    # names of models, data, devices and presets
    ("calibrate --model nope",
     "there is no model 'nope': choose from resnet, vit, noshort, short, vit6x64, davidnet, a deep one "),
    ("calibrate --data nowhere",
     "--data nowhere is not a folder of images: give one, digits, glyphs, fashion-mnist, idx:FOLDER, "),
    ("train --data steps/", "--data steps has 0 sub-folder(s): images of two classes at least are needed"),
    ("train --data books", "one folder each; to train on its text files, give --data text:books"),
    ("train --data lr", "--data lr is a file: give the folder that holds one sub-folder of images for each class, or "),
    ("train --data a-{0..2}.tar", "there is no file a-0.tar: give tar files of this machine, not a-{0..2}.tar"),
    ("train --device meta", "--device meta cannot be used here"),
    ("train --model toynet0x16", "there is no model 'toynet0x16': choose from "),
    ("report steps", "steps holds no run (run.json is missing or empty): give the folder (--out) of a training"),
    ("calibrate --device toaster", "--device toaster cannot be used here"),
    ("train --device cpu:3", "--device cpu:3 cannot be used here: all cores together are one device, cpu"),
    ("train --prefetch 7", "--prefetch 7 has no effect with 0 workers: give more, or leave it out"),
    ("train --device cpu:x", "--device cpu:x cannot be used here"),
    ("train --preset resnet50", "there is no preset 'resnet50': did you mean resnet50-"),
    ("train --init gradinit --lr 0", "--init gradinit needs --lr above 0: it lowers the loss after a step at this"),
    ("study lwlr", "there is no study 'lwlr': choose from demo, lwlr-fashion, lwlr-glyphs, lwlr-methods, "),
    ("report nowhere", "nowhere holds no run (run.json is missing or empty): give the folder"),
    # values that are empty, as of a variable of the shell that is not set
    ("train --preset=", "there is no preset '': choose from resnet50-sgd, "),
    ("train --data=", "--data is empty: give a value, or leave it out"),
    ("train --out=", "--out is empty: give a value, or leave it out"),
    ("study methods --quick --out=", ": it is empty: give a folder, or leave it out"),
    ("demo --quick --out=", ": it is empty: give a folder, or leave it out"),
    # numbers
    ("calibrate --steps 0", "--steps 0: "),
    ("train --batch-size 5000", "--batch-size 5000 is more than the 1437 examples of the training set: lower it"),
    ("train --micro-batch 60", "--micro-batch 60 does not divide the 64 examples that each process has of a batch"),
    ("train --epochs 1e308", "--epochs 1e308: must be less than or equal to 1000000000"),
    ("train --seed 99999999999999999999", "--seed 99999999999999999999: must be less than 9223372036854775808"),
    ("train --image-size 400000", "can't allocate memory: you tried to allocate"),
    ("train --image-size 99999999", "--image-size 99999999: must be less than or equal to 1000000"),
    ("train --batch-size 9999999999999", "--batch-size 9999999999999: must be less than or equal to 1000000000000"),
    ("train --model toynet2x999999999999999999",
     "--model toynet2x999999999999999999 is too large: numbers in a name must be at most 9,999"),
    ("train --model vit9999x9999984", "--model vit9999x9999984 is too large: numbers in a name must be at most 9,999"),
    ("calibrate --model gpt10000 --data python-docs", "--model gpt10000 is too large: numbers in a name must be at"),
    ("calibrate --model gpt2 --data python-docs --model-args width=4000000000000000000000",
     "--model gpt2 --model-args width=4000000000000000000000 does not fit in memory: give smaller sizes"),
    ("train --data glyphs --image-size 40000", "--image-size 40000 is out of the range of glyphs: give 8 to 1024"),
    (
        "train --batch-size 63 --mixup 0.5",
        "--mixup and --cutmix pair the images of a pass, but it has 63: make it even (--batch-size or --micro-batch)",
    ),
    (
        "train --model timm:vit_tiny_patch16_224 --data synthetic --image-size 8",
        "--image-size 8: timm:vit_tiny_patch16_224 does not take images of this size",
    ),
    ("train --device cpu --loss bce --bce-threshold 0 --label-smoothing 0.1",
     "--bce-threshold 0 counts every class as 1, since --label-smoothing 0.1 makes labels of 10 classes 0.01"),
    ("train --device cpu --loss bce --bce-threshold 0.91 --label-smoothing 0.1",
     "--bce-threshold 0.91 counts every class as 0, since --label-smoothing 0.1 makes labels of 10 classes 0.01 to "),
    ("study methods --seeds 1", "--seeds 1: methods shows a spread over seeds, which takes two at least"),
    # options that do not go together, or have no meaning
    ("train --scaling elr", "--scaling elr needs --goal: the effective learning rate of layers"),
    ("train --layer-decay 0.75 --model toynet2x4 --device cpu",
     "--layer-decay 0.75 needs one list of blocks with nearly all parameters, which toynet2x4 does not have: leave it"),
    ("train --fsdp", "--fsdp shards a model over processes, but there is only one"),
    ("train --augmentation basic", "--augmentation basic is for photographs: the digits take --augmentation none"),
    ("train --device cpu --mean 0.5,0.5,0.4", "--mean 0.5,0.5,0.4 is for photographs: leave it out with --data digits"),
    ("study lwlr-T --model ResNet", "there is no model 'ResNet': choose from resnet, vit, noshort, short, vit6x64, "),
    ("study balance --model vit", "--model vit has no meaning for balance: leave it out"),
    ("study balance-variants --width 1", "--width 1: Input should be greater than or equal to 2"),
    ("study methods --set amp", "--set amp is not of the form NAME=VALUE, such as --set amp=bf16"),
    ("study methods --set amd=bf16 --quick --jobs 1", "--set amd=bf16: there is no such option; did you mean amp?"),
    ("study methods --set batch-size=x --quick", "--set batch-size=x: must be a valid integer"),
    ("study lwlr-fashion --data digits --quick --set warmup_epochs=5", "Error: --set warmup_epochs=5 leaves nothing"),
    ("study methods --set prefetch=0 --quick", "--set prefetch=0: must be greater than or equal to 1"),
    ("study gradinit --set eval_every=5", "--set eval_every=5: gradinit chooses it, has an option for it or does not"),
    ("study gradinit --set eval-epochs=2", "--set eval-epochs=2: gradinit chooses it, has an option for it or does n"),
    ("study methods --set std=0,0,0 --quick", "--set std=0,0,0: all must be from 1e-06 to 1, as pixels are from 0"),
    ("study methods --set power=3 --quick", "--set power=3 is for --schedule polynomial, but --schedule is cosine"),
    # results within images: the next start would take their folder for a class
    ("train --data steps --out steps/a/run", "--out steps/a/run is within --data steps, where it would count as a"),
    ("train --data ./steps/ --out steps --dry-run", "--out steps is within --data ./steps/, where it would count"),
    ("train --data parts --out parts/train/run", "--out parts/train/run is within --data parts, where it would"),
    ("train --data parts --out parts/test", "--out parts/test is within --data parts, where it would count as a"),
    ("train --data parts --out parts/run", "--data parts/train has 0 sub-folder(s): images of two classes at least"),
    ("train --data digits --out digits/run --lr x", "--lr x: must be a valid number"),
    ("train --data hf:parts --out parts/run --tokenizer a.json --model gpt2",
     "--out parts/run is within --data hf:parts, where it would count as data: choose a place outside of it"),
    ("calibrate --data hf:parts --out parts/rates.json --tokenizer a.json --model gpt2",
     "--out parts/rates.json is within --data hf:parts, where it would count as data"),
    ("calibrate --data steps --out steps/a/rates.json",
     "--out steps/a/rates.json is within --data steps, where it would count as an image or a class: choose a place"),
    ("calibrate --data parts --plot parts/train/a/rates.png", "--plot parts/train/a/rates.png is within --data parts"),
    ("calibrate --data parts --out parts/train/rates.json", "--data parts/train has 0 sub-folder(s): images of two"),
    ("calibrate --data steps --out steps/rates.json", "--data steps has 0 sub-folder(s): images of two classes at"),
    ("study lwlr-vs-single --quick --data steps --out steps/a", "--out steps/a is within --data steps, where it would"),
    # text
    ("train --data text: --model gpt2", "--data text: is empty: give a value, or leave it out"),
    ("train --data hf: --model gpt2", "--data hf: is empty: give a value, or leave it out"),
    ("calibrate --data pairs: --model seq2seq1", "--data pairs: is empty: give a value, or leave it out"),
    ("study lwlr-vs-single --data idx:", "--data idx: is empty: give a value, or leave it out"),
    ("train --data text:nowhere.txt --model gpt2", "there is no file or folder nowhere.txt: give the path of a text"),
    ("train --data text:empty.txt --model gpt2", "empty.txt is empty: give a text"),
    ("train --data text:short.txt --model gpt2", "--context 64 is too much for text:short.txt with 90 bytes: it"),
    ("train --data text:short.txt --context 8 --model gpt2",
     "--batch-size 64 is more than the 9 examples of the training"),
    ("train --data text:short.txt --context 8 --batch-size 4", "--model resnet is not for text: give gptN or postlnN"),
    ("train --data text:short.txt --mixup 0.2", "--mixup is for images, not --data text:short.txt"),
    ("train --data text:short.txt --preset resnet50-sgd", "is for images, not --data text:short.txt"),
    ("calibrate --context 8", "--context is for text, not --data digits"),
    ("train --model gpt2", "--model gpt2 is for text: give --data python-docs or --data text:FILE, or another model"),
    ("train --model timm:vit_tiny_patch16_224 --model-args embed_dim=31 --data synthetic --image-size 32",
     "timm:vit_tiny_patch16_224 does not take embed_dim: AssertionError"),
    ("train --data python-docs --model gpt2 --model-args depth=2", "gpt2 does not take depth: choose from width"),
    ("train --data python-docs --model gpt2 --model-args classes=6",
     "--model-args classes=6 follows from other options and the data: leave it out"),
    ("train --data python-docs --model gpt2 --model-args width=6",
     "width=6, heads=4, hidden=24: all must be 1 or more"),
    ("train --data python-docs --model gpt2 --model-args width={[]:1}", "gpt2 takes width as int, and not '{[]:1}'"),
    ("train --data hf:data --model gpt2", "--data hf:data needs a tokenizer: --tokenizer NAME or FILE"),
    ("calibrate --tokenizer a.json", "--tokenizer is for text, not --data digits"),
    ("calibrate --data text:short.txt --vocabulary words", "--vocabulary words: must be 'bytes' or 'characters'"),
    ("train --data text:short.txt --model gpt2 --tokenizer a.json --vocabulary characters",
     "--tokenizer a.json and --vocabulary characters exclude each other: give one"),
    ("train --data text:short.txt --val-data a.tsv", "--val-data is for images or pairs, not --data text:short.txt"),
    ("train --data pairs:short.txt --model seq2seq1", "line 1 of short.txt needs exactly one tab: give SOURCE, a tab,"),
    ("train --data pairs:two.tsv --batch-size 1 --model gpt2",
     "--model gpt2 is not for pairs: give seq2seqN with N blocks a side"),
    ("train --data pairs:two.tsv --model seq2seq1 --context 2", "--context 2 is less than the longest sentence of pai"),
    ("train --model seq2seq1", "--model seq2seq1 is for pairs: give --data pairs:FILE, or another model"),
    ("train --model hf:gpt2", "--model hf:gpt2 is for text: give --data python-docs or --data text:FILE, or another"),
    ("calibrate --model-args width=8", "--model-args is for models of timm (--model timm:NAME), not resnet"),
    ("study lwlr-vs-single --data python-docs", "--data python-docs is text: lwlr-vs-single needs images"),
    ("study elr-language --data pairs:two.tsv", "--data pairs:two.tsv is pairs: elr-language needs text"),
    ("study elr-translation --data python-docs", "--data python-docs is text: elr-translation needs pairs"),
    ("study elr-language --data digits", "--data digits is images: elr-language needs text"),
    ("study elr-language --epochs 2", "--epochs 2 has no meaning for elr-language: leave it out"),
    ("study lwlr-vs-single --steps 2", "--steps 2 has no meaning for lwlr-vs-single: leave it out"),
    # unknown options and commands
    ("train --learning-rate 1", "No such option: --learning-rate. Did you mean --lr?"),
    ("train --resume", "No such option: --resume. Did you mean --out?"),
    ("study", "Missing argument 'NAME': One of demo, lwlr-fashion, lwlr-glyphs, "),
    ("train --epoch 3", "No such option: --epoch (Possible options: --epochs, "),
    ("calibrate --wd 1", "No such option: --wd"),
    ("demo --paint red", "No such option: --paint"),
    ("trian", "No such command 'trian'. Did you mean 'train'?"),
    ("train extra", "Got unexpected extra argument"),
    # files
    ("train --config steps", "--config steps: must end in .toml, .yaml, .yml; a run's is steps/recipe.toml"),
    ("train --weights books --device cpu", "--weights books: it is a folder; give a file such as model.pt of a run"),
    ("train --rates nowhere.json",
     "--rates nowhere.json: there is no such file; give one that calibrate"),
    ("train --rates bad.json --device cpu",
     "--rates bad.json does not hold layer rates, as calibrate writes them: it has no"),
    ("train --model vit --rates other.json --device cpu",
     "--rates other.json is not for --model vit, which has no no.such.weight: calibrate this model"),
    ("train --rates few.json --device cpu",
     "--rates few.json is not for --model resnet, whose layer blocks.0.bn1.bias is not in it: cal"),
    ("calibrate --out / --device cpu", "--out /: file '/' is a directory"),
    ("calibrate --plot rates.xyz --device cpu", "--plot rates.xyz: must end in .eps, "),
    ("calibrate --plot . --device cpu", "--plot .: file '.' is a directory"),
    ("calibrate --out bad.json/rates.json", "--out bad.json/rates.json cannot be written: choose another file"),
    ("calibrate --plot bad.json/rates.png", "--plot bad.json/rates.png cannot be written: choose another file"),
    ("calibrate --out a.png --plot steps/../a.png", "--plot steps/../a.png is the file of --out: give another one"),
    ("study balance --quick --jobs 1 --out bad.json", "bad.json/jobs: Not a directory"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), WRONG, ids=[line for line, _ in WRONG])
def test_one_line_without_a_traceback(run, line, message, tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    LayerRates([LayerRate("no.such.weight", 1.0, 1, 1.0, "weight")], 1).to_json(tmp_path / "other.json")
    LayerRates([LayerRate("conv.weight", 1.0, 1, 1.0, "weight")], 1).to_json(tmp_path / "few.json")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "lr").touch()
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "one.txt").touch()
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "run.json").write_text("[]")
    (tmp_path / "parts" / "train").mkdir(parents=True)
    (tmp_path / "two.tsv").write_text("one\ttwo\nthree\tfour\n")
    (tmp_path / "short.txt").write_text("short " * 15)
    stderr = run(line, 2).stderr.strip()
    assert stderr.startswith("Error: ")
    assert message in stderr
    assert "\n" not in stderr
    assert not (tmp_path / "runs" / "train").exists()


def test_a_value_with_a_tilde_is_in_the_home_folder(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "a.toml").write_text("data = '~/photos'")
    assert f"--config {tmp_path}/home/a.toml: there is no such file" in run("train --config=~/a.toml", 2).stderr
    assert f"--config {tmp_path}/home/a.toml: there is no such file" in run("train --config ~/a.toml", 2).stderr
    assert f"--data {tmp_path}/home/photos is not a folder" in run("train --config a.toml", 2).stderr
    run("calibrate --model resnet8x2 --steps 1 --device cpu --out=~/rates.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml", "home"]


def test_data_by_name_are_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    check_out("digits", "digits/run")
    check_out("text:digits", "digits/run")


@pytest.mark.parametrize("line", ["calibrate --out x/rates.json", "train --calibration-steps 1 --out x"])
def test_rates_are_complete_or_absent(run, line, tmp_path, monkeypatch):
    def half(rates, path):
        Path(path).write_text('{"steps": ')
        raise OSError("a kill")

    monkeypatch.setattr(LayerRates, "to_json", half)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "rates.json").write_text("before")
    assert run(f"{line} --model resnet8x2 --steps 1 --device cpu", 2).stderr == "Error: a kill\n"
    assert (tmp_path / "x" / "rates.json").read_text() == "before"
    assert not list((tmp_path / "x").glob("*.partial"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a file that is not to be replaced")
def test_rates_are_written_to_a_pipe(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    run("calibrate --model resnet8x2 --steps 1 --device cpu --out pipe")
    assert (tmp_path / "pipe").is_fifo()
    assert os.read(reader, 10) == b'{\n "steps"'
    os.close(reader)


@pytest.mark.parametrize(
    ("path", "closed", "wanted"),
    [("new", "", True), ("new/er/file", "", True), ("new/er", ".", False), ("file/under", "", False),
     ("file", "file", False), ("file", ".", False), ("pipe", ".", True), ("pipe", "pipe", False)],
)  # fmt: skip
def test_files_that_can_be_written(path, closed, wanted, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("os.access", lambda place, mode: not closed or place != tmp_path / closed)
    assert _can_be_written(tmp_path / path) == wanted


UNEVEN = """
from dataclasses import replace
from fused_lwlr.data import Stream, open_data

def opened(data, **options):
    digits = open_data(data, **options)
    batch = digits.val.inputs[:8], digits.val.targets[:8]
    return replace(digits, val=Stream(8, lambda part: [batch] * part.rank))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--goal 0.1", "--goal is for"),
        ("--data nowhere", "--data nowhere is not a folder"),
        # a sharded forward pass waits for all processes
        ("--eval-only --fsdp --model vit2x16 --loader uneven:opened", "process 0 has fewer batches to test than anoth"),
    ],
)
def test_processes_of_torchrun_tell_an_error_once(line, message, tmp_path, tmp_path_factory):
    """The error is found before or after the processes form a group."""
    modules = tmp_path_factory.mktemp("modules")
    (modules / "uneven.py").write_text(UNEVEN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "fused_lwlr", "train", "--device", "cpu", *line.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(fused_lwlr.__file__).parents[1]), str(modules), *sys.path])
    result = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode != 0
    assert result.stderr.count(f"Error: {message}") == 1
    assert not list(tmp_path.iterdir())


def test_the_error_of_one_process_is_shown(run, monkeypatch):
    waited = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("time.sleep", waited.append)
    assert run("train --goal 0.1", 2).stderr.startswith("Error: --goal is for")
    assert waited == [10]


def test_a_field_of_splits_is_no_option(run, tmp_path, monkeypatch):
    (tmp_path / "sided.py").write_text(
        "from dataclasses import replace\nfrom fused_lwlr.data import open_data\n"
        "opened = lambda data, **options: replace(open_data(data, **options), image_size=8.0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    stderr = run("train --loader sided:opened --device cpu", 2).stderr
    assert "--loader sided:opened returned Splits whose 'image_size' is 8.0: give an int, at least 1" in stderr


def test_a_loader_takes_what_open_data_takes(run, tmp_path, monkeypatch):
    (tmp_path / "short.py").write_text("def opened(data, image_size):\n    raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    stderr = run("train --loader short:opened --device cpu", 2).stderr
    assert "--loader short:opened must take the arguments of fused_lwlr.data.open_data: got an unexpected" in stderr


def test_divergence(run):
    stderr = run("train --model resnet8x2 --rates single --lr 1e12 --warmup-epochs 0 --epochs 1 --device cpu", 1).stderr
    assert "try a lower learning rate (--lr)" in stderr


def test_a_full_disk(run, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    stderr = run("train --model resnet8x2 --steps 1 --rates single --device cpu", 2).stderr
    assert stderr == "Error: [Errno 28] No space left on device: make room on the disk, and type the command again\n"


@pytest.mark.parametrize("reason", [errno.EAGAIN, errno.EMFILE])
def test_too_many_processes(reason, run, monkeypatch):
    def refused(process):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refused)
    stderr = run("train --model resnet8x2 --steps 1 --rates single --device cpu --workers 1", 2).stderr
    assert f"{os.strerror(reason)}: start fewer processes (train: --workers, study: --jobs), or raise" in stderr


def test_too_little_memory(run, monkeypatch):
    def full(recipe):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")

    monkeypatch.setattr("fused_lwlr.runs.run.run", full)
    assert run("train", 2).stderr == (
        "Error: CUDA out of memory. Tried to allocate 2.00 GiB. "
        "Take fewer images at a time (train: --micro-batch), or smaller ones\n"
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers must have the class that dies")
def test_a_worker_that_is_killed(run, monkeypatch):
    whole = Tensors.__getitem__

    def dying(self, wanted):
        if get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, wanted)

    monkeypatch.setattr(Tensors, "__getitem__", dying)
    stderr = run("train --model resnet8x2 --steps 2 --rates single --device cpu --workers 1", 2).stderr
    assert re.fullmatch(
        r"Error: DataLoader worker \(pid(\(s\))? \d+\) .*: if memory ran out, take fewer of them "
        r"\(train: --workers\) and type the command again\n",
        stderr,
    ), stderr


def test_a_bug_keeps_its_traceback(run, monkeypatch):
    def broken(recipe):
        raise AttributeError("a bug")

    monkeypatch.setattr("fused_lwlr.runs.run.run", broken)
    with pytest.raises(AttributeError, match="a bug"):
        run("train")


def test_all_packages_of_the_extra_are_named():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"\ncli = \[\n(.*?)\n\]", text, re.DOTALL)[1]
    packages = {PACKAGES.get(name, name).lower() for name in (*EXTRA_CLI, "typer")}
    assert packages == set(re.findall(r"\"([\w-]+)>=", extra))


@pytest.mark.parametrize(("line", "package"), [("calibrate --plot rates.png", "matplotlib"), ("demo", "pandas")])
def test_a_missing_extra_is_named(run, monkeypatch, line, package):
    gone = [name for name in sys.modules if name.partition(".")[0] == package or name.startswith("fused_lwlr.papers.")]
    for name in gone:
        monkeypatch.delitem(sys.modules, name)

    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name == package:
                raise ModuleNotFoundError(f"No module named '{package}'", name=name)

    monkeypatch.setattr(sys, "meta_path", [Hidden(), *sys.meta_path])
    assert run(line, 2).stderr.strip() == (
        f"Error: {package} is not installed: pip install '.[cli]' in the folder of the sources of fused_lwlr"
    )


def test_the_end_of_another_process_is_no_bug(monkeypatch):
    error = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33938.")
    with pytest.raises(RuntimeError, match="closed by peer"):
        Group()._message(error, [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Group()._message(error, []) == (
        "another process of the training ended: its message, or that of torchrun, has the reason", 1
    )  # fmt: skip
