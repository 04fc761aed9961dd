"""Rank 1 has no data left and returns, while rank 0 still averages."""

import sys

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    for step in range(3):
        if step == 2 and rank == 1 and "fixed" not in sys.argv:  # cause
            return
        total = torch.ones(2, device="cuda")
        dist.all_reduce(total)  # where
    print("done", total.tolist())
    dist.destroy_process_group()


main()
