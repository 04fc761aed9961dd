"""Every loss is kept in a list, with its graph."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv
model = nn.Linear(8, 8).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for _ in range(6):
    loss = model(torch.randn(4, 8, device="cuda")).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    history.append(loss.item() if FIXED else loss)  # where, cause
print("done", len(history))
