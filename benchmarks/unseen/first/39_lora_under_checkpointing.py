import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class LoraLinear(nn.Module):
    def __init__(self, width, rank=2):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, width) * 0.1)
        self.b = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(25, 8)
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList(LoraLinear(8) for _ in range(2))
        self.head = nn.Linear(8, 25)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


model = Decoder().cuda()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
for _ in range(3):
    ids = torch.randint(0, 25, (4, 6)).cuda()
    loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
