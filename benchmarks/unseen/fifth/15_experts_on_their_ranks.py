"""Each rank has one expert; tokens go to the expert of their id, by all_to_all with the splits that were told before."""
import os

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(rank)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gives, takes):
        ctx.gives, ctx.takes = gives, takes
        taken = x.new_empty(sum(takes), x.shape[1])
        dist.all_to_all_single(taken, x.contiguous(), takes, gives)
        return taken

    @staticmethod
    def backward(ctx, grad):
        given = grad.new_empty(sum(ctx.gives), grad.shape[1])
        dist.all_to_all_single(given, grad.contiguous(), ctx.gives, ctx.takes)
        return given, None, None


words = nn.parallel.DistributedDataParallel(nn.Embedding(256, 64).cuda())
expert = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).cuda()
opt = torch.optim.AdamW([*words.parameters(), *expert.parameters()], lr=1e-3)
for step in range(3):
    ids = torch.randint(0, 256, (40 + 8 * rank,), device="cuda")
    chosen = ids % world
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=world)
    told = torch.empty_like(counts)
    dist.all_to_all_single(told, counts)
    gives, takes = counts.tolist(), told.tolist()
    hidden = words(ids)
    sent = Exchange.apply(hidden[order], gives, takes)
    got = Exchange.apply(expert(sent), takes, gives)
    y = torch.empty_like(got)
    y[order] = got
    (hidden + y).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
