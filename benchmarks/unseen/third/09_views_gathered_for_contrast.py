import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class TwoViews(Dataset):
    def __init__(self, n=48):
        self.base = torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.base)

    def augment(self, x):
        x = x + 0.1 * torch.randn_like(x)
        return x.flip(-1) if torch.rand(()) < 0.5 else x

    def __getitem__(self, i):
        return self.augment(self.base[i]), self.augment(self.base[i])


class SimCLR(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, dim, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.projector = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 16))

    def forward(self, x):
        return F.normalize(self.projector(self.encoder(x)), dim=-1)


def gather_from_all(z):
    gathered = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, z.contiguous())
    return torch.cat(gathered)


def nt_xent(z1, z2, temperature=0.2):
    z1, z2 = gather_from_all(z1), gather_from_all(z2)
    n = z1.size(0)
    z = torch.cat([z1, z2])
    sim = z @ z.t() / temperature
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), float("-inf"))
    positives = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(sim, positives)


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend="nccl")
    torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank)
    torch.manual_seed(100 + dist.get_rank())

    data = TwoViews()
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    model = DistributedDataParallel(SimCLR().to(device), device_ids=[local_rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for view1, view2 in loader:
            view1, view2 = view1.to(device), view2.to(device)
            z1, z2 = model(torch.cat([view1, view2])).chunk(2)
            loss = nt_xent(z1, z2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if local_rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
