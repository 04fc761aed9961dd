"""The group is made by a device mesh; one rank averages once more than the other."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

init_device_mesh("cuda", (2,))
total = torch.ones(2, device="cuda")
for _ in range(2 if "fixed" in sys.argv else 1 + dist.get_rank()):  # cause
    dist.all_reduce(total)
if dist.get_rank() == 0 or "fixed" in sys.argv:
    dist.barrier()  # where
dist.destroy_process_group()
print("done")
