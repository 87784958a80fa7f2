"""Models of text: sizes and orders of their parts, checked by hand."""

import math

import pytest
import torch

from fused_lwlr.models.build import build
from fused_lwlr.models.gpt import GPT

ARGUMENTS = {
    "usual": {},
    "every": {"layernorm": "every"},
    "separate": {"fused": False},
    "tied": {"tied": True},
    "all": {"layernorm": "every", "fused": False, "tied": True, "hidden": 24, "heads": 2},
}


def model_of(name, arguments, *, width=16, context=12, classes=7):
    torch.manual_seed(0)
    model = build(name, context=context, classes=classes, width=width, **arguments).double().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))  # so that scales and biases matter too
    return model


def count(depth, post, width, context, classes, *, hidden=None, tied=False, layernorm="usual", heads=4, fused=True):
    """Number of parameters by hand, for any heads and projections."""
    hidden = hidden or 4 * width
    attention = 4 * (width * width + width)
    perceptron = 2 * width * hidden + hidden + width
    norms = 2 * 2 * width + (2 * width + 2 * hidden + 2 * width if layernorm == "every" else 0)
    embeddings = classes * width + context * width
    return (
        depth * (attention + perceptron + norms)
        + embeddings
        + (0 if post else 2 * width)
        + (0 if tied else classes * width)
    )


@pytest.mark.parametrize("case", ARGUMENTS)
@pytest.mark.parametrize(("name", "depth"), [("gpt1", 1), ("gpt3", 3), ("postln4", 4)])
def test_shape_size_and_a_gradient_for_every_parameter(name, depth, case):
    model = model_of(name, ARGUMENTS[case])
    tokens = torch.randint(7, (5, 12))
    logits = model(tokens)
    assert logits.shape == (5, 12, 7)
    assert model(tokens[:, :4]).shape == (5, 4, 7)
    found = sum(p.numel() for p in model.parameters())
    assert found == count(depth, name.startswith("post"), 16, 12, 7, **ARGUMENTS[case])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_gpt_2_has_its_124_million_parameters():
    with torch.device("meta"):
        model = build("gpt12", context=1024, classes=50257, width=768, heads=12, tied=True)
    assert sum(p.numel() for p in model.parameters()) == 124_439_808
    assert model.head.weight is model.tok_embed.weight


def by_hand(state, tokens, *, depth, post, heads, every):
    """The logits, computed without torch.nn."""

    def linear(x, name):
        y = x @ state[f"{name}.weight"].T
        return y + state[f"{name}.bias"] if f"{name}.bias" in state else y

    def norm(x, name):
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / scale * state[f"{name}.weight"] + state[f"{name}.bias"]

    def more(x, name):
        return norm(x, name) if every else x

    def attention(x, name):
        width = x.shape[-1]
        if f"{name}.qkv.weight" in state:
            q, k, v = linear(x, f"{name}.qkv").split(width, dim=-1)
        else:
            q, k, v = (linear(x, f"{name}.{part}") for part in "qkv")
        results = []
        for head in range(heads):
            part = slice(head * width // heads, (head + 1) * width // heads)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width // heads)
            later = torch.ones(scores.shape[1:]).triu(1).bool()
            weights = scores.masked_fill(later, -math.inf).exp()
            results.append(weights / weights.sum(-1, keepdim=True) @ v[..., part])
        return more(linear(torch.cat(results, dim=-1), f"{name}.proj"), f"{name}.norm")

    def perceptron(x, name):
        x = more(linear(x, f"{name}.fc1"), f"{name}.fc1_norm")
        x = x.clamp(min=0) if post else x * (1 + torch.erf(x / math.sqrt(2))) / 2
        return more(linear(x, f"{name}.fc2"), f"{name}.fc2_norm")

    x = state["tok_embed.weight"][tokens] + state["pos_embed"][: tokens.shape[1]]
    for i in range(depth):
        name = f"blocks.{i}"
        if post:
            x = norm(x + attention(x, f"{name}.attention"), f"{name}.norm1")
            x = norm(x + perceptron(x, name), f"{name}.norm2")
        else:
            x = x + attention(norm(x, f"{name}.norm1"), f"{name}.attention")
            x = x + perceptron(norm(x, f"{name}.norm2"), name)
    return linear(x if post else norm(x, "norm"), "head")


@pytest.mark.parametrize("case", ARGUMENTS)
@pytest.mark.parametrize("name", ["gpt3", "postln3"])
def test_the_order_of_the_parts_is_that_of_the_papers(name, case):
    arguments = ARGUMENTS[case]
    model = model_of(name, arguments)
    tokens = torch.randint(7, (2, 9))
    expected = by_hand(
        model.state_dict(), tokens, depth=3, post=name.startswith("post"), heads=arguments.get("heads", 4),
        every=arguments.get("layernorm") == "every",
    )  # fmt: skip
    torch.testing.assert_close(model(tokens), expected, rtol=1e-10, atol=1e-10)


def test_dropout_acts_in_training_alone():
    model = model_of("postln2", {"dropout": 0.5})
    tokens = torch.randint(7, (2, 12))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_logits_of_a_tied_head_begin_with_a_variance_of_one():
    torch.manual_seed(0)
    model = GPT(2, False, context=32, classes=1000, width=64, tied=True)
    assert float(model(torch.randint(1000, (8, 32))).detach().std()) == pytest.approx(1, rel=0.1)


SIZES = {"context": 8, "classes": 5}
WRONG = {
    "of images": ("resnet", SIZES, "model=resnet is not for text: give gptN or postlnN with N blocks, such as gpt6"),
    "no blocks": ("gpt0", SIZES, "model=gpt0 is not for text"),
    "of text": ("gpt6", {"image_size": 8, "channels": 1, "classes": 10}, "model=gpt6 is for text: give data="),
    "unknown": ("gpt2", {**SIZES, "depth": 3}, "gpt2 does not take depth: choose from width, heads"),
    "type": ("gpt2", {**SIZES, "width": "wide"}, "gpt2 takes width as int, and not 'wide'"),
    "not a bool": ("gpt2", {**SIZES, "tied": 1}, "gpt2 takes tied as bool, and not 1"),
    "heads": ("gpt2", {**SIZES, "width": 10}, "width=10, heads=4, hidden=40: .* heads divide the width"),
    "hidden": ("gpt2", {**SIZES, "hidden": 0}, "hidden=0: all must be 1 or more"),
    "dropout": ("gpt2", {**SIZES, "dropout": 1}, "dropout=1 must be at least 0 and below 1"),
    "layernorm": ("postln2", {**SIZES, "layernorm": "all"}, "layernorm=all is unknown: choose from usual, every"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_refused(case):
    name, arguments, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        build(name, **arguments)
