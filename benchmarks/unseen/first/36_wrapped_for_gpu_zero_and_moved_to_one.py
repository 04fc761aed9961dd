import torch
from torch import nn


class Bit(nn.Module):
    def __init__(self):
        super().__init__()
        self.root = nn.Conv2d(3, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.root(x).relu().mean((2, 3)))


def main():
    device = torch.device("cuda:1")
    model = torch.nn.DataParallel(Bit())
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    for step in range(2):
        x, y = torch.rand(4, 3, 8, 8).to(device), torch.randint(0, 10, (4,)).to(device)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
