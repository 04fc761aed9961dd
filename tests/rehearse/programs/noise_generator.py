"""Noise is drawn on the GPU from a generator of the CPU, made two functions away."""

import torch
from torch import nn


def noise_like(x, generator):
    return torch.randn(x.shape, generator=generator, device=x.device)  # where


def main():
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(7)  # cause
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 4, device=device)
    (model(x + noise_like(x, generator)) - x).square().mean().backward()
    optimizer.step()
    print("done")


main()
