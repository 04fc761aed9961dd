"""Gradients are clipped while they still carry the scaler's factor."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv
model = nn.Linear(4, 2).cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for _ in range(2):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(3, 4, device="cuda")).pow(2).mean()
    scaler.scale(loss).backward()
    if FIXED:
        scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # where, cause
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
print("done")
