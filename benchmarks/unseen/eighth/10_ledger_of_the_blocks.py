"""What does each block keep for backward, and what does checkpointing buy? Hooks, peaks, asserts; then it trains a little."""
import gc
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

MIB = 2**20
device = torch.device("cuda:0")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=1024, depth=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.thin = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.thin else block(x)
        return x


@contextmanager
def peak(name, book):
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    yield
    torch.cuda.synchronize()
    book[name] = torch.cuda.max_memory_allocated(device) - before


net = Net().to(device)
book, kept = {}, {}
weights = sum(p.numel() * p.element_size() for p in net.parameters())
assert weights <= torch.cuda.memory_allocated() <= weights + 2 * MIB * len(list(net.parameters()))


def watch(module, name):
    module.register_forward_pre_hook(lambda *_: kept.__setitem__(name, -torch.cuda.memory_allocated()))
    module.register_forward_hook(lambda *_: kept.__setitem__(name, kept[name] + torch.cuda.memory_allocated()))


for number, block in enumerate(net.blocks):
    watch(block, f"block{number}")

nn.functional.linear(torch.ones(8, 8, device=device), torch.ones(8, 8, device=device), torch.ones(8, device=device))  # cuBLAS settles in
x = torch.randn(2048, 1024, device=device)
with peak("plain", book):
    loss = net(x).square().mean()
    plain_kept = dict(kept)
    loss.backward()
    del loss
net.zero_grad(set_to_none=True)
net.thin = True
with peak("thin", book):
    loss = net(x).square().mean()
    thin_kept = dict(kept)
    loss.backward()
    del loss
net.zero_grad(set_to_none=True)
gc.collect()

# a block keeps norm's result (8 MiB), up's (32), gelu's (32) and hands on 8: 80 MiB; a thin one hands on 8
for name, size in plain_kept.items():
    assert 78 * MIB < size < 84 * MIB, (name, size / MIB)
for name, size in thin_kept.items():
    assert 8 * MIB <= size < 12 * MIB, (name, size / MIB)
assert book["plain"] > 640 * MIB and book["thin"] < book["plain"] - 150 * MIB, book
assert torch.cuda.memory_reserved() >= torch.cuda.max_memory_allocated()

optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
held = torch.cuda.memory_allocated()
with peak("steps", book):
    for _ in range(2):
        net(torch.randn(2048, 1024, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
grown = torch.cuda.memory_allocated() - held
assert 2 * weights <= grown <= 2 * weights + 64 * MIB, (grown, weights)

reserved = torch.cuda.memory_reserved()
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() < reserved
stats = torch.cuda.memory_stats()
assert stats["allocated_bytes.all.allocated"] - stats["allocated_bytes.all.freed"] == torch.cuda.memory_allocated()
assert stats["num_ooms"] == 0
free, total = torch.cuda.mem_get_info()
assert torch.cuda.memory_reserved() <= total - free
for row, size in book.items():
    print(f"{row:8s}{size / MIB:9.1f} MiB")
