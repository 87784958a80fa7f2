"""Calibration of timm's models at 224 x 224, on photographs, against the patterns and values of the paper."""

import numpy as np
import pytest


@pytest.fixture(scope="module")
def rates_of(timm):
    pytest.importorskip("sklearn")
    from bench import calibrate_timm

    return calibrate_timm.rates_of


@pytest.mark.long
def test_resnet50(rates_of, tmp_path):
    rates = rates_of("resnet50", steps=2, batch_size=8)
    weights = [layer for layer in rates.layers if layer.kind == "weight"]
    assert len(rates) == 161
    # timm starts the last scale of each block at 0, which would leave a hundred parameters without a gradient
    assert not rates.unmeasured
    # paper: 0.038 and 0.098
    assert rates["conv1.weight"] == min(layer.eta for layer in weights)
    assert 0.02 < rates["conv1.weight"] < 0.06
    assert rates["conv1.weight"] < rates["bn1.weight"] < 0.15
    # rates rise with depth, and the first convolution of a bottleneck is above the next two
    thirds = [np.mean([layer.eta for layer in weights[i : i + 17]]) for i in (0, 17, 34)]
    assert thirds[0] < thirds[1] < thirds[2]
    for block in ("layer2.1", "layer3.1", "layer3.4", "layer4.1"):
        assert rates[f"{block}.conv1.weight"] > max(rates[f"{block}.conv2.weight"], rates[f"{block}.conv3.weight"])
    rates.plot(tmp_path / "resnet50.png")
    assert (tmp_path / "resnet50.png").stat().st_size > 10_000


@pytest.mark.long
def test_vit_small(rates_of):
    rates = rates_of("vit_small_patch16_224", steps=2, batch_size=8)
    # paper: 0.012, 0.16 and 0.092
    assert rates["cls_token"] == pytest.approx(0.012, rel=0.5)
    assert rates["pos_embed"] == pytest.approx(0.16, rel=0.5)
    assert rates["patch_embed.proj.weight"] == pytest.approx(0.092, rel=0.5)
    # query and key spike above value and projection, and more so with depth
    spikes = []
    for block in (f"blocks.{i}.attn" for i in range(12)):
        query, key, value = (rates[f"{block}.qkv.weight[{at}:{at + 384}]"] for at in (0, 384, 768))
        assert min(query, key) > max(value, rates[f"{block}.proj.weight"])
        spikes.append(query + key)
    assert spikes[0] < spikes[5] < spikes[11]
    # softmax does not see a bias that all keys share
    assert [layer.name for layer in rates.unmeasured] == [f"blocks.{i}.attn.qkv.bias[384:768]" for i in range(12)]
