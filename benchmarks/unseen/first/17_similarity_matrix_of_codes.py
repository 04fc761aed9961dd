import torch
from torch import nn


class HashLoss(nn.Module):
    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma

    def forward(self, F, B, S):
        hash_loss = ((F @ B.t() - F.shape[1] * S) ** 2).mean()
        return hash_loss + self.gamma * (F.abs() - 1).pow(2).mean()


def train(device, code_length=8, items=20):
    features = torch.randn(items, 12)
    labels = nn.functional.one_hot(torch.arange(items) % 4, 4).float()
    S = (labels @ labels.t() > 0).float() * 2 - 1
    B = torch.sign(torch.randn(items, code_length)).to(device)
    model = nn.Linear(12, code_length).to(device)
    criterion = HashLoss(0.1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for start in range(0, items, 5):
        index = torch.arange(start, start + 5, device=device)
        F = torch.tanh(model(features[start : start + 5].to(device)))
        loss = criterion(F, B, S[index, :].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


train(torch.device("cuda:0"))
