import torch
from torch import nn


class FlatAverage:
    def __init__(self, module, decay):
        self.decay = decay
        self.param = torch.cat([p.detach().flatten() for p in module.parameters()])

    @torch.no_grad()
    def update(self, module):
        new_param = torch.cat([p.flatten() for p in module.parameters()])
        diff = self.param - new_param
        self.param -= (1 - self.decay) * diff


def build():
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 1))
    ema = FlatAverage(model, 0.99)
    return model, ema


model, ema = build()
model = model.to("cuda")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    x = torch.randn(6, 10).to("cuda")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model)
