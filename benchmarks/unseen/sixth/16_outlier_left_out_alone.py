"""FSDP2; a batch whose loss is far off is left out, by each rank's own loss or (together) by the largest of all."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 96), *(nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU()) for _ in range(3)),
                    nn.Linear(96, 1)).cuda()
for block in net[1:4]:
    fully_shard(block)
fully_shard(net)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
torch.manual_seed(rank)
for step in range(4):
    x = torch.randn(16, 32, device="cuda")
    y = torch.randn(16, 1, device="cuda")
    if rank == 1 and step == 1:
        y = y * 100  # a broken row in this shard
    loss = (net(x) - y).pow(2).mean()
    worst = loss.detach().clone()
    if "together" in sys.argv[1:]:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if worst.item() > 50:
        print(f"rank {rank}: step {step} left out")
        continue
    loss.backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
