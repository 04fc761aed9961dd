"""Layers in a plain list, on the CPU: nothing raises, they are just never trained."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(4, 4) for _ in range(2)]  # where, cause
        self.layers = nn.ModuleList(layers) if FIXED else layers
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.out(x)


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    net(torch.randn(3, 4)).pow(2).mean().backward()
    opt.step()
print("done")
