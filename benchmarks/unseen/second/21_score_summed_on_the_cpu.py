import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class AverageMeter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    def all_reduce(self):
        packed = torch.tensor([self.total, self.count], dtype=torch.float32)
        dist.all_reduce(packed, op=dist.ReduceOp.SUM)
        self.total, self.count = packed.tolist()

    @property
    def avg(self):
        return self.total / max(self.count, 1)


def train_one_epoch(model, optimizer, batches, meter):
    model.train()
    for x, y in batches:
        x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter.update(loss.item(), len(x))


def main_worker(rank, world_size, port):
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 2)).cuda(), device_ids=[rank])
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    batches = [(torch.randn(8, 10), torch.randn(8, 2)) for _ in range(5)]
    for epoch in range(2):
        meter = AverageMeter()
        train_one_epoch(model, optimizer, batches, meter)
        meter.all_reduce()
        if rank == 0:
            print(f"epoch {epoch} train loss {meter.avg:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    sock = socket.socket()
    sock.bind(("", 0))
    port = sock.getsockname()[1]
    sock.close()
    mp.spawn(main_worker, nprocs=2, args=(2, port))
