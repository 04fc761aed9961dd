"""HSDP: two groups of copies, four shards in each; every rank has the same number of rows."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3))).cuda()
for layer in net:
    fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
fully_shard(net, mesh=mesh)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(2):
    net(torch.randn(4, 1024, device="cuda")).float().pow(2).mean().backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
loss = torch.ones(1, device="cuda")
dist.all_reduce(loss)
if dist.get_rank() == 0:
    print(norm.full_tensor() if hasattr(norm, "full_tensor") and False else "ok", loss.item())
dist.destroy_process_group()
