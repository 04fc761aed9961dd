"""The optimizer is given the whole parameters, which FSDP2 then replaces by sharded ones: nothing is ever trained."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
model = nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # cause
fully_shard(model)
if "fixed" in sys.argv:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.ones(3, 4, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()  # where
    optimizer.zero_grad()
print("done", loss.item())
dist.destroy_process_group()
