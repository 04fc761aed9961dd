"""Collectives that differ between ranks and may: subgroups, both arms of a branch, objects, uneven all_to_all, a ring."""
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
pairs = [dist.new_group([i, i + 1]) for i in range(0, world, 2)]
leaders = dist.new_group(list(range(0, world, 2)))
net = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(3):
    with net.no_sync() if step % 2 == 0 else torch.enable_grad():
        net(torch.randn(8, 64, device="cuda")).pow(2).mean().backward()
    if step % 2:
        opt.step()
        opt.zero_grad()
    own = torch.full((3,), float(rank), device="cuda")
    dist.all_reduce(own, group=pairs[rank // 2])
    if rank % 2 == 0:
        dist.all_reduce(own, group=leaders)
    if rank == 0:
        torch.save(net.state_dict(), "/tmp/foreign-22.pt")
        dist.barrier()
    else:
        dist.barrier()
names = [None] * world
dist.all_gather_object(names, {"rank": rank, "note": "x" * (10 * rank)})
given = torch.arange(world * 4, device="cuda").float()
sizes = [1 + (rank + other) % 3 for other in range(world)]
give = torch.randn(sum(sizes), 8, device="cuda")
take = torch.empty(sum(1 + (other + rank) % 3 for other in range(world)), 8, device="cuda")
dist.all_to_all_single(take, give, [1 + (other + rank) % 3 for other in range(world)], sizes)
ring = torch.full((4,), float(rank), device="cuda")
got = torch.empty_like(ring)
for work in dist.batch_isend_irecv([
    dist.P2POp(dist.isend, ring, (rank + 1) % world),
    dist.P2POp(dist.irecv, got, (rank - 1) % world),
]):
    work.wait()
told = [{"lr": 0.1}] if rank == 0 else [None]
dist.broadcast_object_list(told, src=0)
part = torch.empty(4, device="cuda")
dist.scatter(part, list(given.chunk(world)) if rank == 0 else None, src=0)
whole = funcol.all_gather_tensor(ring, 0, dist.group.WORLD)
summed = funcol.all_reduce(whole, "sum", dist.group.WORLD)
print(rank, got[0].item(), told, summed.shape)
dist.destroy_process_group()
