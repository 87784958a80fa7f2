"""Options of layers that need no measurement: rates, decay and ε by width, depth and kind of layer."""

import importlib
from functools import partial

import pytest
import torch
from torch import nn

import fused_lwlr
from fused_lwlr import multipliers
from fused_lwlr.models.gpt import GPT
from fused_lwlr.models.small import NoShort, ResNet, ViT

SIZE = {"image_size": 8, "channels": 1, "classes": 10}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Net(nn.Module):
    """Widths and depths may differ; inputs and outputs do not."""

    def __init__(self, width, depth):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(7, width), nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 7)


def gpt(depth=2, width=16, fused=True):
    return GPT(depth, False, context=4, classes=8, width=width, heads=2, fused=fused)


def test_no_decay_spares_biases_normalizations_and_embeddings():
    model = Net(8, 2)
    spared = multipliers.no_decay(model)
    assert all(own == {"weight_decay": 0} for own in spared.values())
    left = [name for name, _ in model.named_parameters() if name not in spared]
    assert left == [f"blocks.{i}.fc{j}.weight" for i in range(2) for j in (1, 2)] + ["head.weight"]
    layers = fused_lwlr.AdamW(model.named_parameters(), weight_decay=0.5, layers=spared).layers()
    assert {name for name, own in layers.items() if own["weight_decay"] == 0} == set(spared)
    assert {own["weight_decay"] for name, own in layers.items() if name in left} == {0.5}


def test_no_decay_of_models_that_name_layers_and_of_shared_weights():
    model = Net(8, 1)
    model.head.weight = model.embed.weight
    model.extra = nn.Parameter(torch.ones(2, 2))
    model.no_weight_decay = lambda: {"extra"}
    assert {"embed.weight", "extra"} <= multipliers.no_decay(model).keys()
    wide = nn.Sequential(nn.LayerNorm((3, 4)), nn.Linear(4, 4))
    assert [*multipliers.no_decay(wide)] == ["0.weight", "0.bias", "1.bias"]


def test_no_decay_of_timm(timm):
    """Equal to timm's own groups."""
    optim, models = (importlib.import_module(f"timm.{name}") for name in ("optim", "models.vision_transformer"))
    model = models.VisionTransformer(img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2)
    groups = optim.param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    names = {id(param): name for name, param in model.named_parameters()}
    expected = {names[id(param)] for group in groups if group["weight_decay"] == 0 for param in group["params"]}
    assert multipliers.no_decay(model).keys() == expected


def test_no_decay_of_a_wrapped_model():
    model = Net(8, 1)
    model.no_weight_decay = lambda: {"blocks.0.fc1.weight"}
    for wrapper, prefix in ((nn.DataParallel, "module."), (partial(torch.compile, backend="eager"), "_orig_mod.")):
        expected = {f"{prefix}{name}" for name in multipliers.no_decay(model)}
        assert f"{prefix}blocks.0.fc1.weight" in expected
        assert multipliers.no_decay(wrapper(model)).keys() == expected


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_completep_is_the_table(alpha):
    """arXiv 2505.01618, Table 1, at 4 times the width and 3 times the depth; without a factor of the logits."""
    found = multipliers.completep(Net(32, 6), Net(8, 2), alpha=alpha, eps=1e-6)
    slower, smaller = 3 ** (alpha - 1), 3**alpha
    rows = {
        "embed.weight": (1, 1, 1e-6 / 4),
        "blocks.0.fc1.weight": (slower / 4, 4, 1e-6 / 4 / smaller),
        "blocks.5.fc2.weight": (slower / 4, 4, 1e-6 / 4 / smaller),
        "blocks.5.fc1.bias": (slower, 1, 1e-6 / 4 / smaller),
        "blocks.5.norm.weight": (slower, 1, 1e-6 / 4 / smaller),
        "norm.weight": (1, 1, 1e-6 / 4),
        "head.weight": (1 / 4, 4, 1e-6),
        "head.bias": (1, 1, 1e-6),
    }
    assert found.keys() == dict(Net(32, 6).named_parameters()).keys()
    for name, (lr, decay, eps) in rows.items():
        assert found[name] == pytest.approx({"lr": lr, "weight_decay": decay, "eps": eps})


def test_completep_at_the_base_changes_nothing():
    found = multipliers.completep(Net(8, 2), Net(8, 2), eps=1e-5)
    assert all(own == {"lr": 1, "weight_decay": 1, "eps": 1e-5} for own in found.values())
    optimizer = fused_lwlr.AdamW(Net(32, 4).named_parameters(), layers=multipliers.completep(Net(32, 4), Net(8, 2)))
    assert optimizer.layers()["head.weight"]["weight_decay"] == pytest.approx(0.04)


