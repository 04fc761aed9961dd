"""Rank 1 has one batch less. `join` (an argument) waits for it as torch means it to be done."""
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[torch.cuda.current_device()])
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
rows = list(torch.randn(50 - 10 * rank, 64).split(10))
with net.join() if "join" in sys.argv else nullcontext():
    for batch in rows:
        net(batch.cuda()).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
print("rank", rank, "done")
dist.destroy_process_group()
