import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, key_mask):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.transpose(-2, -1) / (C // self.heads) ** 0.5, dim=-1)
        weights[key_mask[:, None, None, :].expand_as(weights)] = 0.0
        y = (weights @ v).transpose(1, 2).reshape(B, T, C)
        return self.out(y)


class Encoder(nn.Module):
    def __init__(self, codes=64, dim=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(codes, dim)
        self.layers = nn.ModuleList(Attention(dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.head = nn.Linear(dim, codes)

    def forward(self, ids, key_mask):
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), key_mask)
        return self.head(x)


def train(steps=5):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = Encoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids = torch.randint(0, 64, (4, 18), device=device)
        key_mask = torch.rand(4, 18, device=device) < 0.2
        logits = model(ids, key_mask)
        loss = F.cross_entropy(logits[~key_mask], ids[~key_mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.3f}")


train()
