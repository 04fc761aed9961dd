"""Gated linear attention in chunks: torch's Muon for matrices, AdamW as a compiled step for the rest, the loss compiled, an EMA."""
import copy
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, LAYERS, HEADS, VOCAB, CHUNK = 1280, 14, 10, 50304, 128
BATCH, LENGTH, ACCUMULATE, STEPS = 6, 2048, 2, 4


class Mixer(nn.Module):
    """Within a chunk by a decaying product of queries and keys, between chunks by a state."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(DIM), nn.Linear(DIM, HEADS)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.norm(x)
        q, k, v = (y.view(b, t // CHUNK, CHUNK, HEADS, -1).transpose(2, 3) for y in self.qkv(h).chunk(3, -1))
        fade = F.logsigmoid(self.gate(h).float() + 4).view(b, t // CHUNK, CHUNK, HEADS).transpose(2, 3).cumsum(-1)
        k = k * k.shape[-1] ** -0.5
        weights = (fade[..., :, None] - fade[..., None, :]).tril().exp().tril()
        inside = ((q @ k.transpose(-1, -2)) * weights.to(q.dtype)) @ v
        state, between = q.new_zeros(b, HEADS, k.shape[-1], v.shape[-1], dtype=torch.float32), []
        for c in range(t // CHUNK):
            f = fade[:, c]
            between.append((q[:, c] * f.exp()[..., None].to(q.dtype)) @ state.to(q.dtype))
            left = (f[..., -1:] - f).exp()[..., None].to(k.dtype)
            state = state * f[..., -1, None, None].exp() + ((k[:, c] * left).transpose(-1, -2) @ v[:, c]).float()
        y = inside + torch.stack(between, 1)
        return x + self.out(y.transpose(2, 3).reshape(b, t, DIM))


class Feed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(DIM), nn.Linear(DIM, 8 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@torch.compile
def loss_of(hidden, weight, targets):
    logits = 30 * torch.tanh((hidden @ weight.T).float() / 30)
    return F.cross_entropy(logits, targets) + 1e-4 * logits.logsumexp(-1).square().mean()


torch.manual_seed(14)
with torch.device("cuda"):
    words, norm = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM)
    body = nn.Sequential(*[layer for _ in range(LAYERS) for layer in (Mixer(), Feed())])
    head = nn.Parameter(0.02 * torch.randn(VOCAB, DIM))
average = copy.deepcopy(body).requires_grad_(False)
matrices = [p for p in body.parameters() if p.ndim == 2 and min(p.shape) > HEADS]
others = [p for p in body.parameters() if p.ndim < 2 or min(p.shape) <= HEADS] + [*words.parameters(), *norm.parameters(), head]
muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01)
adam = torch.optim.AdamW(others, lr=3e-4, betas=(0.9, 0.95))


@torch.compile(fullgraph=False)
def adam_step():
    adam.step()


for step in range(STEPS):
    for micro in range(ACCUMULATE):
        ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            hidden = norm(body(words(ids[:, :-1])))
            loss = loss_of(hidden.flatten(0, 1), head, ids[:, 1:].flatten()) / ACCUMULATE
        loss.backward()
    muon.step()
    adam_step()
    muon.zero_grad()
    adam.zero_grad()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(body.parameters()), 0.01)
    print(step, loss.item() * ACCUMULATE)
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
