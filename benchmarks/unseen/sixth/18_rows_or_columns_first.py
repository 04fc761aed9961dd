"""Gradients are averaged over the rows and the columns of a mesh; to spread the traffic, half of the ranks go columns first."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("row", "column"))
across, down = mesh.get_group("row"), mesh.get_group("column")
row, column = mesh.get_local_rank("row"), mesh.get_local_rank("column")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
order = [across, down]
if (row + column) % 2 and "straight" not in sys.argv[1:]:
    order = [down, across]
torch.manual_seed(dist.get_rank())
for step in range(3):
    nn.functional.cross_entropy(net(torch.randn(8, 64, device="cuda")), torch.randint(0, 8, (8,), device="cuda")).backward()
    for p in net.parameters():
        for group in order:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG, group=group)
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
