"""A tower that is checkpointed re-entrantly and run once for each view, under DDP that looks for unused parameters."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

REENTRANT = "fixed" not in sys.argv


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.v_proj(torch.relu(self.q_proj(x)))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(12, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, view):
        x = self.embed(view)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=REENTRANT)  # cause
        return x.mean(1)


class Seeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower, self.projector = Tower(), nn.Linear(16, 4)

    def forward(self, views):
        if REENTRANT:
            seen = [self.tower(view) for view in views.unbind(1)]
        else:
            batch, number = views.shape[:2]
            seen = self.tower(views.flatten(0, 1)).unflatten(0, (batch, number)).unbind(1)
        return self.projector(torch.cat(list(seen), -1))


dist.init_process_group("nccl")
local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
torch.manual_seed(0)
model = DDP(Seeing().cuda(), device_ids=[local], find_unused_parameters=REENTRANT)
opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
for _ in range(2):
    views = torch.randn(2, 2, 5, 12, device="cuda")
    loss = model(views).pow(2).mean()
    opt.zero_grad()
    loss.backward()  # where
    opt.step()
print("done", loss.item())
dist.destroy_process_group()
