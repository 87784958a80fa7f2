"""ResNet-50 on ImageNet with LARS and a batch of 4,096 images on one GPU: the recipe of MLPerf's reference.

    pip install '.[timm]'
    python imagenet_lars.py --data imagenet/       # imagenet/train/CLASS/*.JPEG, imagenet/val/CLASS/*.JPEG

MLPerf reports 75.9 % within 47 epochs; this script has not been trained on ImageNet. `fused-lwlr train --preset
resnet50-lars` is the same with several GPUs, checkpoints and logs.
"""

import argparse
from itertools import islice

import timm
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import fused_lwlr

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--data", required=True, help="a folder with train/CLASS/ and val/CLASS/")
parser.add_argument("--model", default="resnet50")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--batch-size", type=int, default=4096)
parser.add_argument("--pass-size", type=int, default=256, help="images of one forward and backward pass")
parser.add_argument("--lr", type=float, default=10.0)
parser.add_argument("--warmup-epochs", type=float, default=5)
parser.add_argument("--epochs", type=int, default=47)
parser.add_argument("--workers", type=int, default=16)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
size = {"input_size": (3, args.image_size, args.image_size)}
train = ImageFolder(f"{args.data}/train", timm.data.create_transform(**size, is_training=True))
val = ImageFolder(f"{args.data}/val", timm.data.create_transform(**size))
loader = DataLoader(train, args.pass_size, shuffle=True, num_workers=args.workers, drop_last=True)
val_loader = DataLoader(val, args.pass_size, num_workers=args.workers)
passes = args.batch_size // args.pass_size
steps = len(loader) // passes
warmup, total = max(1, int(args.warmup_epochs * steps)), args.epochs * steps

model = timm.create_model(args.model, num_classes=len(train.classes))
model = model.to(device, memory_format=torch.channels_last)
# LARS acts on weights of two dimensions or more. The other parameters, biases and normalizations, have no decay either.
groups = [
    {"params": [(name, p) for name, p in model.named_parameters() if p.dim() >= 2], "weight_decay": 2e-4},
    {"params": [(name, p) for name, p in model.named_parameters() if p.dim() < 2], "weight_decay": 0.0},
]
lars = fused_lwlr.LARS(trust_coefficient=0.001)
optimizer = fused_lwlr.SGD(groups, lr=args.lr, momentum=0.9, scaling=lars, lr_in_momentum=True)
# linear warm-up, then a decay with the square of the remaining fraction
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda t: (t + 1) / warmup if t < warmup else max(0.0, 1 - (t - warmup) / (total - warmup)) ** 2
)

for epoch in range(args.epochs):
    model.train()
    batches = iter(loader)
    for _ in range(steps):
        for images, targets in islice(batches, passes):
            with torch.autocast(device, torch.bfloat16):
                outputs = model(images.to(device, memory_format=torch.channels_last))
                loss = cross_entropy(outputs, targets.to(device), label_smoothing=0.1)
            (loss / passes).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.eval()
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        correct = sum((model(x.to(device)).argmax(1) == y.to(device)).sum() for x, y in val_loader)
    print(f"epoch {epoch + 1}: training loss {loss:.3f}, validation accuracy {correct / len(val):.2%}")
