"""Moved from DDP to tensor parallel. It runs, but the loss does not go down as it did.

torchrun --nproc-per-node 2 07_sampler_left_from_ddp.py [--same-rows]
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class FeedForward(nn.Module):
    def __init__(self, d, wide):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, wide)
        self.act = nn.GELU()
        self.down = nn.Linear(wide, d)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(24, 64), FeedForward(64, 256), FeedForward(64, 256), nn.Linear(64, 5)).cuda()
    for block in (model[1], model[2]):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    g = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(256, 24, generator=g), torch.randint(0, 5, (256,), generator=g))
    if "--same-rows" in sys.argv:
        loader = DataLoader(data, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(11))
    else:
        loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data, shuffle=True, seed=11))

    opt = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
            opt.zero_grad()
            loss.backward()
            opt.step()
        if mesh.get_rank() == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
