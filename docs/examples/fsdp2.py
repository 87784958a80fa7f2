"""FSDP2: a Transformer under `fully_shard`, with LAMB, clipping by the global norm, and a sharded checkpoint.

    torchrun --nproc-per-node 8 fsdp2.py
    torchrun --nproc-per-node 2 fsdp2.py --device cpu --steps 5

Norms are norms of whole layers. A step adds one all-reduce of one small table to FSDP2's communication.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fused_lwlr

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--depth", type=int, default=8)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--checkpoint", default="runs/fsdp2", help="a folder")
args = parser.parse_args()

if args.device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(args.device, (int(os.environ["WORLD_SIZE"]),))
torch.manual_seed(0)  # the same weights in every process

layers = [nn.TransformerEncoderLayer(args.width, 8, 4 * args.width, 0.0, batch_first=True) for _ in range(args.depth)]
model = nn.Sequential(nn.Embedding(256, args.width), *layers, nn.Linear(args.width, 256)).to(args.device)
for layer in layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

# after fully_shard, since parameters are DTensors from here on
optimizer = fused_lwlr.AdamW(model.named_parameters(), lr=1e-2, scaling=fused_lwlr.LAMB(), clip_global_norm=1.0)

torch.manual_seed(dist.get_rank())  # other data in every process
losses = []
for _ in range(args.steps):
    tokens = torch.randint(256, (8, 1), device=args.device) + torch.arange(33, device=args.device)
    tokens %= 256  # sequences that count
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())
if dist.get_rank() == 0:
    print(f"training loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last", flush=True)

model_state, optimizer_state = get_state_dict(model, optimizer)
dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=args.checkpoint)
# to resume: dcp.load into such a dictionary, and then set_state_dict(model, optimizer, ...)
dist.barrier()  # no process leaves while another one still saves
dist.destroy_process_group()
if args.device == "cpu":
    # a thread of gloo that still frees a tensor while Python shuts down aborts its process (PyTorch's issue 190489)
    os._exit(0)
