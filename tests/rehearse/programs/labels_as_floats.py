"""A data set keeps class labels as numpy gave them, in floating point."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Table(Dataset):
    def __init__(self, rows):
        self.features = torch.from_numpy(rows[:, :-1]).float()
        self.kinds = torch.from_numpy(rows[:, -1])  # cause

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        return {"features": self.features[index], "label": self.kinds[index]}


def step(model, batch):
    logits = model(batch["features"].cuda())
    return nn.functional.cross_entropy(logits, batch["label"].cuda())  # where


model = nn.Linear(3, 2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Table(np.arange(32.0).reshape(8, 4) % 2), batch_size=4)
for batch in loader:
    step(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
