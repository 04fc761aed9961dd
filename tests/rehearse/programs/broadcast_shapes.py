"""Rank 1 broadcasts into a tensor of another size."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
size = 4 if "fixed" in sys.argv else 4 + rank
state = torch.zeros(size, device="cuda")  # cause
dist.broadcast(state, src=0)  # where
print("done", dist.get_backend(), state.device)
dist.destroy_process_group()
