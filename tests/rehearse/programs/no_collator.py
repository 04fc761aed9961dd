"""Rows of different length, and a loader without a collate_fn that pads them."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
rows = [(torch.randn(3 + n % 3, 4), n % 2) for n in range(8)]


def padded(batch: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    xs = torch.nn.utils.rnn.pad_sequence([x for x, _ in batch], batch_first=True)
    return xs, torch.tensor([y for _, y in batch])


loader = DataLoader(rows, batch_size=4, collate_fn=padded if "fixed" in sys.argv else None)  # cause
model = nn.Linear(4, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:  # where
    loss = nn.functional.cross_entropy(model(x.cuda()).mean(1), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("done")
