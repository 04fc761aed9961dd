"""Rank 0 reduces the loss before the count of tokens, the others the count before the loss."""
import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda())
opt = torch.optim.SGD(net.parameters(), lr=1e-3)


def summed(values):
    return {name: _summed(value) for name, value in values.items()}


def _summed(value):
    dist.all_reduce(value)
    return value


for step in range(2):
    loss = net(torch.randn(8, 256, device="cuda")).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    values = {"tokens": torch.tensor(8 + rank, device="cuda")}
    if rank == 0:
        values = {"loss": loss.detach(), **values}
    else:
        values["loss"] = loss.detach()
    values = summed(values)
    if rank == 0:
        print(values["loss"] / values["tokens"])
dist.destroy_process_group()
