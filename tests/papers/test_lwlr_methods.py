"""The study of Table 2 on Fashion-MNIST: what its arms train."""

import pytest
from quick import asked

from fused_lwlr.papers import images
from fused_lwlr.papers.studies import find

SGD, ADAMW = ("sgd", 1e-4), ("adamw", 0.1)
# method -> optimizer and weight decay, rates of layers, scaling, trust coefficient, lowest rate
ARMS = {
    "SGD": (*SGD, "single", "none", 0.03), "SGD-LW": (*SGD, "layerwise", "none", 0.03),
    "SGD-NG": (*SGD, "single", "ng", 0.03), "LARC": (*SGD, "single", "larc", 0.1),
    "AdamW": (*ADAMW, "single", "none", 0.003), "AdamW-LW": (*ADAMW, "layerwise", "none", 0.003),
    "Adam-NG": (*ADAMW, "single", "ng", 0.003), "LAMB": (*ADAMW, "single", "lamb", 0.003),
}  # fmt: skip


@pytest.mark.parametrize("model", [None, "resnet14x4"])
def test_what_each_arm_trains(model, monkeypatch):
    recipes = {}
    for of, recipe, _ in asked(find("lwlr-methods"), images, monkeypatch, model=model):
        recipes.setdefault(of["arm"], []).append(recipe)
    assert list(recipes) == list(ARMS)
    for arm, of in recipes.items():
        optimizer, decay, rates, scaling, lowest = ARMS[arm]
        assert len({(recipe.lr, recipe.seed) for recipe in of}) == len(of) == 3 * 2
        assert {(recipe.optimizer, recipe.weight_decay, recipe.rates, recipe.scaling) for recipe in of} == {
            (optimizer, decay, rates, scaling)
        }
        assert min(recipe.lr for recipe in of) == lowest
        assert {(recipe.init, recipe.model, recipe.image_size, recipe.batch_size, recipe.steps) for recipe in of} == {
            ("lwlr", model or "resnet8x8", 14, 64, 300)
        }
        assert arm != "LARC" or {recipe.trust_coefficient for recipe in of} == {0.001}
