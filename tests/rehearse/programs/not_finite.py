"""The loss is infinite from the start."""

import sys

import torch
from torch import nn

model = nn.Linear(4, 2).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scores = model(torch.randn(3, 4, device="cuda")).softmax(-1)
floor = 1e-6 if "fixed" in sys.argv else 0.0
loss = -((scores * 0.0) + floor).log().mean()  # cause
loss.backward()  # where
opt.step()
print("done")
