"""A table that is built once serves the layers of two GPUs."""

import torch
from torch import nn


class Table:
    def __init__(self):
        self.rows = None

    def get(self, x):
        if self.rows is None:  # cause
            self.rows = torch.linspace(0, 1, x.shape[-1], device=x.device)
        return self.rows


class Layer(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.lin, self.table = nn.Linear(6, 6), table

    def forward(self, x):
        return self.lin(x) * self.table.get(x)  # where


table = Table()
first, second = Layer(table).to("cuda:0"), Layer(table).to("cuda:1")
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
second(first(torch.randn(2, 6, device="cuda:0")).to("cuda:1")).sum().backward()
optimizer.step()
print("done")
