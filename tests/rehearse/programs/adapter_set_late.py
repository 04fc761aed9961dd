"""Layers are wrapped by adapters after the model has moved."""

import torch
from torch import nn


class Adapted(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T  # where


def adapt(model):
    for name, child in list(model.named_children()):
        setattr(model, name, Adapted(child))  # cause


device = torch.device("cuda")
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
adapt(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(3, 4, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
