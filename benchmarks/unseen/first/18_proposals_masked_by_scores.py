import torch
from torch import nn


def group_points(points):
    """Clusters on the CPU, as the library for it does."""
    ids = (points.cpu()[:, 0] > 0).long()
    proposals_idx = torch.stack([ids, torch.arange(len(ids))], 1)
    return proposals_idx


class Grouping(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Linear(3, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, points):
        features = self.point(points).relu()
        proposals_idx = group_points(points)
        scores = self.score(features).squeeze(-1)
        mask = scores > scores.mean()
        kept = proposals_idx[mask].long()
        return scores, kept


model = Grouping().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(3):
    scores, kept = model(torch.randn(16, 3, device="cuda"))
    target = torch.zeros(16, device="cuda")
    target[kept[:, 1].to("cuda")] = 1
    loss = nn.functional.binary_cross_entropy_with_logits(scores, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
