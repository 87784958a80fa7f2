"""Every token of a step counts alike, however its sentences are split into passes."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from trainings import prepared
from uneven_pairs import one_pass, uneven

from fused_lwlr.training.loop import Loop


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
def test_gradients_equal_one_pass(micro_batch, tmp_path):
    recipe, data = uneven(tmp_path)
    _, [(gradients, loss, tokens)] = one_pass(recipe, data)
    parts = prepared(dataclasses.replace(recipe, micro_batch=micro_batch), data)
    step = parts.gradients(parts.batches())
    for name, param in parts.model.named_parameters():
        torch.testing.assert_close(param.grad, gradients[name], rtol=1e-4, atol=1e-7, msg=name)
    assert step.loss.item() == pytest.approx(loss, rel=1e-6)
    assert step.counted == tokens


def test_rates_equal_one_pass(tmp_path):
    recipe, data = uneven(tmp_path)
    recipe = dataclasses.replace(recipe, rates="layerwise", calibration_steps=2)
    whole, parts = (prepared(dataclasses.replace(recipe, micro_batch=size), data) for size in (16, 2))
    assert dict(parts.rates) == pytest.approx(dict(whole.rates), rel=1e-5)


def test_the_loss_of_an_interval_is_the_mean_over_its_tokens(tmp_path):
    recipe, data = uneven(tmp_path)
    _, steps = one_pass(recipe, data, 3)
    records = []
    Loop(prepared(recipe, data), lambda after: [SimpleNamespace(add=records.append)]).train()
    counts = [tokens for _, _, tokens in steps]
    assert len(set(counts)) == 3
    assert records[0].count == sum(counts)
    mean = sum(loss * tokens for _, loss, tokens in steps) / sum(counts)
    assert records[0].loss == pytest.approx(mean, rel=1e-6)
