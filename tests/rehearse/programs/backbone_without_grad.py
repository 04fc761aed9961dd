"""The backbone runs under no_grad although the optimizer holds it."""

import contextlib
import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        if FIXED:
            return self.head(self.body(x))
        with torch.no_grad():  # cause
            features = self.body(x)
        return self.head(features)


model = Net().cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
with contextlib.nullcontext():
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(3, 4, device="cuda")).pow(2).mean().backward()
        opt.step()  # where
print("done")
