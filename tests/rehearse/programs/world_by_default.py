"""An environment makes its tensors on the device of its constructor's default."""

import torch
from torch import nn


class World:
    def __init__(self, n, device="cpu"):
        self.n, self.device = n, device

    def look(self):
        return torch.randn(self.n, 4, device=self.device)


def main():
    device = torch.device("cuda")
    world = World(8)  # cause
    actor = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    actor(world.look()).sum().backward()  # where
    optimizer.step()
    print("done")


main()
