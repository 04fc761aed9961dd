"""A head that no loss uses, in the optimizer: worth a warning, no fault. What a second optimizer trains is neither."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra, self.side = nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.body(x), self.extra(x), self.side(x)


model = Net().cuda()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
side_opt = torch.optim.SGD(model.side.parameters(), lr=0.1)
for _ in range(2):
    out, extra, side = model(torch.randn(3, 4, device="cuda"))
    opt.zero_grad()
    out.pow(2).mean().backward()
    opt.step()
    side_opt.zero_grad()
    side.pow(2).mean().backward()
    side_opt.step()
print("done", extra.detach().mean().item())
