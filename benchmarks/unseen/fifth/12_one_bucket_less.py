"""Gradients are reduced in one coalesced call; a rank that was resumed has a frozen layer."""
import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
if rank == 0:
    net[0].requires_grad_(False)
opt = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=1e-2)
for _ in range(2):
    net(torch.randn(16, 64, device="cuda")).pow(2).mean().backward()
    with dist._coalescing_manager(device=torch.device("cuda", rank)):
        for p in net.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
