"""A head that the loss does not use, in the optimizer: worth a warning, no fault."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.body(x), self.extra(x)


model = Net().cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    out, extra = model(torch.randn(3, 4, device="cuda"))
    opt.zero_grad()
    out.pow(2).mean().backward()
    opt.step()
print("done", extra.detach().mean().item())
