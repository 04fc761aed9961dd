"""A diffusion transformer on latents: adaLN blocks, v-prediction, EMA by foreach, bf16 autocast."""
import copy
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, DEPTH, HEADS, SIDE, PATCH, BATCH = 1024, 12, 16, 32, 2, 64


def modulate(x, shift, scale):
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1 = nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6)
        self.n2 = nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(approximate="tanh"), nn.Linear(4 * DIM, DIM))
        self.ada = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))

    def forward(self, x, c):
        s1, g1, a1, s2, g2, a2 = self.ada(c).chunk(6, dim=1)
        b, t, _ = x.shape
        q, k, v = self.qkv(modulate(self.n1(x), s1, g1)).reshape(b, t, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, DIM)
        x = x + a1.unsqueeze(1) * self.proj(y)
        return x + a2.unsqueeze(1) * self.mlp(modulate(self.n2(x), s2, g2))


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(4, DIM, PATCH, stride=PATCH)
        self.position = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2, DIM) * 0.02)
        self.label = nn.Embedding(1001, DIM)
        self.time = nn.Sequential(nn.Linear(256, DIM), nn.SiLU(), nn.Linear(DIM, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.out = nn.Linear(DIM, PATCH * PATCH * 4)

    def forward(self, x, t, y):
        b = x.shape[0]
        freqs = torch.exp(-math.log(10000) * torch.arange(128, device=x.device) / 128)
        angle = t[:, None].float() * freqs[None]
        c = self.time(torch.cat([angle.cos(), angle.sin()], -1)) + self.label(y)
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x, c)
        n = SIDE // PATCH
        x = self.out(x).reshape(b, n, n, PATCH, PATCH, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(b, 4, SIDE, SIDE)


model = DiT().cuda()
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0, fused=True)
alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device="cuda"), 0)
for step in range(3):
    latents, noise = torch.randn(2, BATCH, 4, SIDE, SIDE, device="cuda")
    t = torch.randint(0, 1000, (BATCH,), device="cuda")
    y = torch.randint(0, 1000, (BATCH,), device="cuda")
    a = alphas[t].view(-1, 1, 1, 1)
    with torch.autocast("cuda", torch.bfloat16):
        pred = model(a.sqrt() * latents + (1 - a).sqrt() * noise, t, y)
    loss = F.mse_loss(pred.float(), a.sqrt() * noise - (1 - a).sqrt() * latents)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1e-4)
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
