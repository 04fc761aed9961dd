"""The loop's own variable is moved; the batch keeps what it had."""

import torch
from torch import nn


def train(batches, device):
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        for t in batch:
            t = t.to(device)  # cause
        x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)  # where
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train([[torch.randn(5, 4), torch.randint(0, 2, (5,))] for _ in range(2)], torch.device("cuda"))
print("done")
