"""Rank 0 reads the settings and the names of the classes and hands them out; the others make room for one object."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def shared():
    if rank == 0:
        found = [{"lr": 1e-3, "width": 64}, [f"class {n}" for n in range(10)]]
    else:
        found = [None, None] if "two" in sys.argv[1:] else [None]
    dist.broadcast_object_list(found, src=0, device=torch.device("cuda"))
    return found


settings, *names = shared()
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, settings["width"]), nn.ReLU(), nn.Linear(settings["width"], 10)).cuda())
opt = torch.optim.SGD(net.parameters(), lr=settings["lr"])
for step in range(3):
    x, y = torch.randn(8, 16, device="cuda"), torch.randint(0, 10, (8,), device="cuda")
    nn.functional.cross_entropy(net(x), y).backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
