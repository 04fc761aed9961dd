import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, anchors, grid):
        super().__init__()
        self.ng = torch.tensor([grid, grid], dtype=torch.float32)
        self.anchors = nn.Parameter(torch.tensor(anchors), requires_grad=False)
        self.conv = nn.Conv2d(4, len(anchors) * 2, 1)

    def forward(self, x):
        return self.conv(x)


def build_targets(head, targets):
    cells = targets[:, 2:4]
    size = targets[:, 4:6] * head.ng
    ratio = size[:, None] / head.anchors[None]
    best = torch.max(ratio, 1 / ratio).amax(2).argmin(1)
    return cells, size, best


def compute_loss(prediction, targets, head):
    cells, size, best = build_targets(head, targets)
    wanted = size.mean(0).repeat(head.anchors.shape[0])
    return (prediction.mean((0, 2, 3)) - wanted).pow(2).mean() + 0 * cells.sum()


device = torch.device("cuda:0")
head = Head([[1.0, 2.0], [3.0, 1.5], [4.0, 4.0]], grid=13).to(device)
optimizer = torch.optim.SGD(head.parameters(), lr=1e-3, momentum=0.9)
for step in range(3):
    pictures, targets = torch.rand(2, 4, 13, 13), torch.rand(5, 6)
    loss = compute_loss(head(pictures.to(device)), targets.to(device), head)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
