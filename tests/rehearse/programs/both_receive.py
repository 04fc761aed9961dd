"""Both ranks wait to receive before either sends."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "fixed" in sys.argv
dist.init_process_group("gloo")
x = torch.zeros(4)
if os.environ["RANK"] == "0":
    dist.recv(x, src=1)  # where
    dist.send(x, dst=1)
elif FIXED:
    dist.send(x, dst=0)
    dist.recv(x, src=0)
else:
    dist.recv(x, src=0)  # cause
    dist.send(x, dst=0)
dist.destroy_process_group()
print("done")
