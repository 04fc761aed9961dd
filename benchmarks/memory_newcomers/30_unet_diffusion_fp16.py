"""A U-Net for diffusion of one's own: residual blocks with time, attention in the middle, fp16 with a GradScaler, an EMA."""
import copy
import json
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

BASE, MULTS, BATCH, SIDE, STEPS = 128, (1, 2, 3, 4), 16, 128, 4


class Res(nn.Module):
    def __init__(self, a, b, t):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, a), nn.Conv2d(a, b, 3, padding=1)
        self.time = nn.Linear(t, 2 * b)
        self.n2, self.c2 = nn.GroupNorm(32, b), nn.Conv2d(b, b, 3, padding=1)
        self.skip = nn.Conv2d(a, b, 1) if a != b else nn.Identity()

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x)))
        scale, shift = self.time(F.silu(t))[:, :, None, None].chunk(2, 1)
        h = self.n2(h) * (1 + scale) + shift
        return self.skip(x) + self.c2(F.dropout(F.silu(h), 0.1, self.training))


class Attn(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(32, c), nn.Conv2d(c, 3 * c, 1), nn.Conv2d(c, c, 1)
        self.heads = c // 64

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w).transpose(3, 4).unbind(1)
        a = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(a.transpose(2, 3).reshape(b, c, h, w))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        t = 4 * BASE
        self.time = nn.Sequential(nn.Linear(BASE, t), nn.SiLU(), nn.Linear(t, t))
        self.first = nn.Conv2d(3, BASE, 3, padding=1)
        self.downs, self.ups, kept, c = nn.ModuleList(), nn.ModuleList(), [BASE], BASE
        for level, m in enumerate(MULTS):
            for _ in range(2):
                self.downs.append(nn.ModuleList([Res(c, BASE * m, t), Attn(BASE * m) if level >= 2 else nn.Identity()]))
                c = BASE * m
                kept.append(c)
            if level < len(MULTS) - 1:
                self.downs.append(nn.Conv2d(c, c, 3, stride=2, padding=1))
                kept.append(c)
        self.mid = nn.ModuleList([Res(c, c, t), Attn(c), Res(c, c, t)])
        for level, m in reversed(list(enumerate(MULTS))):
            for i in range(3):
                self.ups.append(nn.ModuleList([Res(c + kept.pop(), BASE * m, t), Attn(BASE * m) if level >= 2 else nn.Identity()]))
                c = BASE * m
            if level > 0:
                self.ups.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(c, c, 3, padding=1)))
        self.last = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), nn.Conv2d(c, 3, 3, padding=1))

    def forward(self, x, steps):
        f = torch.exp(-math.log(10000) * torch.arange(BASE // 2, device=x.device) / (BASE // 2))
        a = steps[:, None].float() * f
        t = self.time(torch.cat([a.sin(), a.cos()], 1))
        h = self.first(x)
        kept = [h]
        for part in self.downs:
            h = part(h) if isinstance(part, nn.Conv2d) else part[1](part[0](h, t))
            kept.append(h)
        h = self.mid[2](self.mid[1](self.mid[0](h, t)), t)
        for part in self.ups:
            h = part(h) if isinstance(part, nn.Sequential) else part[1](part[0](torch.cat([h, kept.pop()], 1), t))
        return self.last(h)


model = UNet().to("cuda")
ema = copy.deepcopy(model).requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda")
bars = torch.linspace(0.9999, 0.98, 1000, device="cuda").cumprod(0)
for step in range(STEPS):
    x = torch.rand(BATCH, 3, SIDE, SIDE, device="cuda") * 2 - 1
    t = torch.randint(0, 1000, (BATCH,), device="cuda")
    noise = torch.randn_like(x)
    bar = bars[t][:, None, None, None]
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.mse_loss(model(bar.sqrt() * x + (1 - bar).sqrt() * noise, t).float(), noise)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters()):
            e.lerp_(p, 0.001)
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
