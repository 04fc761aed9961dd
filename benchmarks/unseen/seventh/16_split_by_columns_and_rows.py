"""Tensor parallel training of an 8.8B decoder over a node of small cards, with the loss computed on split logits."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

WORLD = int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (WORLD,), mesh_dim_names=("tp",))
E, N, HD, FF, VOCAB = 4096, 32, 128, 14336, 128256


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(E, E, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, HD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(E, FF, bias=False), nn.Linear(E, FF, bias=False), nn.Linear(FF, E, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.before, self.between = nn.RMSNorm(E), nn.RMSNorm(E)

    def forward(self, x):
        x = x + self.attention(self.before(x))
        return x + self.feed_forward(self.between(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, E)
        self.layers = nn.Sequential(*(Layer() for _ in range(N)))
        self.last, self.head = nn.RMSNorm(E), nn.Linear(E, VOCAB, bias=False)

    def forward(self, ids):
        return self.head(self.last(self.layers(self.embed(ids))))


torch.manual_seed(0)
torch.set_default_dtype(torch.bfloat16)
model = Decoder()
col, row = ColwiseParallel, RowwiseParallel
for layer in model.layers:
    parallelize_module(layer, mesh, {
        "attention.wq": col(), "attention.wk": col(), "attention.wv": col(), "attention.wo": row(),
        "feed_forward.w1": col(), "feed_forward.w3": col(), "feed_forward.w2": row()})
parallelize_module(model, mesh, {
    "embed": row(input_layouts=Replicate()),
    "head": col(output_layouts=Shard(-1), use_local_output=False)})
model.to("cuda")
opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
for step in range(3):
    torch.manual_seed(step)  # every rank of a tensor-parallel group reads the same rows
    ids = torch.randint(0, VOCAB, (1, 2049)).cuda()
    with loss_parallel():
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    opt.step()
    opt.zero_grad()
torch.distributed.destroy_process_group()
