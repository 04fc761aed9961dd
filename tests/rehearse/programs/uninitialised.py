"""A parameter made by torch.empty that nobody initialises."""

import sys

import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(4))  # where, cause
        if "fixed" in sys.argv:
            nn.init.ones_(self.gain)

    def forward(self, x):
        return x * self.gain


model = nn.Sequential(nn.Linear(4, 4), Scale()).cuda()
model(torch.randn(2, 4).cuda()).sum().backward()
print("done")
