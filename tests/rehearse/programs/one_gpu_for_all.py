"""Every rank uses the first GPU, because set_device is missing."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
if "fixed" in sys.argv:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
total = torch.ones(2, device="cuda")  # cause
dist.all_reduce(total)  # where
print("done", total.tolist())
dist.destroy_process_group()
