"""A loop that is steered by values: isnan, a best loss, a rate cut on a plateau, early stopping."""
import math

import torch
from torch import nn

net = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096)).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
plan = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1)
best, bad = math.inf, 0
for step in range(6):
    x = torch.randn(64, 4096, device="cuda")
    loss = (net(x) - x).pow(2).mean()
    if torch.isnan(loss) or torch.isinf(loss):
        raise SystemExit("diverged")
    if loss.item() > 3:
        break
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if norm > 100:
        print("skipped")
        continue
    opt.step()
    plan.step(loss)
    if float(loss) < best - 1e-3:
        best, bad = float(loss), 0
    else:
        bad += 1
    if bad >= 3:
        print("stopped early")
        break
    print(step, loss.item(), opt.param_groups[0]["lr"])
else:
    print("all six steps")
torch.save(net.state_dict(), "/tmp/foreign-04.pt")
