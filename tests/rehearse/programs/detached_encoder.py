"""The encoder's output is detached, so the encoder is never trained."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv
encoder, head = nn.Linear(4, 8).cuda(), nn.Linear(8, 2).cuda()
opt = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
for _ in range(3):
    features = encoder(torch.randn(3, 4, device="cuda"))
    features = features if FIXED else features.detach()  # cause
    loss = head(features).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()  # where
print("done")
