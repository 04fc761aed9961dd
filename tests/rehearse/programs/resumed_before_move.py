"""An optimizer's state is loaded while the model is still on the CPU."""

import torch
from torch import nn


def earlier():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def resume(state, device):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(state)  # cause
    model.to(device)
    return model, optimizer


device = torch.device("cuda")
model, optimizer = resume(earlier(), device)
model(torch.randn(3, 4, device=device)).sum().backward()
optimizer.step()  # where
print("done")
