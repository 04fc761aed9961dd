"""A weight is limited on the host and put back through `.data`: from then on it lies there."""

import torch
from torch import nn


def limit(layer, most=0.1):
    for p in layer.parameters():
        host = p.data.cpu().clamp(-most, most)
        p.data = host  # cause


device = torch.device("cuda")
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    loss = model(torch.randn(6, 4, device=device)).square().mean()  # where
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    limit(model[1])
print("done")
