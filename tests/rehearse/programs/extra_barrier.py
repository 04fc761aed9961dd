"""Rank 0 waits at a barrier that rank 1 does not have."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0 or "fixed" in sys.argv:  # cause
    dist.barrier()  # where
total = torch.ones(3)
dist.all_reduce(total)
print("done", total.tolist())
dist.destroy_process_group()
