"""Tensor parallelism over four GPUs with a sequence-parallel norm, by parallelize_module."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               parallelize_module)

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (4,))


class Block(nn.Module):
    def __init__(self, d=512):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.manual_seed(0)
net = nn.Sequential(Block(), Block()).cuda()
for block in net:
    parallelize_module(block, mesh, {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    })
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(2):
    x = torch.randn(2, 32 // 4, 512, device="cuda")
    net(x).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
print("rank", dist.get_rank(), "done")
dist.destroy_process_group()
