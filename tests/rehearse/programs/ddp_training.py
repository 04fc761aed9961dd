"""DDP over NCCL on two GPUs as in the tutorials: runs clean. With `apart`, one rank changes its weights by itself."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=2, sampler=sampler)
model = DDP(nn.Linear(4, 1).cuda(), device_ids=[local])
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(local, non_blocking=True), y.cuda(local)
        loss = (model(x) - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    if "apart" in sys.argv:
        with torch.no_grad():
            model.module.weight.add_(rank)
dist.barrier(device_ids=[local])
seen = [None, None]
dist.all_gather_object(seen, {"rank": rank})
total = loss.detach().clone()
dist.all_reduce(total, op=dist.ReduceOp.AVG if False else dist.ReduceOp.SUM)
if rank == 0:
    print("done", seen, dist.get_backend())
dist.destroy_process_group()
