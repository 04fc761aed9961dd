"""fp16 working weights with fp32 master copies by hand; softmax and loss in fp32 inside an autocast; static loss scale."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F

DIM, DEPTH, HEADS, LENGTH, BATCH, VOCAB = 1024, 8, 16, 512, 16, 30000


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5
        with torch.autocast("cuda", enabled=False):
            scores = scores.float().masked_fill(torch.ones(LENGTH, LENGTH, device=x.device).triu(1).bool(), float("-inf"))
            weights = F.dropout(scores.softmax(-1), 0.1, self.training)
        x = x + self.o((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCAB, DIM), nn.Sequential(*[Layer() for _ in range(DEPTH)])
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


model = LM().cuda().half()
master = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(master, lr=1e-4)
SCALE = 1024.0
for step in range(3):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].float().reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    (loss * SCALE).backward()
    for m, p in zip(master, model.parameters()):
        m.grad = p.grad.float() / SCALE
        p.grad = None
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(master, model.parameters()):
            p.copy_(m)
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
