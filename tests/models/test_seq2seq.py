"""The encoder-decoder: masking, learning, and the methods applied to it."""

import pytest
import torch
from cases import long
from torch.nn.functional import cross_entropy

from fused_lwlr import calibrate, gradinit_, lwlr_init_, scale_invariant
from fused_lwlr.models.build import build
from fused_lwlr.training.losses import flatten_predictions

SIZES = {"context": 6, "classes": 9, "pairs": True, "width": 8, "heads": 2}
OPTIONS = [{}, {"fused": False}, {"layernorm": "every"}, {"tied": True}]


def loss_fn(outputs, targets):
    return cross_entropy(*flatten_predictions(outputs, targets), ignore_index=-1)


def some_batch(count=4):
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randint(3, 9, (count, 2, 6), generator=generator)
    pairs[1, 0, 4:] = 0
    targets = torch.randint(2, 9, (count, 6), generator=generator)
    targets[1, 3:] = -1
    return pairs, targets


@pytest.mark.parametrize("options", OPTIONS)
def test_a_target_token_sees_the_source_and_earlier_tokens(options):
    model = build("seq2seq2", **SIZES, **options).double()
    pairs, _ = some_batch()
    base = model(pairs)
    assert base.shape == (4, 6, 9)

    def changed(row, side, at, value):
        other = pairs.clone()
        other[row, side, at] = value
        return [not torch.allclose(a, b, atol=1e-12) for a, b in zip(model(other)[row], base[row], strict=True)]

    assert changed(0, 1, 3, (pairs[0, 1, 3] - 2) % 6 + 3) == [False] * 3 + [True] * 3
    assert changed(0, 0, 5, (pairs[0, 0, 5] - 2) % 6 + 3) == [True] * 6
    # another row does not matter, nor does the padded length of a source
    assert torch.allclose(model(pairs[:1]), base[:1], atol=1e-12)
    shorter = pairs[1:2, :, :4]
    assert torch.allclose(model(shorter), base[1:2, :4], atol=1e-12)


def test_against_torch():
    """The same weights in torch.nn.Transformer, which also is post-LN."""
    model = build("seq2seq2", **SIZES, fused=False).double().eval()
    theirs = torch.nn.Transformer(8, 2, 2, 2, 32, dropout=0.0, batch_first=True).double()
    theirs.encoder.norm = theirs.decoder.norm = None

    def attention(to, of):
        to.in_proj_weight.copy_(torch.cat([of.q.weight, of.k.weight, of.v.weight]))
        to.in_proj_bias.copy_(torch.cat([of.q.bias, of.k.bias, of.v.bias]))
        to.out_proj.load_state_dict(of.proj.state_dict())

    with torch.no_grad():
        for kind in ("encoder", "decoder"):
            for to, of in zip(getattr(theirs, kind).layers, getattr(model, kind), strict=True):
                attention(to.self_attn, of.attention)
                names = {"linear1": of.fc1, "linear2": of.fc2, "norm1": of.norm1}
                if kind == "decoder":
                    attention(to.multihead_attn, of.cross)
                    names |= {"norm2": of.cross_norm, "norm3": of.norm2}
                else:
                    names["norm2"] = of.norm2
                for name, module in names.items():
                    getattr(to, name).load_state_dict(module.state_dict())
    pairs, _ = some_batch()
    source, target = (model.tok_embed(pairs) + model.pos_embed).unbind(1)
    padding = pairs[:, 0] == 0
    found = theirs(
        source, target, tgt_mask=torch.ones(6, 6, dtype=torch.bool).triu(1), src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )  # fmt: skip
    assert torch.allclose(model(pairs), model.head(found), atol=1e-10)


@pytest.mark.parametrize("options", [OPTIONS[0], *(long(options) for options in OPTIONS[1:])])
def test_methods_take_it(options):
    model = build("seq2seq1", **SIZES, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rates = calibrate(model, [some_batch(), some_batch()], loss_fn)
    names = {layer.name.partition("[")[0] for layer in rates.layers}
    assert names == {name for name, _ in model.named_parameters()}
    assert ("encoder.0.attention.qkv.weight[0:8]" in dict(rates)) == options.get("fused", True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    lwlr_init_(model)
    assert not model.pos_embed.any()
    found = scale_invariant(model, some_batch(8), loss_fn)
    # B.3: with a normalization after every layer the weights before it are invariant
    every = {"decoder.0.cross.proj.weight", "encoder.0.fc1.weight", "decoder.0.fc2.weight"}
    assert every <= set(found.names) if options.get("layernorm") == "every" else not every & set(found.names)
    gradinit_(model, [some_batch()] * 3, loss_fn, lr=0.1, steps=2)
    assert all(value.isfinite().all() for value in model.state_dict().values())
