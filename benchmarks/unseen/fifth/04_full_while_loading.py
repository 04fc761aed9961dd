"""The average of the weights is a second copy on the same card, made before anything is trained."""
import copy

import torch
from torch import nn

net = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(8))).cuda()
average = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
for _ in range(2):
    net(torch.randn(4, 16384, device="cuda")).mean().backward()
    opt.step()
    opt.zero_grad()
    with torch.no_grad():
        for a, b in zip(average.parameters(), net.parameters()):
            a.lerp_(b, 0.01)
