"""What ranks may do each in their own way: dummy pictures, padded gathers, groups of some, uneven loaders, one that writes."""
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(128, 64)
        self.tower = nn.Sequential(nn.Linear(192, 64), nn.GELU(), nn.Linear(64, 64))
        self.body = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 128)

    def forward(self, ids, pixels=None):
        hidden = self.words(ids)
        if pixels is None:
            hidden = hidden + 0.0 * self.tower(torch.zeros(1, 192, device=ids.device)).sum()
        else:
            hidden = hidden + self.tower(pixels)[:, None]
        return self.head(self.body(hidden))


dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
settings = [{"lr": 1e-3, "seed": 7}] if rank == 0 else [None]
dist.broadcast_object_list(settings, src=0)
torch.manual_seed(settings[0]["seed"])
net = Reader().cuda()
fully_shard(net.tower)
fully_shard(net.body)
fully_shard(net)
opt = torch.optim.AdamW(net.parameters(), lr=settings[0]["lr"])
groups = [dist.new_group([first, first + 1]) for first in range(0, world, 2)]
pair = groups[rank // 2]
torch.manual_seed(rank)


def loss_of(ids, pixels=None):
    return nn.functional.cross_entropy(net(ids, pixels)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


for step in range(3):
    ids = torch.randint(0, 128, (4, 10 + rank), device="cuda")
    loss = loss_of(ids, torch.randn(4, 192, device="cuda") if (rank + step) % 2 else None)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    tokens = torch.tensor([float(ids.numel())], device="cuda")
    dist.all_reduce(tokens, group=pair)
    mean = float(funcol.all_reduce(loss.detach(), "avg", dist.group.WORLD))
    if rank == 0:
        print(step, mean)

batches = torch.tensor([2 + rank % 2], device="cuda")
dist.all_reduce(batches, op=dist.ReduceOp.MAX)
scores = []
net.eval()
with torch.no_grad():
    for number in range(int(batches)):
        ids = torch.randint(0, 128, (2, 8), device="cuda")
        score = loss_of(ids)
        if number < 2 + rank % 2:
            scores.append(score)
net.train()
mine = torch.stack(scores)
count = torch.tensor([len(scores)], device="cuda")
counts = [torch.zeros_like(count) for _ in range(world)]
dist.all_gather(counts, count)
longest = max(int(n) for n in counts)
padded = nn.functional.pad(mine, (0, longest - len(mine)))
parts = [torch.empty_like(padded) for _ in range(world)]
dist.all_gather(parts, padded)
everyone = torch.cat([part[: int(n)] for part, n in zip(parts, counts)])
report = [None] * world if rank == 0 else None
dist.gather_object({"rank": rank, "rows": len(scores)}, report, dst=0)
if rank in (0, 1):
    dist.barrier(group=groups[0])
state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    print(len(everyone), report)
    torch.save(state, "whole.pt")
dist.barrier()
dist.destroy_process_group()
