"""Validation adds up the loss of every batch; nobody said that no gradients are wanted (quiet: somebody did)."""
import contextlib
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


net = nn.Sequential(nn.Linear(256, 1024), *(Block(1024) for _ in range(8)), nn.Linear(1024, 10)).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
loss_fn = nn.CrossEntropyLoss()
quiet = torch.no_grad if "quiet" in sys.argv[1:] else contextlib.nullcontext


def batch():
    return torch.randn(8192, 256, device="cuda"), torch.randint(0, 10, (8192,), device="cuda")


def validate():
    net.eval()
    total = 0
    with quiet():
        for _ in range(14):
            x, y = batch()
            total += loss_fn(net(x), y)
    net.train()
    return total / 14


for epoch in range(2):
    for _ in range(2):
        x, y = batch()
        opt.zero_grad()
        loss_fn(net(x), y).backward()
        opt.step()
    print(epoch, validate().item())
