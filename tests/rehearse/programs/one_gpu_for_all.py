"""Every rank uses the first GPU, because set_device is missing."""

import os
import sys

import torch
import torch.distributed as dist

if "visible" in sys.argv:  # each rank sees a GPU of its own, and calls it the first
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
dist.init_process_group("nccl")
if "fixed" in sys.argv:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
total = torch.ones(2, device="cuda")  # cause
dist.all_reduce(total)  # where
print("done", total.tolist())
dist.destroy_process_group()
