"""Weights and gradients fit; the two moments of Adam, made at the first step, do not."""
import torch
from torch import nn

net = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(20))).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
for _ in range(2):
    x = torch.randn(8, 8192, device="cuda")
    net(x).pow(2).mean().backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
