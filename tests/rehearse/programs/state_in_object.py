"""An object carries the state of a recurrent cell into the next step, with its graph."""

import torch
from torch import nn


class State:
    def __init__(self, rows, width):
        self.hidden = torch.zeros(rows, width, device="cuda")

    def keep(self, hidden):
        self.hidden = hidden  # cause


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x, state):
        hidden = self.cell(x, state.hidden)
        state.keep(hidden)
        return hidden.sum()


model, state = Reader().cuda(), State(2, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(2, 3, device="cuda"), state)
    loss.backward()  # where
    optimizer.step()
    optimizer.zero_grad()
print("done")
