"""Evaluation without no_grad keeps the graph of every batch."""

import contextlib
import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).cuda().eval()
outputs = []
with torch.no_grad() if "fixed" in sys.argv else contextlib.nullcontext():
    for _ in range(12):
        out = model(torch.randn(3, 4, device="cuda"))  # where, cause
        outputs.append(out)
print("done", len(outputs))
