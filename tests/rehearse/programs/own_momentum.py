"""A hand-written optimizer whose momentum buffers are made without a device."""

import sys

import torch
from torch import nn

model = nn.Linear(4, 2).cuda()
device = "cuda" if "fixed" in sys.argv else "cpu"
buffers = [torch.zeros(p.shape, device=device) for p in model.parameters()]  # cause
for _ in range(2):
    model.zero_grad()
    model(torch.randn(3, 4).cuda()).pow(2).mean().backward()
    with torch.no_grad():
        for p, buffer in zip(model.parameters(), buffers, strict=True):
            buffer.mul_(0.9).add_(p.grad)  # where
            p.sub_(0.1 * buffer)  # where
print("done")
