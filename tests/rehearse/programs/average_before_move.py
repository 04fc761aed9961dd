"""An average of the weights is made before the model moves."""

import copy

import torch
from torch import nn


class Average:
    def __init__(self, model):
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model):
        for ours, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            ours.mul_(0.9).add_(theirs, alpha=0.1)  # where


class Trainer:
    def __init__(self, device):
        self.device = device
        self.model = nn.Linear(4, 2)
        self.average = Average(self.model)  # cause
        self.model.to(self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self):
        self.model(torch.randn(3, 4, device=self.device)).sum().backward()
        self.optimizer.step()
        self.average.update(self.model)


Trainer(torch.device("cuda")).step()
print("done")
