"""Only rank 0 reads the checkpoint (the file server hates us), the others get it by broadcast.   [copy]"""
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FILE = "pretrained.pt"


def build():
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10),
    )


def load_on_first(model, rank):
    if rank == 0:
        state = torch.load(FILE, map_location="cuda", weights_only=True)
        model.load_state_dict(state, assign="copy" not in sys.argv[1:])
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if rank == 0:
        torch.save(build().state_dict(), FILE)  # stands for the download
    dist.barrier()

    torch.manual_seed(0)
    model = build().to(device="cuda", dtype=torch.bfloat16)
    load_on_first(model, rank)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    rows = torch.Generator().manual_seed(rank)
    for _ in range(3):
        images = torch.randn(8, 3, 64, 64, generator=rows).to("cuda", torch.bfloat16)
        wanted = torch.randint(0, 10, (8,), generator=rows).cuda()
        loss = nn.functional.cross_entropy(net(images).float(), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
