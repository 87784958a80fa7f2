import sys

import pytest
from run_folder import fill

from fused_lwlr.runs.boards import TensorBoardSink

LAYER = "b0.conv.weight"


@pytest.fixture
def events():
    """Reads the written events."""
    pytest.importorskip("tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(folder):
        found = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
        found.Reload()
        return found

    return read


def scalars(found, tag):
    return [(event.step, round(event.value, 4)) for event in found.Scalars(tag)]


def test_metrics_and_layers(events, tmp_path):
    dashboard = TensorBoardSink(tmp_path, after=None)
    records = fill(tmp_path, [dashboard], steps=4)
    dashboard.close()
    found = events(tmp_path)
    train = [record for record in records if record.kind == "train"]
    assert scalars(found, "train/loss") == [(r.step, round(r.loss, 4)) for r in train]
    assert scalars(found, "train/images_per_second") == [(r.step, round(r.per_second, 4)) for r in train]
    # values that are not finite have no point
    assert [step for step, _ in scalars(found, "train/grad_norm")] == [1, 3, 4]
    assert [step for step, _ in scalars(found, "validation/top1_ema")] == [2, 4]
    layers = [record for record in records if record.kind == "layers"]
    place = layers[0].names.index(LAYER)
    for name in ("elr", "trust_ratio", "multiplier"):
        assert scalars(found, f"{name}/{LAYER}") == [(r.step, round(getattr(r, name)[place], 4)) for r in layers]
        assert [image.step for image in found.Images(f"{name}_by_depth")] == [r.step for r in layers]
    # a chart for each quantity, not for each layer
    assert b"^trust_ratio/" in found.Tensors("custom_scalars__config__")[0].tensor_proto.SerializeToString()


def test_a_resumed_run_hides_events_after_its_checkpoint(events, tmp_path):
    records = [record for record in fill(tmp_path) if record.kind == "train"]
    for after, begun, ended in ((None, 0, 4), (2, 2, 6)):
        dashboard = TensorBoardSink(tmp_path, after=after)
        for record in records[begun:ended]:
            dashboard.add(record)
        dashboard.close()
    assert [step for step, _ in scalars(events(tmp_path), "train/loss")] == [1, 2, 3, 4, 5, 6]


def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"tensorboard is not installed: pip install '\.\[tensorboard\]'"):
        TensorBoardSink(tmp_path, after=None)
