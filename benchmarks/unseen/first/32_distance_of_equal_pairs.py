import torch
from torch import nn


class ContrastiveLoss(nn.Module):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin

    def forward(self, one, two, same):
        distances = (two - one).pow(2).sum(1)
        losses = same * distances + (1 - same) * (self.margin - distances.sqrt()).relu().pow(2)
        return losses.mean()


torch.manual_seed(1)
embed = nn.Sequential(nn.Linear(5, 16), nn.PReLU(), nn.Linear(16, 2)).cuda()
criterion = ContrastiveLoss(1.0)
optimizer = torch.optim.Adam(embed.parameters(), lr=1e-3)
rows = torch.randn(10, 5)
for step in range(3):
    first = rows.cuda()
    second = rows.roll(step, 0).cuda()
    same = torch.ones(10, device="cuda") if step == 0 else torch.zeros(10, device="cuda")
    loss = criterion(embed(first), embed(second), same)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
