"""Text to picture: two streams that attend to each other, rectified flow, pictures of several shapes, every other block checkpointed."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DIM, DEPTH, HEADS, LATENT, PATCH, TEXT, TEXT_DIM = 1536, 18, 24, 16, 2, 154, 2048
BUCKETS = ((64, 64), (80, 48), (48, 96), (64, 80), (96, 40))
BATCH = 10


def modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))
        self.n1, self.n2 = (nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.q_norm, self.k_norm = nn.RMSNorm(DIM // HEADS), nn.RMSNorm(DIM // HEADS)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(approximate="tanh"), nn.Linear(4 * DIM, DIM))

    def before(self, x, c):
        s1, k1, g1, s2, k2, g2 = self.ada(c).chunk(6, -1)
        q, k, v = self.qkv(modulate(self.n1(x), s1, k1)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return (self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v), (g1, s2, k2, g2)

    def after(self, x, y, parts):
        g1, s2, k2, g2 = parts
        x = x + g1[:, None] * self.out(y.transpose(1, 2).flatten(2))
        return x + g2[:, None] * self.mlp(modulate(self.n2(x), s2, k2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.picture = Stream(), Stream()

    def forward(self, t, x, c):
        (tq, tk, tv), tp = self.text.before(t, c)
        (xq, xk, xv), xp = self.picture.before(x, c)
        y = F.scaled_dot_product_attention(torch.cat([tq, xq], 2), torch.cat([tk, xk], 2), torch.cat([tv, xv], 2))
        n = t.shape[1]
        return self.text.after(t, y[:, :, :n], tp), self.picture.after(x, y[:, :, n:], xp)


class MMDiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(LATENT, DIM, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn(1, DIM, 64, 64) * 0.02)
        self.words, self.pooled = nn.Linear(TEXT_DIM, DIM), nn.Linear(TEXT_DIM, DIM)
        self.time = nn.Sequential(nn.Linear(256, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.last = nn.LayerNorm(DIM, elementwise_affine=False), nn.Linear(DIM, PATCH * PATCH * LATENT)

    def forward(self, x, when, words):
        height, width = x.shape[2] // PATCH, x.shape[3] // PATCH
        top, left = (64 - height) // 2, (64 - width) // 2
        x = self.patch(x) + self.places[:, :, top : top + height, left : left + width]
        x, t = x.flatten(2).transpose(1, 2), self.words(words)
        angles = when[:, None] * 1000 * torch.exp(-9.21 * torch.arange(128, device=when.device) / 128)
        c = self.time(torch.cat([angles.cos(), angles.sin()], -1)) + self.pooled(words.mean(1))
        for n, block in enumerate(self.blocks):
            t, x = checkpoint(block, t, x, c, use_reentrant=False) if n % 2 else block(t, x, c)
        x = self.last(self.norm(x)).unflatten(1, (height, width)).unflatten(-1, (PATCH, PATCH, LATENT))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


torch.manual_seed(77)
torch.backends.cuda.matmul.allow_tf32 = True
model = MMDiT().to("cuda")
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} M")
average = torch.optim.swa_utils.AveragedModel(model, device="cpu", multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
for step, (height, width) in enumerate(BUCKETS):
    clean = torch.randn(BATCH, LATENT, height, width, device="cuda")
    words = torch.randn(BATCH, TEXT, TEXT_DIM, device="cuda", dtype=torch.bfloat16)
    words = torch.where(torch.rand(BATCH, 1, 1, device="cuda") < 0.1, torch.zeros_like(words), words)
    when = torch.sigmoid(torch.randn(BATCH, device="cuda"))
    noise, share = torch.randn_like(clean), when.view(-1, 1, 1, 1)
    with torch.autocast("cuda", torch.bfloat16):
        told = model((1 - share) * clean + share * noise, when, words)
    loss = F.mse_loss(told.float(), noise - clean)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 2:
        average.update_parameters(model)
    print(step, (height, width), loss.item(), norm.item())

with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
    picture = torch.randn(4, LATENT, 64, 64, device="cuda")
    hint = torch.randn(4, TEXT, TEXT_DIM, device="cuda")
    for now in torch.linspace(1, 0.25, 4):
        both = model(picture.repeat(2, 1, 1, 1), now.repeat(8).cuda(), torch.cat([hint, torch.zeros_like(hint)]))
        with_text, without = both.chunk(2)
        picture = picture - 0.25 * (without + 5.0 * (with_text - without))
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
