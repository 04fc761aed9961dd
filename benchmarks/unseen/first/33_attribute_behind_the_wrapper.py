import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Unet(nn.Module):
    def __init__(self, self_cond):
        super().__init__()
        self.self_cond = self_cond
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        return self.net(x)


class Imagen:
    def loss(self, unet, picture):
        noise = torch.randn_like(picture)
        noisy = picture + noise
        if unet.self_cond:
            with torch.no_grad():
                noisy = noisy - 0.1 * noise
        return (unet(noisy) - noise).pow(2).mean()


dist.init_process_group("nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)
torch.manual_seed(rank)
unet = DDP(Unet(self_cond=True).cuda(), device_ids=[rank])
optimizer = torch.optim.Adam(unet.parameters(), lr=1e-3)
imagen = Imagen()
for _ in range(2):
    loss = imagen.loss(unet, torch.rand(3, 4, device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
