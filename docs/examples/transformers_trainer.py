"""The Trainer of transformers with a fused optimizer.

pip install '.[integrations]'
python transformers_trainer.py
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fused_lwlr

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--out", default="runs/trainer")
args = parser.parse_args()

sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
ids = (torch.arange(16) + torch.randint(64, (256, 1))) % 64  # sequences that count
data = [{"input_ids": row, "labels": row} for row in ids]

optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=0.05, scaling=fused_lwlr.LAMB(), clip_global_norm=1.0)
# The optimizer clips in its own launch, so the Trainer need not. None: the Trainer's linear schedule.
options = TrainingArguments(args.out, max_steps=args.steps, max_grad_norm=0.0, save_strategy="no", report_to="none")
trainer = Trainer(model=model, args=options, train_dataset=data, optimizers=(optimizer, None))
result = trainer.train()
print(f"training loss {result.training_loss:.3f}")
