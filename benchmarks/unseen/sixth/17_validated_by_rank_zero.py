"""FSDP2 on four ranks; after each epoch rank 0 validates while the others wait (all: every rank validates its part)."""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
net = nn.Sequential(nn.Embedding(512, 128), *(nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True) for _ in range(2)),
                    nn.Linear(128, 512)).cuda()
policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
for layer in net[1:3]:
    fully_shard(layer, mp_policy=policy)
fully_shard(net, mp_policy=policy)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)


def validate(batches):
    net.eval()
    total = torch.zeros((), device="cuda")
    with torch.no_grad():
        for _ in range(batches):
            ids = torch.randint(0, 512, (4, 16), device="cuda")
            total += nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    net.train()
    return total / batches


for epoch in range(2):
    for _ in range(2):
        ids = torch.randint(0, 512, (4, 16), device="cuda")
        nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
        opt.step()
        opt.zero_grad()
    if "all" in sys.argv[1:]:
        score = validate(2)
        dist.all_reduce(score, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(epoch, score.item())
    elif rank == 0:
        print(epoch, validate(8).item())
    dist.barrier()
dist.destroy_process_group()
