"""Halves its batch at each out-of-memory error until one step passes, as accelerate's and Lightning's finders do."""
import gc

import torch
from torch import nn

net = nn.Sequential(nn.Linear(8192, 32768), nn.GELU(), nn.Linear(32768, 8192)).cuda().bfloat16()
opt = torch.optim.SGD(net.parameters(), lr=1e-3)
batch = 262144
while True:
    try:
        x = torch.randn(batch, 8192, device="cuda", dtype=torch.bfloat16)
        net(x).float().pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
        break
    except torch.cuda.OutOfMemoryError:
        x = None
        gc.collect()
        torch.cuda.empty_cache()
        batch //= 2
        assert batch, "nothing fits"
print("batch", batch)
assert batch < 262144
for _ in range(2):
    net(torch.randn(batch, 8192, device="cuda", dtype=torch.bfloat16)).float().pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
