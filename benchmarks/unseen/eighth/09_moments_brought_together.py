"""DDP with ZeroRedundancyOptimizer; the optimizer goes into the checkpoint after each epoch.

$ torchrun --nproc_per_node 2 09_moments_brought_together.py          # hangs in the first save ??
$ torchrun --nproc_per_node 2 09_moments_brought_together.py everyone
"""
import os
import sys
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def save_checkpoint(path, model, optimizer, epoch):
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torch.save({"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)


def train():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))

    torch.manual_seed(42)
    data = TensorDataset(torch.randn(64, 20), torch.randn(64, 1))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=8, sampler=sampler, pin_memory=True)

    model = torch.nn.Sequential(torch.nn.Linear(20, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)).to(local_rank)
    model = DDP(model, device_ids=[local_rank])
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    mse = torch.nn.MSELoss()

    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(local_rank, non_blocking=True), y.to(local_rank, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            mse(model(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0 or "everyone" in sys.argv:
            save_checkpoint("zero.pt", model, optimizer, epoch)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
