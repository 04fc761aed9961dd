import torch
from torch import nn

device = torch.device("cuda")


class ChannelNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size)).to(device)
        self.bias = nn.Parameter(torch.zeros(size)).to(device)

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(var + 1e-5) * self.weight + self.bias


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.norm = ChannelNorm(12)
        self.outer = nn.Linear(12, 3)

    def forward(self, x):
        return self.outer(self.norm(self.inner(x)).relu())


model = Enhancer().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    picture = torch.rand(8, 12, device=device)
    loss = (model(picture) - picture[:, :3]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
