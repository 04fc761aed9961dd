"""A tensor that backward needs is changed in place."""

import sys

import torch
from torch import nn

FIXED = "fixed" in sys.argv
model = nn.Linear(4, 4).cuda()
h = model(torch.randn(3, 4, device="cuda")).sigmoid()
if FIXED:
    h = h + 1
else:
    h += 1  # cause
h.sum().backward()  # where
print("done")
