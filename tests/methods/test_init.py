"""LWLR's initialization: standard deviations from the fan-out, ones and zeros."""

import warnings

import pytest
import torch
from torch import nn
from unchanged import unchanged

from fused_lwlr import lwlr_init_
from fused_lwlr.measure.layers import layers_of


class ConvNorm(nn.Conv2d):
    """A convolution with the name of a normalization."""


class LinearNorm(nn.Linear):
    """A linear layer with the name of a normalization."""


class Block(nn.Module):
    """Parameters that belong to no standard module."""

    def __init__(self):
        super().__init__()
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8))
        self.relative_position_bias_table = nn.Parameter(torch.randn(9, 2))
        self.gamma = nn.Parameter(torch.randn(8))
        self.gain = nn.Parameter(torch.randn(8, 1, 1, 1))
        self.attention_biases = nn.Parameter(torch.randn(2, 9))
        self.norm = nn.LayerNorm(8)
        self.act = nn.PReLU()


@pytest.mark.parametrize(
    ("module", "name", "fan_out"),
    [
        (nn.Linear(300, 200), "weight", 200),
        (nn.Conv2d(32, 64, 3), "weight", 64 * 9),
        (nn.Conv2d(32, 64, 3, groups=4), "weight", 16 * 9),
        (nn.Conv2d(512, 512, 7, groups=512), "weight", 49),
        (nn.Conv1d(32, 64, 5), "weight", 64 * 5),
        (ConvNorm(32, 64, 3), "weight", 64 * 9),
        (LinearNorm(300, 200), "weight", 200),
        (nn.ConvTranspose2d(32, 64, 3, groups=2), "weight", 32 * 9),
        (nn.Embedding(500, 40), "weight", 40),
        (nn.MultiheadAttention(96, 4), "in_proj_weight", 96),
        (nn.MultiheadAttention(96, 4), "out_proj.weight", 96),
        (nn.Sequential(nn.Sequential()).append(nn.Linear(10, 9)), "1.weight", 9),
    ],
)
def test_standard_deviation_is_one_over_root_fan_out(module, name, fan_out):
    torch.manual_seed(0)
    lwlr_init_(module)
    weight = module.get_parameter(name).detach()
    # the standard error of a standard deviation is 1 / √(2n)
    tolerance = 5 / (2 * weight.numel()) ** 0.5
    assert weight.std().item() * fan_out**0.5 == pytest.approx(1, abs=tolerance)
    assert abs(weight.mean().item()) * fan_out**0.5 < 5 / weight.numel() ** 0.5


def test_each_third_of_a_fused_projection_is_a_layer():
    """As three separate layers would be drawn: std √(1/96), not √(1/288)."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(96, 288)

    torch.manual_seed(0)
    attention = Attention()
    lwlr_init_(attention)
    for third in attention.qkv.weight.detach().chunk(3):
        assert third.std().item() * 96**0.5 == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize(
    ("name", "outputs", "layers"), [("qkv", 144, 3), ("c_attn", 144, 3), ("c_attn", 96, 1), ("c_fc", 144, 1)]
)
def test_which_linear_layers_are_three(name, outputs, layers):
    """GPT-2's c_attn is key and value alone, twice the width, where it attends to another sequence."""
    model = nn.ModuleDict({name: nn.Linear(48, outputs)})
    found = [layer.name for layer in layers_of(model)]
    assert len(found) == 2 * layers
    assert (f"{name}.bias[48:96]" in found) == (layers == 3)


@pytest.mark.parametrize("name", ["qkv", "c_attn"])
def test_a_parametrized_projection_is_one_layer_for_each_parameter(name):
    """Its weight is no parameter, so it has no thirds."""
    model = nn.Sequential()
    model.add_module(name, nn.utils.parametrizations.weight_norm(nn.Linear(4, 12, bias=False)))
    assert [layer.name for layer in layers_of(model)] == [name for name, _ in model.named_parameters()]


def test_ones_and_zeros():
    model = nn.ModuleList([Block(), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)])
    for p in model.parameters():
        nn.init.normal_(p)
    model[2].running_mean.fill_(3.0)
    lwlr_init_(model)
    ones = ["0.gamma", "0.gain", "0.norm.weight", "2.weight", "3.weight", "4.weight"]
    zeros = [
        "0.cls_token", "0.pos_embed", "0.relative_position_bias_table", "0.attention_biases",
        "0.norm.bias", "1.bias", "2.bias", "3.bias",
    ]  # fmt: skip
    for name, param in model.named_parameters():
        if name in ones + zeros:
            assert (param == float(name in ones)).all(), name
        else:
            assert name in ("0.act.weight", "1.weight")
    assert set(ones + zeros) < {name for name, _ in model.named_parameters()}
    assert (model[2].running_mean == 3).all()


@pytest.mark.parametrize(
    ("name", "zero"),
    [
        ("wpe", True), ("pos", True), ("pos_emb", True), ("posembed", True), ("position_embeddings", True),
        ("embed_positions", True), ("relative_attention_bias", True), ("wte", False), ("token_embedding", False),
        ("embed_tokens", False), ("token_type_embeddings", False), ("embed", False), ("swap", False), ("post", False),
    ],
)  # fmt: skip
def test_position_embeddings_are_biases(name, zero):
    """Algorithm 1: the position embedding is 0, whether it is a parameter or a module; other embeddings are drawn."""
    model = nn.ModuleDict({"body": nn.ModuleDict({name: nn.Embedding(50, 40)}), "head": nn.Linear(40, 50)})
    lwlr_init_(model)
    weight = model["body"][name].weight.detach()
    assert weight.std().item() == pytest.approx(0 if zero else 40**-0.5, rel=0.1)
    assert model["head"].weight.std().item() == pytest.approx(50**-0.5, rel=0.1)


