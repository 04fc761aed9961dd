"""Compiled FlexAttention with a causal mask over documents, in a small decoder."""
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

DIM, DEPTH, HEADS, LENGTH, BATCH, VOCAB = 1024, 6, 16, 2048, 4, 16000

flex = torch.compile(flex_attention)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(flex(q, k, v, block_mask=mask).transpose(1, 2).reshape(b, t, DIM))
        return x + self.mlp(self.n2(x).square())


model = nn.ModuleDict({"embed": nn.Embedding(VOCAB, DIM), "blocks": nn.ModuleList(Block() for _ in range(DEPTH)),
                       "head": nn.Linear(DIM, VOCAB, bias=False)}).to("cuda", torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH + 1), device="cuda")
    document = (torch.arange(LENGTH, device="cuda") // 512).expand(BATCH, -1)

    def causal(b, h, q, kv):
        return (q >= kv) & (document[b, q] == document[b, kv])

    mask = create_block_mask(causal, BATCH, None, LENGTH, LENGTH, device="cuda")
    x = model["embed"](ids[:, :-1])
    for block in model["blocks"]:
        x = block(x, mask)
    loss = F.cross_entropy(model["head"](x).flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
