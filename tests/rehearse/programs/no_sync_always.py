"""Every backward pass runs inside no_sync, so the ranks never share gradients."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

FIXED = "fixed" in sys.argv
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
ddp = DDP(nn.Linear(4, 1))
opt = torch.optim.SGD(ddp.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(4):
    quiet = contextlib.nullcontext() if FIXED and step % 2 else ddp.no_sync()  # where, cause
    with quiet:
        ddp(torch.randn(2, 4)).pow(2).sum().backward()
    if step % 2:
        opt.step()
        opt.zero_grad()
dist.destroy_process_group()
print("done")