def test_the_output_layer_steps_as_with_a_factor_of_the_logits():
    """Row "output" of the docstring: logits x · w / m with the options of the paper, and x · (w / m) with ours."""
    torch.manual_seed(0)
    m, lr, decay, eps = 4.0, 0.1, 0.5, 1e-2
    whole, ours = nn.Parameter(torch.randn(3, 5)), None
    ours = nn.Parameter(whole.detach() / m)
    theirs = fused_lwlr.AdamW([("w", whole)], lr, eps=eps / m, weight_decay=decay, backend="torch")
    layers = {"w": {"lr": 1 / m, "weight_decay": m, "eps": eps}}
    optimizer = fused_lwlr.AdamW([("w", ours)], lr, eps=eps, weight_decay=decay, layers=layers, backend="torch")
    for _ in range(4):
        x = torch.randn(2, 5)
        for w, factor in ((whole, 1 / m), (ours, 1.0)):
            w.grad = None
            (x @ w.T * factor).square().sum().backward()
        theirs.step(), optimizer.step()
        torch.testing.assert_close(ours.detach(), whole.detach() / m)


def test_mup_of_decay_and_eps():
    wide, base = Net(32, 1), Net(8, 1)
    rates = multipliers.mup(wide, base, "adamw")
    assert {name: own["lr"] for name, own in multipliers.mup(wide, base, "adamw", decay=True).items()} == rates
    found = multipliers.mup(wide, base, "adamw", decay=True, eps=1e-6)
    at_equal_depth = multipliers.completep(wide, base, eps=1e-6, blocks=["blocks.0"])
    for name, own in found.items():
        assert own == pytest.approx(at_equal_depth[name])


def test_mup_of_decay_by_the_root_of_the_width():
    """arXiv 2510.15262: λ ∝ √width of matrices, whose two dimensions grow with the width; 0 of vectors."""
    found = multipliers.mup(Net(32, 1), Net(8, 1), "adamw", decay="sqrt")
    matrices = {"blocks.0.fc1.weight", "blocks.0.fc2.weight"}
    assert {name: own["weight_decay"] for name, own in found.items()} == {
        name: 2.0 * (name in matrices) for name in found
    }
    assert {name: own["lr"] for name, own in found.items()} == multipliers.mup(Net(32, 1), Net(8, 1), "adamw")
    # η · λ of a matrix: the norm of its steady state √(η / λ) · width^0.75 is the same at every width
    for m in (2, 4, 16):
        own = multipliers.mup(Net(8 * m, 1), Net(8, 1), "adamw", decay="sqrt")["blocks.0.fc1.weight"]
        assert (own["lr"] / own["weight_decay"]) ** 0.5 * m**0.75 == pytest.approx(1)


VIT_KINDS = {
    "cls_token": 1, "pos_embed": 10, "patch_embed.weight": 10, "blocks.0.norm1.weight": 1,
    "blocks.0.attention.qkv.weight[0:48]": 8, "blocks.0.attention.qkv.bias[48:96]": 8,
    "blocks.0.attention.qkv.weight[96:144]": 4, "blocks.0.attention.proj.bias": 4, "blocks.0.fc1.weight": 6,
    "blocks.3.fc2.bias": 6, "norm.bias": 1, "head.weight": 1,
}  # fmt: skip


def test_blockwise():
    model = ViT(**SIZE)
    found = multipliers.blockwise(model)
    width = model.patch_embed.out_channels
    scaled = {name.replace("[0:48]", f"[0:{width}]"): eta for name, eta in VIT_KINDS.items()}
    scaled = {k.replace("[48:96]", f"[{width}:{2 * width}]"): eta for k, eta in scaled.items()}
    scaled = {k.replace("[96:144]", f"[{2 * width}:{3 * width}]"): eta for k, eta in scaled.items()}
    assert {name: found[name] for name in scaled} == scaled
    fused_lwlr.AdamW(model.named_parameters(), layers=[found, multipliers.no_decay(model)])


def test_blockwise_of_separate_and_of_torch_projections():
    found = multipliers.blockwise(gpt(fused=False))
    own = {name: eta for name, eta in found.items() if name.startswith("blocks.0.attention.")}
    assert [own[f"blocks.0.attention.{name}.weight"] for name in ("q", "k", "v", "proj")] == [8, 8, 4, 4]
    torchs = multipliers.blockwise(nn.TransformerEncoderLayer(4, 2, 8))
    assert [torchs[name] for name in ("self_attn.in_proj_weight[0:4]", "self_attn.in_proj_bias[8:12]")] == [8, 4]
    assert [torchs[name] for name in ("self_attn.out_proj.weight", "linear1.weight", "norm2.bias")] == [4, 6, 1]


