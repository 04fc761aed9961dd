"""Shares its card with another job (half each); when it is full, writes down the allocator's state and raises again."""
import torch
from torch import nn

torch.cuda.set_per_process_memory_fraction(0.5)
batch_size, width = 65536, 8192
net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU()))).cuda()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)


def train(steps):
    for step in range(steps):
        x = torch.randn(batch_size, width, device="cuda")
        y = net(x)
        loss = (y - x).abs().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(step, loss.item(), torch.cuda.max_memory_allocated() >> 20, "MiB")


try:
    train(3)
except torch.OutOfMemoryError:
    print(torch.cuda.memory_summary(abbreviated=True))
    segments = torch.cuda.memory_snapshot()
    largest = sorted((b["size"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated"), reverse=True)
    print("segments", len(segments), "largest", [size >> 20 for size in largest[:5]])
    print("free", torch.cuda.mem_get_info()[0] >> 20, "peak", torch.cuda.max_memory_allocated() >> 20)
    raise
