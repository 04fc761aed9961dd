"""Decoder with rotary positions, trained in mixed bfloat16 on long notes."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Rotary(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        inv_freq = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, positions):
        freqs = positions.float()[:, None] @ self.inv_freq[None, :]
        angles = torch.cat([freqs, freqs], dim=-1)
        return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    turned = x * cos + torch.cat([-b, a], dim=-1) * sin
    return turned.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class NoteLM(nn.Module):
    def __init__(self, vocab=128, dim=64, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rotary = Rotary(dim // heads)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.layers = nn.ModuleList(Attention(dim, heads) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(),
                          nn.Linear(2 * dim, dim)) for _ in range(depth))
        self.final = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        cos, sin = self.rotary(torch.arange(ids.size(1), device=ids.device))
        for norm, layer, mlp in zip(self.norms, self.layers, self.mlps):
            x = x + layer(norm(x), cos, sin)
            x = x + mlp(x)
        return self.head(self.final(x))


def main(length=768, steps=4):
    torch.manual_seed(31)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = NoteLM().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(steps):
        ids = torch.randint(0, 128, (2, length + 1)).to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
