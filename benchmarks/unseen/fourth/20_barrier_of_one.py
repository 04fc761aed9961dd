"""Rank 0 saves and waits at a barrier that the others never come to; they wait at the next one."""
import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
for epoch in range(2):
    net(torch.randn(8, 64, device="cuda")).sum().backward()
    opt.step()
    opt.zero_grad()
    if rank == 0:
        torch.save(net.module.state_dict(), f"/tmp/foreign-20-{epoch}.pt")
        dist.barrier()
print("done")
dist.destroy_process_group()
