"""DDP over a model that reads pictures and text; the second rank's second batch has text only."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.tower = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(512, 64))
        self.head = nn.Linear(64, 100)

    def forward(self, ids, pixels=None):
        hidden = self.words(ids)
        if pixels is not None:
            hidden = hidden + self.tower(pixels)[:, None]
        return self.head(hidden)


dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
net = nn.parallel.DistributedDataParallel(
    Reader().to(device), device_ids=[device.index], find_unused_parameters="unused" in sys.argv[1:]
)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    ids = torch.randint(0, 100, (4, 12), device=device)
    pixels = torch.randn(4, 3, 16, 16, device=device)
    if rank == 1 and step == 1:
        pixels = None
    logits = net(ids, pixels)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
dist.destroy_process_group()
