"""Positions are made in forward without a device."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 8), nn.Embedding(32, 8)

    def forward(self, ids):
        positions = torch.arange(ids.size(1), device=ids.device if FIXED else None)  # cause
        return self.tokens(ids) + self.places(positions)  # where


net = Net().to("cuda")
net(torch.randint(0, 16, (2, 6), device="cuda")).sum().backward()
print("done")
