"""A mask of -inf hides a whole row: its softmax is NaN."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
HIDDEN = torch.finfo(torch.float32).min if "fixed" in sys.argv else float("-inf")


def pooled(x: torch.Tensor, mask: torch.Tensor, scorer: nn.Module) -> torch.Tensor:
    scores = scorer(x).squeeze(-1)
    scores = scores.masked_fill(~mask, HIDDEN)  # cause
    return (scores.softmax(-1).unsqueeze(-1) * x).sum(1)


scorer = nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(scorer.parameters(), lr=0.1)
x = torch.randn(3, 5, 4, device="cuda")
mask = torch.arange(5, device="cuda")[None] < torch.tensor([5, 2, 0], device="cuda")[:, None]
loss = pooled(x, mask, scorer).pow(2).mean()
loss.backward()  # where
optimizer.step()
print("done")
