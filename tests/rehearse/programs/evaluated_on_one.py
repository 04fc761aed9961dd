"""Rank 0 alone evaluates, and the evaluation ends in a collective."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda", rank)
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1).to(device), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def evaluate() -> float:
    with torch.no_grad():
        total = model.module(torch.ones(2, 4, device=device)).mean()
    dist.all_reduce(total)  # where
    return float(total)


for _ in range(3):
    loss = model(torch.randn(4, 4, device=device)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 or "fixed" in sys.argv:  # cause
        print(evaluate())
dist.destroy_process_group()
print("done")
