"""Pairs of sentences whose passes have different numbers of tokens, and the step of one pass to compare with."""

import dataclasses

import torch
from torch.nn.functional import cross_entropy

from fused_lwlr.data import open_text
from fused_lwlr.training.processes import World
from fused_lwlr.training.recipe import Recipe
from fused_lwlr.training.trainer import Trainer

ALONE = World(0, 1, torch.device("cpu"))
FIELDS = {
    "model": "seq2seq1", "model_args": ("width=16",), "optimizer": "adamw", "lr": 0.01, "steps": 3, "batch_size": 16,
    "micro_batch": 2, "rates": "single", "device": "cpu", "workers": 0, "context": 24, "vocabulary": "bytes",
    "log_every": 3,
}  # fmt: skip


def uneven(folder):
    """64 pairs, the targets of 1 to 20 letters; the recipe that trains on them, and the data."""
    path = folder / "pairs.tsv"
    path.write_text("".join(f"{i}\t{'abcdefghij' * 2:.{1 + i * i % 20}}\n" for i in range(64)))
    recipe = Recipe(**FIELDS, data=f"pairs:{path}", out=str(folder / "run"))
    return recipe, open_text(recipe.data, context=recipe.context, vocabulary=recipe.vocabulary)


def one_pass(recipe, data, steps=1):
    """The trainer of one process and one pass a step; and the gradients, loss and number of tokens of each step."""
    trainer = Trainer(dataclasses.replace(recipe, micro_batch=None), ALONE, data)
    trainer.prepare()
    found = []
    for batch in list(trainer.batches())[:steps]:
        trainer.model.train()
        logits = trainer.model(batch.inputs).flatten(0, 1)
        loss = cross_entropy(logits, batch.targets.flatten(), ignore_index=-1)
        loss.backward()
        gradients = {name: param.grad.clone() for name, param in trainer.model.named_parameters()}
        found.append((gradients, loss.item(), (batch.targets >= 0).sum().item()))
        trainer.update()
    return trainer, found
