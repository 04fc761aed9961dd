import torch
from torch import nn


def survival_loss(probabilities, mask):
    survival = torch.log1p(-probabilities.clamp(max=1.0 - 1e-6))
    return -(survival * mask).sum() / mask.sum()


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(8, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, x):
        return self.score(self.encode(x).tanh()).squeeze(-1) * 60


torch.manual_seed(0)
model = Scorer().cuda().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(16, 8, device="cuda", dtype=torch.bfloat16)
    mask = (torch.arange(16, device="cuda") % 2).to(torch.bfloat16)
    loss = survival_loss(model(x).sigmoid(), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
