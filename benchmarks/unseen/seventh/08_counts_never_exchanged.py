"""Mixture of experts over ranks; tokens go to an expert by a hash of their id. `--exchange` tells each rank what it will get."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--exchange", action="store_true")
opts = ap.parse_args()

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
dev = torch.device("cuda", torch.cuda.current_device())
D, FF, LOCAL, LAYERS, VOCAB = 4096, 14336, 4, 4, 32000


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, give, take):
        ctx.give, ctx.take = give, take
        out = x.new_empty(sum(take), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), output_split_sizes=take, input_split_sizes=give)
        return out

    @staticmethod
    def backward(ctx, g):
        back = g.new_empty(sum(ctx.give), g.shape[1])
        dist.all_to_all_single(back, g.contiguous(), output_split_sizes=ctx.give, input_split_sizes=ctx.take)
        return back, None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(D, FF, bias=False) for _ in range(LOCAL))
        self.down = nn.ModuleList(nn.Linear(FF, D, bias=False) for _ in range(LOCAL))

    def forward(self, x, home):
        order = home.argsort(stable=True)
        give = torch.bincount(home, minlength=world)
        take = give.clone()
        if opts.exchange:
            dist.all_to_all_single(take, give)
        give, take = give.tolist(), take.tolist()
        here = Dispatch.apply(x[order], give, take)
        parts = here.chunk(LOCAL)
        done = torch.cat([d(torch.relu(u(p))) for u, d, p in zip(self.up, self.down, parts)])
        back = Dispatch.apply(done, take, give)
        return x.index_add(0, order, back)


torch.set_default_dtype(torch.bfloat16)
torch.manual_seed(1)
embed = nn.Embedding(VOCAB, D).to(dev)
head = nn.Linear(D, VOCAB, bias=False).to(dev)
experts = nn.ModuleList(Experts() for _ in range(LAYERS)).to(dev)
shared = [*embed.parameters(), *head.parameters()]
opt = torch.optim.SGD([*shared, *experts.parameters()], lr=0.1)
torch.manual_seed(1000 + rank)
for step in range(2):
    ids = torch.randint(0, VOCAB, (2048,), device=dev)
    home = (ids * 2654435761 % 2**32) % world
    x = embed(ids)
    for layer in experts:
        x = layer(x, home)
    loss = nn.functional.cross_entropy(head(x[:-1]).float(), ids[1:])
    loss.backward()
    for p in shared:
        dist.all_reduce(p.grad)
        p.grad /= world
    opt.step()
    opt.zero_grad()
    print(rank, step, loss.item())
dist.destroy_process_group()
