"""A physics-informed net for Burgers' equation: second derivatives by autograd, Adam then LBFGS."""
import json
import math

import torch
import torch.nn as nn

POINTS, WIDTH, DEPTH = 200_000, 256, 6

torch.manual_seed(0)
torch.set_default_device("cuda")
layers = [nn.Linear(2, WIDTH), nn.Tanh()]
for _ in range(DEPTH):
    layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
net = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

inner = torch.rand(POINTS, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
inner.requires_grad_(True)
start = torch.cat([torch.rand(1000, 1) * 2 - 1, torch.zeros(1000, 1)], 1)
values = -torch.sin(math.pi * start[:, :1])


def loss():
    u = net(inner)
    first = torch.autograd.grad(u, inner, torch.ones_like(u), create_graph=True)[0]
    ux, ut = first[:, :1], first[:, 1:]
    uxx = torch.autograd.grad(ux, inner, torch.ones_like(ux), create_graph=True)[0][:, :1]
    residual = ut + u * ux - 0.01 / math.pi * uxx
    return residual.pow(2).mean() + (net(start) - values).pow(2).mean()


adam = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(3):
    adam.zero_grad()
    value = loss()
    value.backward()
    adam.step()
    print("adam", step, value.item())

lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=5, history_size=10, tolerance_grad=0, tolerance_change=0)


def closure():
    lbfgs.zero_grad()
    value = loss()
    value.backward()
    return value


print("lbfgs", lbfgs.step(closure).item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
