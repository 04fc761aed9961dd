"""Features that were computed earlier and stored, wider than the head that reads them."""

import os
import sys
import tempfile

import torch
from torch import nn

folder = tempfile.mkdtemp()
for name, width in (("small", 16), ("large", 24)):
    torch.save({"features": torch.rand(8, width), "kinds": torch.arange(8) % 3}, os.path.join(folder, name))
path = os.path.join(folder, "small" if "fixed" in sys.argv else "large")


class Head(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.out = nn.Linear(width, 3)

    def forward(self, features):
        if features.ndim != 2 or features.shape[-1] != self.width:
            raise RuntimeError("the features do not belong to this head")  # where
        return self.out(features)


stored = torch.load(path)  # cause
head = Head(16).cuda()
opt = torch.optim.SGD(head.parameters(), lr=0.1)
for start in range(0, 8, 4):
    features = nn.functional.normalize(stored["features"][start : start + 4].float(), dim=-1).cuda()
    loss = nn.functional.cross_entropy(head(features), stored["kinds"][start : start + 4].cuda())
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done", loss.item())
