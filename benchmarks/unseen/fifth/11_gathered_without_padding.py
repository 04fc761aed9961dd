"""Hidden states of all ranks are gathered for a contrastive loss; how many there are hangs on the rank's own rows."""
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = nn.parallel.DistributedDataParallel(nn.Linear(128, 64).cuda())
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
lengths = [[30, 12, 21, 9], [14, 16, 24, 18]][rank % 2]
for step in range(2):
    rows = [torch.randn(n, 128) for n in lengths]
    kept = torch.cat([row[: 20 + step] for row in rows]).cuda()
    hidden = nn.functional.normalize(net(kept), dim=-1)
    others = funcol.all_gather_tensor(hidden.detach(), 0, dist.group.WORLD)
    (hidden @ others.T).logsumexp(-1).mean().backward()
    opt.step()
    opt.zero_grad()
dist.destroy_process_group()
