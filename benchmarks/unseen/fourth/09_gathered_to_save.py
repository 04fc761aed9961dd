"""FSDP2 over four GPUs: trains sharded, then gathers the whole state on every GPU to save it."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
with torch.device("meta"):
    net = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(24)))
for layer in net:
    fully_shard(layer)
fully_shard(net)
net.to_empty(device="cuda")
for p in net.parameters():
    nn.init.normal_(p, std=0.01)
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
for _ in range(2):
    net(torch.randn(16, 8192, device="cuda")).pow(2).mean().backward()
    opt.step()
    opt.zero_grad()
options = StateDictOptions(full_state_dict=True, cpu_offload=False)
weights, state = get_state_dict(net, opt, options=options)
if rank == 0:
    print(len(weights), len(state))
dist.barrier()
dist.destroy_process_group()
