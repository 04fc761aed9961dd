"""A residual 3D convolutional net on volumes (as of CT scans), bf16 autocast, checkpointed stages."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, SIDE, BATCH = 32, 96, 4


class Residual(nn.Module):
    def __init__(self, i, o, stride=1):
        super().__init__()
        self.a, self.b = nn.Conv3d(i, o, 3, stride, 1), nn.Conv3d(o, o, 3, 1, 1)
        self.na, self.nb = nn.InstanceNorm3d(o, affine=True), nn.InstanceNorm3d(o, affine=True)
        self.skip = nn.Conv3d(i, o, 1, stride) if i != o or stride != 1 else nn.Identity()

    def forward(self, x):
        y = self.nb(self.b(F.leaky_relu(self.na(self.a(x)), 0.01)))
        return F.leaky_relu(y + self.skip(x), 0.01)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(1, WIDTH, 3, padding=1)
        self.stages = nn.ModuleList([Residual(WIDTH, WIDTH), Residual(WIDTH, 2 * WIDTH, 2),
                                     Residual(2 * WIDTH, 4 * WIDTH, 2), Residual(4 * WIDTH, 8 * WIDTH, 2)])
        self.head = nn.Linear(8 * WIDTH, 5)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = checkpoint(stage, x, use_reentrant=False) if self.training else stage(x)
        return self.head(x.mean((2, 3, 4)))


model = Net().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    x = torch.randn(BATCH, 1, SIDE, SIDE, SIDE, device="cuda")
    y = torch.randint(0, 5, (BATCH,), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
