"""Two by two: rows are shared along one dimension, the sequence along the other, whose keys go round in a ring."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("rows", "ring"))
ring = mesh["ring"].get_group()
members = dist.get_process_group_ranks(ring)
here = members.index(dist.get_rank())
onward, back = members[(here + 1) % 2], members[(here - 1) % 2]
torch.manual_seed(0)
qkv, out = nn.Linear(64, 192).cuda(), nn.Linear(64, 64).cuda()
params = [*qkv.parameters(), *out.parameters()]
opt = torch.optim.AdamW(params, lr=1e-3)


def passed_on(block):
    """What the neighbour has, in exchange for what is here."""
    taken = torch.empty_like(block)
    calls = [dist.P2POp(dist.isend, block.contiguous(), onward, ring), dist.P2POp(dist.irecv, taken, back, ring)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return taken


for step in range(3):
    torch.manual_seed(10 * step + mesh["rows"].get_local_rank())
    x = torch.randn(4, 32, 64, device="cuda").chunk(2, 1)[here]
    q, k, v = qkv(x).chunk(3, -1)
    keys, values = [k], [v]
    with torch.no_grad():
        keys.append(passed_on(k))
        values.append(passed_on(v))
    y = nn.functional.scaled_dot_product_attention(q, torch.cat(keys, 1), torch.cat(values, 1))
    out(y).pow(2).mean().backward()
    for p in params:
        for name in ("rows", "ring"):
            dist.all_reduce(p.grad, group=mesh[name].get_group())
        p.grad /= 4
    opt.step()
    opt.zero_grad()
whole = distribute_tensor(torch.arange(16.0, device="cuda").view(4, 4), mesh, [Shard(0), Shard(1)])
assert whole.redistribute(mesh, [Replicate(), Replicate()]).to_local().shape == (4, 4)
dist.destroy_process_group()
