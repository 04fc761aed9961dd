"""Gradients are gathered over four batches without a reduction, and reduced in the fourth or in the loader's last."""
import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(0)
rows = TensorDataset(torch.randn(144, 32), torch.randint(0, 4, (144,)))
split = 72 if "even" in sys.argv[1:] else 64
mine = Subset(rows, range(split)) if rank == 0 else Subset(rows, range(split, 144))
loader = DataLoader(mine, batch_size=8, shuffle=True)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4)).cuda())
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for epoch in range(2):
    total = torch.zeros(1, device="cuda")
    for number, (x, y) in enumerate(loader, 1):
        last = number % 4 == 0 or number == len(loader)
        with contextlib.nullcontext() if last else net.no_sync():
            loss = nn.functional.cross_entropy(net(x.cuda()), y.cuda())
            (loss / 4).backward()
        total += loss.detach()
        if last:
            opt.step()
            opt.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        print(epoch, total.item())
dist.destroy_process_group()
