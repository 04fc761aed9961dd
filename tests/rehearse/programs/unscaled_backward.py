"""The loss goes backward past the scaler that later unscales its gradients."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for _ in range(2):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(8, 4, device="cuda")).float().pow(2).mean()
    optimizer.zero_grad()
    if "fixed" in sys.argv:
        scaler.scale(loss).backward()
    else:
        loss.backward()  # cause
    scaler.unscale_(optimizer)  # where
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
print("done")
