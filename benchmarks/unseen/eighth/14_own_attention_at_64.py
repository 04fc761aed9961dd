"""Latent diffusion UNet with my own attention. OOMs on the 4090 with batch 8. Usage: [--batch N] [--sdpa]"""
import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--batch", type=int, default=8)
ap.add_argument("--sdpa", action="store_true")
ap.add_argument("--steps", type=int, default=3)
ARGS = ap.parse_args()


class Attention(nn.Module):
    def __init__(self, ch, heads=8):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(32, ch)
        self.qkv = nn.Conv2d(ch, 3 * ch, 1)
        self.out = nn.Conv2d(ch, ch, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        if ARGS.sdpa:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            y = scores.softmax(dim=-1) @ v
        return x + self.out(y.transpose(-1, -2).reshape(b, c, h, w))


class Res(nn.Module):
    def __init__(self, cin, cout, temb=512):
        super().__init__()
        self.a = nn.Sequential(nn.GroupNorm(32, cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1))
        self.t = nn.Linear(temb, cout)
        self.b = nn.Sequential(nn.GroupNorm(32, cout), nn.SiLU(), nn.Conv2d(cout, cout, 3, padding=1))
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        return self.skip(x) + self.b(self.a(x) + self.t(t)[:, :, None, None])


class UNet(nn.Module):
    def __init__(self, ch=256):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 512))
        self.inp = nn.Conv2d(4, ch, 3, padding=1)
        self.d1, self.a1 = Res(ch, ch), Attention(ch)
        self.d2, self.a2 = Res(ch, ch), Attention(ch)
        self.down = nn.Conv2d(ch, ch, 3, stride=2, padding=1)
        self.m1, self.am, self.m2 = Res(ch, 2 * ch), Attention(2 * ch), Res(2 * ch, ch)
        self.u1, self.a3 = Res(2 * ch, ch), Attention(ch)
        self.u2, self.a4 = Res(2 * ch, ch), Attention(ch)
        self.outp = nn.Sequential(nn.GroupNorm(32, ch), nn.SiLU(), nn.Conv2d(ch, 4, 3, padding=1))

    def forward(self, x, t):
        freqs = torch.exp(torch.arange(64, device=x.device) * (-math.log(10000) / 64))
        t = self.time(torch.cat([torch.sin(t[:, None] * freqs), torch.cos(t[:, None] * freqs)], 1))
        h0 = self.inp(x)
        h1 = self.a1(self.d1(h0, t))
        h2 = self.a2(self.d2(h1, t))
        m = self.m2(self.am(self.m1(self.down(h2), t)), t)
        u = F.interpolate(m, scale_factor=2.0, mode="nearest")
        u = self.a3(self.u1(torch.cat([u, h2], 1), t))
        u = self.a4(self.u2(torch.cat([u, h1], 1), t))
        return self.outp(u)


def main():
    net = UNet().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device="cuda"), 0)
    for _ in range(ARGS.steps):
        latents = torch.randn(ARGS.batch, 4, 64, 64, device="cuda")
        t = torch.randint(0, 1000, (ARGS.batch,), device="cuda")
        noise = torch.randn_like(latents)
        a = abar[t].view(-1, 1, 1, 1)
        with torch.autocast("cuda", torch.bfloat16):
            predicted = net(a.sqrt() * latents + (1 - a).sqrt() * noise, t.float())
            loss = F.mse_loss(predicted.float(), noise)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()


main()
