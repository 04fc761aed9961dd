"""DGCNN over point clouds: pairwise distances, k nearest, gathered edge features, batch norm, max; Rprop, then ASGD."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

BATCH, POINTS, NEAR, CLASSES, WIDTH, STEPS = 16, 2048, 20, 40, 64, 3


def edges(x):
    """B x C x N to B x 2C x N x NEAR."""
    b, c, n = x.shape
    d = torch.cdist(x.transpose(1, 2), x.transpose(1, 2))
    idx = d.topk(NEAR, dim=-1, largest=False).indices
    near = x.transpose(1, 2)[torch.arange(b, device=x.device)[:, None, None], idx]
    here = x.transpose(1, 2)[:, :, None].expand(-1, -1, NEAR, -1)
    return torch.cat([near - here, here], -1).permute(0, 3, 1, 2)


class DGCNN(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [3, WIDTH, WIDTH, 2 * WIDTH, 4 * WIDTH]
        self.convs = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))
            for a, b in zip(sizes, sizes[1:])
        )
        self.wide = nn.Sequential(nn.Conv1d(sum(sizes[1:]), 16 * WIDTH, 1, bias=False), nn.BatchNorm1d(16 * WIDTH), nn.LeakyReLU(0.2))
        self.head = nn.Sequential(nn.Linear(32 * WIDTH, 512), nn.BatchNorm1d(512), nn.LeakyReLU(0.2), nn.Dropout(0.5), nn.Linear(512, CLASSES))

    def forward(self, x):
        kept = []
        for conv in self.convs:
            x = conv(edges(x)).amax(-1)
            kept.append(x)
        x = self.wide(torch.cat(kept, 1))
        return self.head(torch.cat([x.amax(-1), x.mean(-1)], 1))


model = DGCNN().to("cuda")
for make in (lambda p: torch.optim.Rprop(p, lr=1e-3), lambda p: torch.optim.ASGD(p, lr=1e-3)):
    opt = make(model.parameters())
    for step in range(STEPS):
        x, y = torch.randn(BATCH, 3, POINTS, device="cuda"), torch.randint(0, CLASSES, (BATCH,), device="cuda")
        loss = F.cross_entropy(model(x), y, label_smoothing=0.2)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(type(opt).__name__, step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
