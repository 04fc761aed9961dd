"""A small decoder as the speed-runners write it: whole model compiled, Muon for matrices, AdamW for the rest."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, HEADS, LAYERS, LENGTH, BATCH, VOCAB = 1280, 10, 16, 4096, 4, 50304


def rotary(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, first, cos, sin):
        x = self.mix[0] * x + self.mix[1] * first
        b, t, _ = x.shape
        h = F.rms_norm(x, (DIM,))
        q, k, v = (f(h).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotary(F.rms_norm(q, (q.size(-1),)), cos, sin), rotary(F.rms_norm(k, (k.size(-1),)), cos, sin)
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, DIM)
        )
        return x + self.down(F.relu(self.up(F.rms_norm(x, (DIM,)))).square())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        angle = torch.outer(torch.arange(LENGTH).float(), 1e4 ** -torch.linspace(0, 1, DIM // HEADS // 2))
        self.register_buffer("cos", angle.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angle.sin().bfloat16(), persistent=False)

    def forward(self, ids, targets):
        first = x = F.rms_norm(self.embed(ids), (DIM,))
        for block in self.blocks:
            x = block(x, first, self.cos, self.sin)
        logits = self.head(F.rms_norm(x, (DIM,)))
        logits = 15 * torch.tanh(logits.float() / 15)
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


net = Net().cuda().bfloat16()
matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
others = [*net.embed.parameters(), *net.head.parameters(), *(block.mix for block in net.blocks)]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4, fused=True)]
step_of = torch.compile(net)
for step in range(4):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), device="cuda")
    loss = step_of(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    net.zero_grad(set_to_none=True)
    print(step, loss.item())
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
