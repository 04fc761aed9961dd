"""An exponential moving average of the weights is kept on the CPU and updated from the GPU."""

import sys

import torch
from torch import nn

device = "cuda" if "fixed" in sys.argv else "cpu"
model = nn.Linear(4, 2).cuda()
average = {name: p.detach().clone().to(device) for name, p in model.named_parameters()}  # cause
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(3, 4, device="cuda")).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    for name, p in model.named_parameters():
        average[name].mul_(0.9).add_(p.detach(), alpha=0.1)  # where
print("done")
