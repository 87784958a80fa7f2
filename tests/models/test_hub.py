"""Models of transformers by hf:NAME: from a configuration alone, taken by every method, and trained."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fused_lwlr import AdamW, calibrate, gradinit_, lwlr_init_, multipliers, scale_invariant
from fused_lwlr.models.build import build
from fused_lwlr.training.losses import flatten_predictions

# the import of transformers takes two seconds
pytestmark = pytest.mark.long
SMALL = {
    "gpt2": {"n_layer": 1, "n_embd": 16, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {
        "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 32,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def transformers(third_party, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = third_party("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return found


def built(name, **more):
    return build(f"hf:{name}", context=6, classes=20, **SMALL[name], **more)


def loss_fn(outputs, targets):
    return cross_entropy(*flatten_predictions(outputs, targets))


def some_batch(count=4):
    ids = torch.randint(20, (count, 7), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("name", SMALL)
def test_logits_equal_the_models_with_its_names(name, transformers):
    model = built(name)
    logits = model(some_batch()[0])
    assert logits.shape == (4, 6, 20)
    kind = {"gpt2": transformers.GPT2LMHeadModel, "llama": transformers.LlamaForCausalLM}[name]
    plain = kind(model.config)
    weights = model.state_dict().items()
    plain.load_state_dict({key: value.T if ".c_" in key and value.dim() == 2 else value for key, value in weights})
    assert torch.allclose(plain(some_batch()[0]).logits, logits, atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_every_method_takes_it(name):
    model = built(name)
    rates = calibrate(model, [some_batch(), some_batch()], loss_fn)
    assert all(rate > 0 for rate in dict(rates).values())
    found = scale_invariant(model, some_batch(8), loss_fn)
    assert found.names == ()
    gradinit_(model, [some_batch()] * 3, loss_fn, lr=0.1, steps=2)
    optimizer = AdamW(model.named_parameters(), lr=0.01, layers=rates)
    losses = []
    for _ in range(100):
        losses.append(loss_fn(model(some_batch()[0]), some_batch()[1]))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]


@pytest.fixture
def gpt2(transformers):
    """As transformers makes it, with weights of (inputs, outputs), and the same with nn.Linear."""

    def make(width=48):
        from fused_lwlr.models.hub import linear_

        sizes = {"vocab_size": 20, "n_positions": 6, "n_embd": width, "n_head": 2, "n_layer": 1}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
        torch.manual_seed(0)
        theirs = transformers.GPT2LMHeadModel(config)
        torch.manual_seed(0)
        ours = transformers.GPT2LMHeadModel(config)
        linear_(ours, transformers.pytorch_utils.Conv1D)
        return theirs, ours

    return make


def test_conv1d_is_drawn_as_the_linear_layer_that_it_is(gpt2):
    for model in gpt2(96):
        lwlr_init_(model)
        block = model.transformer.h[0]
        wanted = {block.attn.c_attn: 96, block.attn.c_proj: 96, block.mlp.c_fc: 384, block.mlp.c_proj: 96}
        for module, outputs in wanted.items():
            weight = module.weight.detach()
            tolerance = 5 / (2 * weight.numel()) ** 0.5
            assert weight.std().item() * outputs**0.5 == pytest.approx(1, abs=tolerance)


def test_conv1d_is_measured_as_the_linear_layer_that_it_is(gpt2):
    theirs, ours = gpt2()

    def loss(outputs, targets):
        return loss_fn(outputs.logits, targets)

    a, b = (calibrate(model, [some_batch()], loss, init=False) for model in (theirs, ours))
    a, b = ({layer.name: layer.gradient for layer in rates.layers} for rates in (a, b))
    for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        name = f"transformer.h.0.{name}.weight"
        assert a[name] == pytest.approx(b[name], rel=1e-4)
    name = "transformer.h.0.attn.c_attn.weight"
    assert a[name] == pytest.approx(sum(b[f"{name}[{i}:{i + 48}]"] for i in (0, 48, 96)) / 3, rel=1e-4)


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_conv1d_has_the_fans_of_the_linear_layer_that_it_is(rule, gpt2):
    (theirs, ours), (small, small_ours) = gpt2(48), gpt2(8)
    found = multipliers.mup(theirs, small, rule)
    assert found == multipliers.mup(ours, small_ours, rule)
    assert found["transformer.h.0.mlp.c_fc.weight"] == pytest.approx({"sgd": 1, "adamw": 1 / 6}[rule])


def test_a_folder_with_a_configuration(transformers, tmp_path):
    transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=50257, n_positions=6).save_pretrained(tmp_path)
    model = build(f"hf:{tmp_path}", context=6, classes=20, n_layer=1)
    assert len(model.transformer.h) == 1
    assert model(some_batch()[0]).shape == (4, 6, 20)
    assert not any(isinstance(module, transformers.pytorch_utils.Conv1D) for module in model.modules())
    assert isinstance(model.transformer.h[0].mlp.c_fc, nn.Linear)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_new_weights_are_float32(kind, transformers, tmp_path):
    """Configurations have the dtype of pretrained weights; an argument decides."""
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.AutoConfig.for_model(kind, **sizes, dtype="bfloat16").save_pretrained(tmp_path)
    for arguments, dtype in (({}, torch.float32), ({"dtype": "bfloat16"}, torch.bfloat16)):
        model = build(f"hf:{tmp_path}", context=6, classes=20, **arguments)
        assert {param.dtype for param in model.parameters()} == {dtype}


WRONG = {
    "name": ("hf:no/where", {}, "model=hf:no/where cannot be loaded: give a type of model such as hf:gpt2"),
    "empty folder": ("hf:folder", {}, "model=hf:folder cannot be loaded"),
    "value": ("hf:gpt2", {"n_embd": "abc"}, r"hf:gpt2 cannot be made with n_embd=abc: \w+"),
    "field": ("hf:gpt2", {"depth": 2}, "hf:gpt2 does not take depth: its configuration has no such field"),
    "no language": ("hf:resnet", {}, "model=hf:resnet is not a model that predicts the next token"),
    "positions": ("hf:gpt2", {**SMALL["gpt2"], "n_positions": 4}, "context=6 is more than the 4 positions of hf:gpt2"),
    "looks ahead": ("hf:bert", {"num_hidden_layers": 1}, "model=hf:bert sees the tokens that it must predict"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refused(case, tmp_path, monkeypatch):
    name, arguments, message = WRONG[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=message) as caught:
        build(name, context=6, classes=20, **arguments)
    assert "\n" not in str(caught.value)
    assert not str(caught.value).endswith(":")
