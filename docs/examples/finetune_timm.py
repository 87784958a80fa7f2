"""Fine-tune a pretrained model of timm with layer decay: blocks near the input have the lowest rates.

    pip install '.[timm]'
    python finetune_timm.py --data flowers/        # flowers/CLASS/*.jpg

`layer_decay` gives one multiplier to each parameter, so one param group is enough. `--frozen` keeps parameters
unchanged, bit for bit.
"""

import argparse

import timm
import torch
from torch.nn.functional import cross_entropy
from torchvision.datasets import ImageFolder

import fused_lwlr

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--data", required=True, help="a folder with one folder of images for each class")
parser.add_argument("--model", default="vit_small_patch16_224")
parser.add_argument("--pretrained", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--decay", type=float, default=0.75, help="rate of a block over that of the next one")
parser.add_argument("--frozen", nargs="*", default=["patch_embed.*"], help="names or patterns of parameters")
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--workers", type=int, default=4)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
images = ImageFolder(args.data)
model = timm.create_model(args.model, pretrained=args.pretrained, num_classes=len(images.classes)).to(device)
config = timm.data.resolve_model_data_config(model)
images.transform = timm.data.create_transform(**config, is_training=True)
loader = torch.utils.data.DataLoader(images, args.batch_size, shuffle=True, num_workers=args.workers)

multipliers = fused_lwlr.multipliers.layer_decay(model, args.decay, frozen=args.frozen)
optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=args.lr, weight_decay=0.05, layers=multipliers)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

for epoch in range(args.epochs):
    losses = []
    for batch, targets in loader:
        loss = cross_entropy(model(batch.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    print(f"epoch {epoch + 1}: training loss {torch.stack(losses).mean():.3f}")
