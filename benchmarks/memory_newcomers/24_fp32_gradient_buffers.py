"""bf16 weights, gradients summed over micro-batches into fp32 buffers, re-entrant checkpoints by hand, fp32 master AdamW."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, HEADS, LAYERS = 50304, 1536, 12, 18
BATCH, LENGTH, MICRO, STEPS = 8, 1024, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, HEADS, d // HEADS).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(b, t, d)))
        h = self.n2(x)
        return x + self.drop(self.down(F.silu(self.gate(h)) * self.up(h)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


torch.manual_seed(0)
model = Model().to("cuda", torch.bfloat16)
params = list(model.parameters())
master = [p.detach().float() for p in params]
for m in master:
    m.grad = torch.zeros_like(m)


def gather(p, m):
    def hook(_):
        m.grad.add_(p.grad)
        p.grad = None
    return hook


for p, m in zip(params, master):
    p.register_post_accumulate_grad_hook(gather(p, m))
opt = torch.optim.AdamW(master, lr=1e-4, betas=(0.9, 0.95), fused=True)
for step in range(STEPS):
    for _ in range(MICRO):
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), device="cuda")
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten()) / MICRO
        loss.backward()
    torch.nn.utils.get_total_norm([m.grad for m in master])
    opt.step()
    opt.zero_grad(set_to_none=False)
    with torch.no_grad():
        torch._foreach_copy_(params, master)
    print(step, loss.item() * MICRO)
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
