"""A loss is given class weights and never moved."""

import argparse

import torch
from torch import nn

args = argparse.Namespace(device="cuda")
model = nn.Linear(4, 3).to(args.device)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]))  # cause
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(6, 4).to(args.device), torch.randint(0, 3, (6,)).to(args.device)
criterion(model(x), y).backward()  # where
optimizer.step()
print("done")
