"""FSDP2 without set_device: every rank keeps its shards on the first GPU."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
if "fixed" in sys.argv:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
model = fully_shard(nn.Linear(4, 2).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(3, 4, device="cuda")).square().mean().backward()  # where, cause
optimizer.step()
print("done")
dist.destroy_process_group()
