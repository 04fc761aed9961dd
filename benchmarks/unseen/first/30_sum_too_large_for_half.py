import torch
from torch import nn


def pairwise_cost(inputs, labels):
    points = inputs.shape[1]
    positive = nn.functional.softplus(-inputs)
    negative = nn.functional.softplus(inputs)
    cost = torch.einsum("nc,mc->nm", positive, labels) + torch.einsum("nc,mc->nm", negative, 1 - labels)
    return cost / points


class Masks(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.full((4, 12544), -9.0))

    def forward(self):
        return self.queries * 1.0


device = "cuda"
model = Masks().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
labels = torch.ones(2, 12544, device=device)
for _ in range(3):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = pairwise_cost(model(), labels).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
