import torch
from torch import nn


class AverageMeter:
    def __init__(self):
        self.values = []

    def update(self, value):
        self.values.append(value)

    def avg(self):
        return sum(self.values) / len(self.values)


def chamfer(a, b):
    d = (a[:, :, None] - b[:, None]).pow(2).sum(-1)
    return d.amin(1).mean() + d.amin(2).mean()


class Completion(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, cloud):
        return cloud + self.net(cloud)


device = "cuda"
model = Completion().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = AverageMeter()
for iteration in range(10):
    cloud = torch.rand(2, 12, 3, device=device)
    loss = chamfer(model(cloud), cloud.roll(1, 1) + 0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.update(loss)
print(float(losses.avg()))
