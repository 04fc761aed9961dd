"""The optimizer is made before the head is replaced: the new head is never stepped."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), lr=0.1)  # where
model[2] = nn.Linear(8, 5)  # cause
if FIXED:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    opt.zero_grad()
    model(torch.randn(3, 4)).pow(2).mean().backward()
    opt.step()
print("done")
