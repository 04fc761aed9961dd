"""A pipeline of four stages, 1F1B, eight micro-batches, by torch.distributed.pipelining."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
part = nn.Sequential(*(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(2))).to(device)
stage = PipelineStage(part, rank, world, device)
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
opt = torch.optim.AdamW(part.parameters(), lr=1e-3)
for _ in range(2):
    x = torch.randn(32, 512, device=device)
    if rank == 0:
        schedule.step(x)
    elif rank == world - 1:
        losses = []
        schedule.step(target=x, losses=losses)
        print(torch.stack(losses).mean().item())
    else:
        schedule.step()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
