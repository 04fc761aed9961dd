"""A mixture of experts that splits its tokens by counts which the router gives."""
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, d=2048, n=8, k=2):
        super().__init__()
        self.router = nn.Linear(d, n)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d)) for _ in range(n))
        self.n, self.k = n, k

    def forward(self, x):
        flat = x.view(-1, x.size(-1))
        weight, chosen = self.router(flat).softmax(-1).topk(self.k, -1)
        order = chosen.view(-1).argsort()
        counts = torch.bincount(chosen.view(-1), minlength=self.n).tolist()
        out = torch.zeros_like(flat)
        for expert, rows in zip(self.experts, order.split(counts)):
            if rows.numel() == 0:
                continue
            token = rows // self.k
            out.index_add_(0, token, expert(flat[token]) * weight.view(-1)[rows, None])
        return out.view_as(x)


net = nn.Sequential(Experts(), nn.LayerNorm(2048), Experts()).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
for _ in range(2):
    x = torch.randn(4, 512, 2048, device="cuda")
    loss = net(x).pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
print("done", loss.item())
