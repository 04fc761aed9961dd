"""A prompt that is to be trained is moved after it became a parameter."""

import torch
from torch import nn


class Prompt:
    def __init__(self, length, device):
        self.rows = nn.Parameter(torch.randn(length, 4)).to(device)  # cause

    def before(self, x):
        return torch.cat([self.rows.expand(len(x), -1, -1), x], dim=1)


def tuned(prompt):
    return torch.optim.Adam([prompt.rows], lr=0.01)  # where


model, prompt = nn.Linear(4, 1).cuda().requires_grad_(False), Prompt(2, "cuda")
optimizer = tuned(prompt)
for _ in range(2):
    model(prompt.before(torch.randn(2, 3, 4, device="cuda"))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
