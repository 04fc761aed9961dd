"""The logarithm of zero makes the loss NaN; the line that takes it is named."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv
model = nn.Linear(4, 3).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    p = model(torch.randn(8, 4, device="cuda")).relu()
    entropy = p * (p + 1e-6 if FIXED else p).log()  # cause
    loss = -entropy.sum(-1).mean()
    opt.zero_grad()
    loss.backward()  # where
    opt.step()
print("done")
