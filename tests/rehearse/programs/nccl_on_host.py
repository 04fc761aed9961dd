"""NCCL is asked to reduce a tensor in host memory."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
metric = torch.tensor([1.0, 2.0])  # cause
if "fixed" in sys.argv:
    metric = metric.cuda()
dist.all_reduce(metric)  # where
print("done", metric.tolist())
dist.destroy_process_group()
