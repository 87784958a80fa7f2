"""The study of layer-wise rates with several networks and optimizers: what its arms train."""

import pytest
from quick import asked

from fused_lwlr.papers import images
from fused_lwlr.papers.lwlr_fashion import CONTROL, OPTIMIZERS
from fused_lwlr.papers.studies import find

NETWORKS = [("resnet8x8", "sgd"), ("resnet8x8", "adamw"), ("vit4x48p4", "adamw")]
GIVEN = [("resnet14x4", "sgd"), ("resnet14x4", "adamw")]
OF_ARMS = {
    "PyTorch's start, one rate": ("model", "single", None), CONTROL: ("lwlr", "single", None),
    "LWLR": ("lwlr", "layerwise", ()), "LWLR but tokens": ("lwlr", "layerwise", ("cls_token", "pos_embed")),
}  # fmt: skip


@pytest.mark.parametrize(("model", "networks"), [(None, NETWORKS), ("resnet14x4", GIVEN)])
def test_what_each_arm_trains(model, networks, monkeypatch):
    recipes = {}
    for of, recipe, _ in asked(find("lwlr-networks"), images, monkeypatch, model=model):
        recipes.setdefault((recipe.model, recipe.optimizer, of["arm"]), {})[recipe.lr, recipe.seed] = recipe
    # a ResNet has no tokens
    assert list(recipes) == [
        (*network, arm) for network in networks for arm in OF_ARMS if network[0][:3] == "vit" or arm[-6:] != "tokens"
    ]
    for (_, optimizer, arm), of in recipes.items():
        assert of.keys() == {(lr, seed) for lr in OPTIMIZERS[optimizer] for seed in (0, 1)}
        fields = {(r.init, r.rates, r.rates_exclude, r.weight_decay, r.image_size, r.steps) for r in of.values()}
        assert fields == {(*OF_ARMS[arm], {"sgd": 1e-4, "adamw": 0.1}[optimizer], 16, 300)}
