import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset


class ShardedClips(Dataset):
    """Every process reads its own part of the clips."""

    def __init__(self, rank, world_size, total=49):
        generator = torch.Generator().manual_seed(1)
        clips = torch.randn(total, 8, 40, generator=generator)
        labels = torch.randint(0, 6, (total,), generator=generator)
        self.clips = clips[rank::world_size]
        self.labels = labels[rank::world_size]

    def __len__(self):
        return len(self.clips)

    def __getitem__(self, i):
        return self.clips[i], self.labels[i]


class KeywordNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(40, 32, batch_first=True)
        self.fc = nn.Linear(32, 6)

    def forward(self, x):
        return self.fc(self.gru(x)[1][-1])


def worker(rank, world_size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DDP(KeywordNet().cuda(rank), device_ids=[rank])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(ShardedClips(rank, world_size), batch_size=4, shuffle=True)
    for epoch in range(2):
        for clips, labels in loader:
            loss = F.cross_entropy(model(clips.cuda(rank)), labels.cuda(rank))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, args=(2, port), nprocs=2)
