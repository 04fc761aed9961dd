"""Each rank decides by its own loss when to stop: one leaves the loop, the other waits in backward."""

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


def own_loss(epoch: int) -> torch.Tensor:
    value = torch.tensor(float(epoch * rank), device=device)
    if "fixed" in sys.argv:
        dist.all_reduce(value)
    return value


for epoch in range(4):
    for _ in range(2):
        loss = model(torch.randn(4, 4, device=device)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # where
        optimizer.step()
    if own_loss(epoch).item() > 0:  # cause
        break
dist.destroy_process_group()
print("done")
