"""Layers that layer-wise rates leave out, in trainings."""

import pytest

from fused_lwlr.papers.training import recipe_of, trainer_of
from fused_lwlr.training.presets import PRESETS, resolve
from fused_lwlr.training.recipe import Recipe

COMMON = {"model": "vit1x16", "rates": "layerwise", "calibration_steps": 2, "device": "cpu", "backend": "torch"}
TOKENS = ("cls_token", "pos_embed")


def rates(**fields):
    trainer = trainer_of(Recipe(**COMMON | fields))
    trainer.prepare()
    return trainer.rates


@pytest.fixture(scope="module")
def printed():
    """The rates of Algorithm 1."""
    return rates(rates_exclude=())


@pytest.mark.parametrize(
    ("fields", "left_out"),
    [
        ({}, TOKENS),
        ({"rates_exclude": "none"}, ()),
        ({"rates_exclude": TOKENS}, TOKENS),
        ({"rates_exclude": "head.*,pos_embed"}, ("head.*", "pos_embed")),
    ],
)
def test_rates_are_those_of_the_calibration_without_layers(printed, fields, left_out):
    found = rates(**fields)
    wanted = printed.exclude(*left_out) if left_out else printed
    assert dict(found) == dict(wanted)
    assert [layer.name for layer in found.layers if layer.note == "excluded"] == [
        layer.name for layer in wanted.layers if layer.note == "excluded"
    ]
    assert (found["pos_embed"] == 1) == bool(left_out)


def test_by_default_only_what_starts_at_zero_is_left_out():
    """PyTorch's initialization of this model draws the position embedding, and has a class token of zeros."""
    found = rates(init="model")
    assert found["cls_token"] == 1
    assert found["pos_embed"] != 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rates_exclude": ("pos_embedd",)}, "--rates-exclude has 'pos_embedd': it is not a layer of vit1x16; did you"),
        ({"rates_exclude": ("none", "head.bias")}, "--rates-exclude has 'none': it is not a layer of vit1x16"),
        ({"rates_exclude": ("*.*", "*_*")}, "--rates-exclude *.* *_* leaves no layer: give fewer patterns"),
    ],
)  # fmt: skip
def test_patterns_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match="layer") as error:
        rates(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("option", ["exclude", "rates_exclude"])
def test_patterns_are_refused_before_minutes_are_spent(option, monkeypatch):
    monkeypatch.setattr("fused_lwlr.training.trainer.gradinit_", None)
    monkeypatch.setattr("fused_lwlr.training.trainer.calibrate", None)
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} has 'typo': it is not a "):
        rates(init="gradinit", **{option: ("typo",)})


def test_it_is_an_option_of_layer_wise_rates():
    with pytest.raises(ValueError, match="--rates-exclude is for --rates layerwise, but --rates is single"):
        Recipe(model="vit", rates="single", rates_exclude=("head.bias",))


def test_a_recipe_keeps_it():
    recipe = Recipe(rates_exclude="none")
    assert recipe.rates_exclude == ()
    assert "rates_exclude = []" in recipe.to_toml()
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert "rates_exclude" not in Recipe().to_toml()


def test_presets_and_studies_have_the_algorithm_of_the_paper():
    layerwise = [name for name, preset in PRESETS.items() if preset.fields.get("rates") == "layerwise"]
    layerwise = [name for name in layerwise if "LWLR paper" in PRESETS[name].source]
    assert "vit-s-sgd" in layerwise
    assert {resolve(name, {}).rates_exclude for name in layerwise} == {()}
    assert resolve("vit-s-sgd", {"rates_exclude": ["cls_token"]}).rates_exclude == ("cls_token",)
    assert resolve("vit-s-sgd", {"rates": "single"}).rates_exclude is None
    assert recipe_of(rates="layerwise").rates_exclude == ()
    chosen = recipe_of(rates="layerwise", training={"rates_exclude": "cls_token"})
    assert chosen.rates_exclude == ("cls_token",)
    assert recipe_of().rates_exclude is None
