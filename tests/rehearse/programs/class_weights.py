"""Class weights of the loss are left on the CPU."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

weights = torch.tensor([1.0, 2.0, 0.5])  # cause
if "fixed" in sys.argv:
    weights = weights.cuda()
model = nn.Linear(4, 3).cuda()
x, y = torch.randn(6, 4).cuda(), torch.randint(0, 3, (6,)).cuda()
F.cross_entropy(model(x), y, weight=weights).backward()  # where
print("done")