@pytest.mark.parametrize("first", ["wte", "head"])
def test_a_tied_head_has_its_own_fan_out(first):
    """300 outputs, not the 40 of the embedding, for any order of the two modules."""
    modules = {"wte": nn.Embedding(300, 40), "head": nn.Linear(40, 300, bias=False)}
    modules["head"].weight = modules["wte"].weight
    model = nn.ModuleDict({name: modules[name] for name in (first, *({"wte", "head"} - {first}))})
    lwlr_init_(model)
    assert model["wte"].weight is model["head"].weight
    assert model["head"].weight.std().item() * 300**0.5 == pytest.approx(1, abs=0.05)


def test_prelu_slope_is_left_alone():
    slope = nn.PReLU(init=0.3)
    lwlr_init_(slope)
    assert slope.weight.item() == pytest.approx(0.3)


def test_weights_without_elements_are_left_alone():
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.empty(0, 3))
    lwlr_init_(model)
    assert model.bias.tolist() == [0, 0]


def test_frozen_parameters_and_padding_are_left_alone():
    model = nn.ModuleDict({"frozen": nn.Linear(4, 4), "words": nn.Embedding(10, 4, padding_idx=3)})
    model["frozen"].weight.requires_grad_(False)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    lwlr_init_(model)
    changed = {name: not torch.equal(param, before[name]) for name, param in model.named_parameters()}
    assert changed == {"frozen.weight": False, "frozen.bias": True, "words.weight": True}
    assert not model["words"].weight[3].any()
    assert model["words"].weight[2].all()
    lwlr_init_(model, kinds={"frozen.weight": "weight"})
    assert not torch.equal(model["frozen"].weight, before["frozen.weight"])


@pytest.mark.parametrize("embedding_first", [True, False])
def test_padding_of_a_tied_embedding_is_left_alone(embedding_first):
    words, head = nn.Embedding(10, 4, padding_idx=3), nn.Linear(4, 10, bias=False)
    head.weight = words.weight
    lwlr_init_(nn.ModuleList([words, head] if embedding_first else [head, words]))
    assert not words.weight[3].any()
    assert words.weight[2].all()


def test_names_with_brackets():
    model = nn.Sequential()
    model.add_module("block[0]", nn.Linear(4, 3))
    lwlr_init_(model)
    assert not model[0].bias.any()


def test_a_composition_is_no_position():
    model = nn.ModuleDict({"composition": nn.Embedding(5, 3), "position": nn.Embedding(5, 3)})
    lwlr_init_(model)
    assert model["composition"].weight.all()
    assert not model["position"].weight.any()


def test_norms_of_weights_are_no_weights():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.utils.weight_norm(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="cannot tell whether 'weight_g' is a weight"):
        lwlr_init_(model)


def test_generator_and_kinds():
    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.full((50, 40), 7.0))

    first, second = Custom(), Custom()
    for model in (first, second):
        lwlr_init_(model, kinds={"mix": "weight"}, generator=torch.Generator().manual_seed(4))
    assert torch.equal(first.mix, second.mix)
    assert first.mix.std().item() == pytest.approx(50**-0.5, rel=0.1)
    lwlr_init_(first, kinds={"mix": "other"})
    assert torch.equal(first.mix, second.mix)


class OnGPU(torch.Generator):
    """A generator that says it is on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "cannot tell whether 'mix' is a weight"),
        ({"kinds": {"mox": "weight"}}, "'mox', but the model has no such parameter"),
        ({"kinds": {"mix": "wait"}}, "'wait'"),
        (
            {"kinds": {"mix": "other", "linear.bias": "weight"}},
            r"\['linear.bias'\]='weight' is for two dim",
        ),
        ({"kinds": "weight"}, "kinds='weight' must be a dict"),
        ({"kinds": {"mix": "other"}, "generator": 0}, "generator=0 must be a torch.Generator"),
        (
            {"kinds": {"mix": "other"}, "generator": OnGPU()},
            r"generator= is on cuda, but 'linear.weight' is on cpu: give a torch.Generator\('cpu'\)",
        ),
    ],
)
def test_refused_with_nothing_changed(options, message):
    model = nn.Module()
    model.linear = nn.Linear(4, 4)
    model.mix = nn.Parameter(torch.ones(5, 5))
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ValueError, match=message):
        lwlr_init_(model, **options)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def expanded():
    return nn.Parameter(torch.ones(1, 4).expand(4, 4))


def for_inference():
    with torch.inference_mode():
        return nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize(("make", "problem"), [(expanded, "expanded"), (for_inference, "an inference tensor")])
def test_a_last_weight_that_cannot_be_changed(make, problem):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = make()
    with unchanged(model), pytest.raises(ValueError, match=rf"the parameter '1\.weight' is {problem}: clone\(\) it"):
        lwlr_init_(model)
    lwlr_init_(model, kinds={"1.weight": "other"})
    assert torch.equal(model[1].weight, torch.ones(4, 4))


def test_an_expanded_bias_gets_its_zeros():
    model = nn.Linear(4, 4)
    model.bias = nn.Parameter(torch.ones(1).expand(4))
    lwlr_init_(model)
    assert not model.bias.any()
