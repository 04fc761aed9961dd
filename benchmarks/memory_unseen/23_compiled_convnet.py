"""torch.compile (default mode) of a small ConvNeXt-like net, bf16 autocast."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, DEPTH, SIZE, BATCH = 192, 3, 224, 64


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.dw = nn.Conv2d(d, d, 7, padding=3, groups=d)
        self.norm = nn.GroupNorm(1, d)
        self.a, self.b = nn.Conv2d(d, 4 * d, 1), nn.Conv2d(4 * d, d, 1)
        self.gamma = nn.Parameter(1e-6 * torch.ones(d, 1, 1))

    def forward(self, x):
        return x + self.gamma * self.b(F.gelu(self.a(self.norm(self.dw(x)))))


net = nn.Sequential(
    nn.Conv2d(3, DIM, 4, stride=4), *[Block(DIM) for _ in range(DEPTH)],
    nn.Conv2d(DIM, 2 * DIM, 2, stride=2), *[Block(2 * DIM) for _ in range(DEPTH)],
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * DIM, 1000),
).cuda()
compiled = torch.compile(net)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
for step in range(4):
    x = torch.randn(BATCH, 3, SIZE, SIZE, device="cuda")
    y = torch.randint(0, 1000, (BATCH,), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.cross_entropy(compiled(x), y, label_smoothing=0.1)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
