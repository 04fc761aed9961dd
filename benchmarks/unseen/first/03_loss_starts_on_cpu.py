import torch
import torch.nn.functional as F
from torch import nn


def multi_scale_loss(predictions, truths, masks):
    total = torch.zeros(1)
    for prediction, truth, mask in zip(predictions, truths, masks):
        total = total + F.smooth_l1_loss(prediction[mask], truth[mask], reduction="mean")
    return total


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(1, 1, 3, padding=1) for _ in range(3))

    def forward(self, depth):
        outputs = []
        for stage in self.stages:
            depth = stage(depth)
            outputs.append(depth)
        return outputs


net = Pyramid().cuda()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(3):
    depth = torch.rand(2, 1, 8, 8).cuda()
    mask = depth > 0.1
    outputs = net(depth)
    loss = multi_scale_loss(outputs, [depth] * 3, [mask] * 3)
    optimizer.zero_grad()
    loss.sum().backward()
    optimizer.step()
