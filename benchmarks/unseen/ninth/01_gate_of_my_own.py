"""1.7B decoder, one A100 40G. I wrote the gate as one Function "so that nothing is computed twice".

python 01_gate_of_my_own.py [--rows 4] [--lean]
"""
import argparse

import torch
import torch.nn.functional as F
from torch import nn

p = argparse.ArgumentParser()
p.add_argument("--rows", type=int, default=4)
p.add_argument("--length", type=int, default=2048)
p.add_argument("--lean", action="store_true")
a = p.parse_args()


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        gate, up = h.chunk(2, dim=-1)
        g = gate.float()
        s = torch.sigmoid(g)
        act = (g * s).to(h.dtype)
        ctx.save_for_backward(up, g, s, act)
        return act * up

    @staticmethod
    def backward(ctx, grad):
        up, g, s, act = ctx.saved_tensors
        d_up = grad * act
        d_gate = (grad * up) * (s * (1 + g * (1 - s))).to(grad.dtype)
        return torch.cat([d_gate, d_up], dim=-1)


class LeanGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad):
        (h,) = ctx.saved_tensors
        gate, up = h.chunk(2, dim=-1)
        s = torch.sigmoid(gate)
        d_up = grad * gate * s
        d_gate = grad * up * (s * (1 + gate * (1 - s)))
        return torch.cat([d_gate, d_up], dim=-1)


gated = LeanGate.apply if a.lean else Gate.apply


class Block(nn.Module):
    def __init__(self, d=2048, heads=16, wide=8192):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d, bias=False)
        self.w_in = nn.Linear(d, 2 * wide, bias=False)
        self.w_out = nn.Linear(wide, d, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.w_out(gated(self.w_in(self.n2(x))))


class LM(nn.Module):
    def __init__(self, vocab=32000, d=2048, layers=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.norm = nn.RMSNorm(d)

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.emb.weight)


torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    net = LM()
opt = torch.optim.AdamW(net.parameters(), lr=2e-4, fused=True)
for step in range(3):
    ids = torch.randint(0, 32000, (a.rows, a.length + 1), device="cuda")
    logits = net(ids[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    print(step, loss.item())
    del logits, loss
