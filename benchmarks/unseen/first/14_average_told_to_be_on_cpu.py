from copy import deepcopy

import torch
from torch import nn


class Strategy:
    def prepare(self, model):
        return model.to("cuda")

    @torch.no_grad()
    def moving_average(self, model, model_ema, beta=0.992, device="cpu"):
        for param, param_ema in zip(model.parameters(), model_ema.parameters()):
            if param.requires_grad:
                data = param.data.to(device)
                param_ema.data.copy_((1 - beta) * data + beta * param_ema.data)


strategy = Strategy()
actor = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
ema_model = deepcopy(actor)
actor, ema_model = strategy.prepare(actor), strategy.prepare(ema_model)
optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
for _ in range(3):
    state = torch.randn(5, 6, device="cuda")
    loss = -actor(state).log_softmax(-1)[:, 0].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    strategy.moving_average(actor, ema_model, 0.99, "cpu")
