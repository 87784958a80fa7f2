"""The study of AdamW's multipliers: a smoke test through the command, and a training by hand."""

import numpy as np
import pytest
from quick import COMMON, quick, spread

from fused_lwlr.papers.lwlr_adam import measure
from fused_lwlr.papers.training import recipe_of, trainer_of
from fused_lwlr.training.defaults import WEIGHT_DECAY, learning_rate
from fused_lwlr.training.loop import Loop


def test_multipliers_by_hand():
    """v from the gradients of every step."""
    recipe = recipe_of(model="vit1x16", optimizer="adamw", lr=learning_rate("vit1x16", "adamw"), seed=1,
                       weight_decay=WEIGHT_DECAY["adamw"], rates="layerwise", **COMMON)  # fmt: skip
    trainer, gradients = trainer_of(recipe), []
    trainer.prepare()
    weights = [param for param in trainer.model.parameters() if param.dim() > 1]
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.append([weight.grad.double().square() for weight in weights])
    )
    Loop(trainer, lambda after: [], every=trainer.steps_per_epoch).train()
    share = 0.001 * 0.999 ** np.arange(len(gradients) - 1, -1, -1)
    share /= 1 - 0.999 ** len(gradients)
    expected = [
        sum(float(part) * squares[i].mean().item() for part, squares in zip(share, gradients, strict=True)) ** -0.5
        for i in range(len(weights))
    ]
    found = measure("vit1x16", "layerwise", seed=1, **COMMON)
    assert found["multiplier"] == pytest.approx(expected, rel=1e-4)
    assert found["eta"] == list(trainer.rates.values())
    assert len(gradients) > 10
    assert len(expected) > 5


def test_a_smoke_test(tmp_path):
    [[row]], jobs = quick("lwlr-adam", tmp_path, "--model", "resnet8x2")
    of = {(job["parameters"]["kind"], job["parameters"]["seed"]): job["values"] for job in jobs}
    single, layerwise = (
        [np.array(of[kind, seed]["multiplier"]) for seed in (0, 1)] for kind in ("single", "layerwise")
    )
    ratios = [b / a for a, b in zip(single, layerwise, strict=True)]
    assert row["lowest"] == spread([ratio.min() for ratio in ratios], 2)
    assert row["highest"] == spread([ratio.max() for ratio in ratios], 2)
    assert row["ratio: median"] == spread([np.median(ratio) for ratio in ratios], 2)
    ranks = [[np.argsort(np.argsort(each)) for each in pair] for pair in zip(single, layerwise, strict=True)]
    assert row["rank correlation"] == spread([np.corrcoef(*pair)[0, 1] for pair in ranks], 2)
    spreads = [max(of["layerwise", seed]["eta"]) / min(of["layerwise", seed]["eta"]) for seed in (0, 1)]
    assert row["η: highest / lowest"] == spread(spreads, 0)
    assert row["paper"] == "mostly unchanged"