@pytest.mark.parametrize("name", ["w1", "w2", "w3", "fc1", "lin2", "linear1", "c_fc", "gate_proj", "wi", "wi_1"])
def test_blockwise_of_a_feed_forward_layer_by_its_own_name(name):
    """In a block without a module whose name says feed-forward, as in Meta's Llama."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            for own in ("wq", "wv", name):
                self.add_module(own, nn.Linear(4, 4))

    found = multipliers.blockwise(nn.ModuleDict({"layers": nn.ModuleList([Plain()])}))
    assert [found[f"layers.0.{own}.weight"] for own in ("wq", "wv", name)] == [8, 4, 6]


def test_blockwise_of_a_fused_projection_and_of_t5():
    """nanoGPT's names, and a feed-forward module whose output is `wo`."""
    block = nn.ModuleDict({
        "attn": nn.ModuleDict({"c_attn": nn.Linear(4, 12), "c_proj": nn.Linear(4, 4)}),
        "DenseReluDense": nn.ModuleDict({"wi": nn.Linear(4, 8), "wo": nn.Linear(8, 4)}),
    })  # fmt: skip
    found = multipliers.blockwise(nn.ModuleDict({"h": nn.ModuleList([block])}))
    names = ("attn.c_attn.weight[0:4]", "attn.c_attn.weight[8:12]", "attn.c_proj.weight", "DenseReluDense.wo.weight")
    assert [found[f"h.0.{name}"] for name in names] == [8, 4, 4, 6]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["LlamaConfig", "BertConfig"])
def test_blockwise_of_transformers(kind, third_party):
    """Every layer of the blocks has a kind."""
    transformers = third_party("transformers")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 9,
    }
    model = transformers.AutoModel.from_config(getattr(transformers, kind)(**sizes))
    found = multipliers.blockwise(model)
    expected = {
        "LlamaConfig": {
            "embed_tokens.weight": 10, "layers.0.self_attn.q_proj.weight": 8, "layers.0.self_attn.o_proj.weight": 4,
            "layers.0.mlp.down_proj.weight": 6, "layers.0.input_layernorm.weight": 1, "norm.weight": 1,
        },
        "BertConfig": {
            "embeddings.word_embeddings.weight": 10, "encoder.layer.0.attention.self.key.weight": 8,
            "encoder.layer.0.attention.self.value.bias": 4, "encoder.layer.0.attention.output.dense.weight": 4,
            "encoder.layer.0.attention.output.LayerNorm.bias": 1, "encoder.layer.0.intermediate.dense.weight": 6,
            "encoder.layer.0.output.dense.weight": 6, "encoder.layer.0.output.LayerNorm.weight": 1,
        },
    }[kind]  # fmt: skip
    assert {name: found[name] for name in expected} == expected


WRONG = [
    (lambda: multipliers.blockwise(ResNet(**SIZE)), "finds no layers of the kind ffn, qk, vo by the usual names"),
    (lambda: multipliers.completep(Net(8, 2), Net(8, 2), alpha=2.0), "alpha=2.0 must be from 0 to 1"),
    (lambda: multipliers.completep(Net(8, 2), Net(8, 2), eps=0.0), "eps=0.0 must be a finite number above 0"),
    (lambda: multipliers.completep(NoShort(**SIZE), NoShort(**SIZE), blocks="trunk"), "is not a Sequential"),
    (
        lambda: multipliers.completep(Net(8, 2), nn.ModuleDict({"blocks": nn.ModuleList([Block(8), Block(8)])})),
        "base= must have the parameters of the model, but it lacks",
    ),
    (lambda: multipliers.mup(Net(8, 2), Net(8, 2), "sgd", eps=1e-8), "decay= and eps= are for AdamW"),
    (lambda: multipliers.mup(Net(8, 2), Net(4, 2), "sgd", decay="sqrt"), "decay= and eps= are for AdamW"),
    (
        lambda: multipliers.mup(Net(8, 2), Net(4, 2), "adamw", decay="root"),
        "decay='root' must be one of False, True, 'sqrt'",
    ),
    (lambda: multipliers.mup(Net(8, 2), Net(8, 2), "adamw", decay="sqrt"), "decay='sqrt' finds no matrix"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()
