"""Co-teaching: ranks 0 and 1 train one network, ranks 2 and 3 the other, then all compare their losses.

torchrun --nproc-per-node 4 05_two_teams_of_two.py          # hangs or "connection reset", depending on the day
torchrun --nproc-per-node 4 05_two_teams_of_two.py --right
"""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

LOCAL = int(os.environ["LOCAL_RANK"])


def my_team(rank):
    if "--right" in sys.argv:
        first = dist.new_group([0, 1])
        second = dist.new_group([2, 3])
        return first if rank < 2 else second
    if rank < 2:
        return dist.new_group([0, 1])
    return dist.new_group([2, 3])


def network(team):
    torch.manual_seed(team)
    width = 64 if team == 0 else 96
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 10))


def main():
    torch.cuda.set_device(LOCAL)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    group = my_team(rank)
    net = DistributedDataParallel(network(rank // 2).cuda(), device_ids=[LOCAL], process_group=group)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    for step in range(4):
        x = torch.randn(32, 32, device="cuda")
        y = torch.randint(0, 10, (32,), device="cuda")
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        told = [torch.zeros_like(loss) for _ in range(4)]
        dist.all_gather(told, loss.detach())
        if rank == 0:
            print(step, [round(t.item(), 3) for t in told])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
