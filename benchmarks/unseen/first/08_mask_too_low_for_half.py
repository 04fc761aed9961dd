import torch
from torch import nn


class Pool(nn.Module):
    """Attention pooling over the frames of a clip."""

    def __init__(self, width):
        super().__init__()
        self.query = nn.Linear(width, 1)
        self.out = nn.Linear(width, 2)

    def forward(self, frames, padding):
        scores = self.query(frames).squeeze(-1)
        scores = scores.masked_fill(padding, -1e15)
        weights = scores.softmax(-1)
        return self.out((weights[..., None] * frames).sum(1))


def train(steps=3):
    device = torch.device("cuda")
    model = Pool(8).to(device).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        frames = torch.randn(4, 10, 8, device=device, dtype=torch.half)
        padding = torch.arange(10, device=device)[None] >= torch.tensor([[10], [8], [5], [3]], device=device)
        loss = model(frames, padding).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train()
