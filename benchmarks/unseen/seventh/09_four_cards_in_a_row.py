"""A 13B llama cut by hand over four 24 GB cards in one process; GPipe: all micro-batches forward, then all backward."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, FF, HEADS, LAYERS, VOCAB = 5120, 13824, 40, 40, 32000
MICRO, ROWS, LENGTH = 4, 2, 1024
CARDS = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w13 = nn.Linear(WIDTH, 2 * FF, bias=False)
        self.w2 = nn.Linear(FF, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        a, b = self.w13(self.n2(x)).chunk(2, dim=-1)
        return x + self.w2(F.silu(a) * b)


class Stage(nn.Module):
    def __init__(self, layers, first, last):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH) if first else None
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)) if last else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x if self.head is None else self.head(x)


torch.set_default_dtype(torch.bfloat16)
stages = []
for i, card in enumerate(CARDS):
    with card:
        stages.append(Stage(LAYERS // len(CARDS), i == 0, i == len(CARDS) - 1))
params = [p for s in stages for p in s.parameters()]
optimizer = torch.optim.SGD(params, lr=1e-4, momentum=0.9)
print(sum(p.numel() for p in params) / 1e9, "B parameters")

for step in range(3):
    batch = torch.randint(0, VOCAB, (MICRO, ROWS, LENGTH + 1))
    waiting = []
    for micro in batch:
        h = micro[:, :-1].to(CARDS[0])
        for stage, card in zip(stages, CARDS):
            h = stage(h.to(card))
        target = micro[:, 1:].to(CARDS[-1])
        waiting.append(F.cross_entropy(h.flatten(0, 1), target.flatten()) / MICRO)
        del h
    total = 0.0
    while waiting:
        loss = waiting.pop()
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    print(step, total, [torch.cuda.max_memory_allocated(c) >> 20 for c in CARDS])
