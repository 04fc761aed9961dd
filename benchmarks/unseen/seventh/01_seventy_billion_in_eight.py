"""Full fine-tuning of a 70B decoder in bfloat16: made on meta, sharded by FSDP2, then written in place on each GPU."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

DIM, LAYERS, HEADS, KV, FF, VOCAB, SEQ = 8192, 80, 64, 8, 28672, 128256, 4096
HEAD = DIM // HEADS


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.q, self.o = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = nn.Linear(DIM, KV * HEAD, bias=False), nn.Linear(DIM, KV * HEAD, bias=False)
        self.gate, self.up = nn.Linear(DIM, FF, bias=False), nn.Linear(DIM, FF, bias=False)
        self.down = nn.Linear(FF, DIM, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(b, t, -1, HEAD).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(b, t, DIM))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(checkpoint_wrapper(Block()) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("cos", torch.empty(SEQ, HEAD), persistent=False)
        self.register_buffer("sin", torch.empty(SEQ, HEAD), persistent=False)

    @torch.no_grad()
    def write(self):
        rates = 500000.0 ** (-torch.arange(0, HEAD, 2, device="cuda").float() / HEAD)
        angles = torch.outer(torch.arange(SEQ, device="cuda").float(), rates).repeat(1, 2)
        self.cos.copy_(angles.cos()), self.sin.copy_(angles.sin())
        for name, p in self.named_parameters():
            nn.init.ones_(p) if "norm" in name else nn.init.normal_(p, std=0.02)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return self.head(self.norm(x))


dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_default_dtype(torch.bfloat16)
with torch.device("meta"):
    model = Decoder()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
model.to_empty(device="cuda")
model.write()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
for step in range(3):
    ids = torch.randint(0, VOCAB, (1, SEQ + 1), device="cuda")
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(step, torch.cuda.max_memory_allocated() / 2**30)
dist.destroy_process_group()
