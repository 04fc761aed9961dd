"""The weights are in half precision, in which Adam's eps is 0: a row that gets no gradient becomes NaN."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)).cuda().half()
eps = 1e-4 if "fixed" in sys.argv else 1e-8
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=eps)  # cause
for _ in range(2):
    ids = torch.randint(0, 20, (16,), device="cuda")
    loss = nn.functional.cross_entropy(model(ids).float(), ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # where
print("done")
