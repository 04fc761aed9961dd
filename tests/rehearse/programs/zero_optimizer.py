"""DDP with an optimizer that steps a part of the weights on every rank and shares them: runs clean."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
torch.manual_seed(0)
net = nn.SyncBatchNorm.convert_sync_batchnorm(
    nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
)
model = DDP(net.cuda(), device_ids=[local])
opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
train, test = TensorDataset(torch.randn(16, 4)), TensorDataset(torch.randn(8, 4))
sampler = DistributedSampler(train)
loader, held_out = (
    DataLoader(train, 4, sampler=sampler),
    DataLoader(test, 4, sampler=DistributedSampler(test)),
)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        opt.zero_grad()
        model(x.cuda()).square().mean().backward()
        opt.step()
    with torch.no_grad():
        for (x,) in held_out:
            model(x.cuda())
dist.destroy_process_group()
print("done")
