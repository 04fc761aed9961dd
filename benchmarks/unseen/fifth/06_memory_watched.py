"""Watches memory as profilers do: history, snapshot, statistics, peaks by stretch; asserts what CUDA promises."""
import os
import pickle

import torch
from torch import nn

MB = 1 << 20
torch.cuda.memory._record_memory_history(max_entries=10_000)
free, total = torch.cuda.mem_get_info()
assert 0 < free <= total
net = nn.Linear(1024, 1024, bias=False).cuda()
assert torch.cuda.memory_allocated() == 4 * MB
before = torch.cuda.memory_stats()["allocation.all.allocated"]
kept = torch.empty(3 * MB, dtype=torch.uint8, device="cuda")
odd = torch.empty(1000, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 2
assert torch.cuda.memory_allocated() == 7 * MB + 1024
stats = torch.cuda.memory_stats_as_nested_dict()
assert stats["requested_bytes"]["all"]["current"] == 7 * MB + 1000
assert stats["allocated_bytes"]["small_pool"]["current"] == 1024
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
big = torch.empty(64 * MB, dtype=torch.uint8, device="cuda")
del big
assert torch.cuda.max_memory_allocated() == 71 * MB + 1024
held = torch.cuda.memory_reserved()
assert held >= 64 * MB
torch.cuda.empty_cache()
assert torch.cuda.memory_reserved() <= held - 64 * MB
assert torch.cuda.max_memory_reserved() >= held
segments = torch.cuda.memory_snapshot()
assert sum(s["allocated_size"] for s in segments) == torch.cuda.memory_allocated()
assert sum(s["total_size"] for s in segments) == torch.cuda.memory_reserved()
assert all(sum(b["size"] for b in s["blocks"]) == s["total_size"] for s in segments)
history = torch.cuda.memory._snapshot()
traces = [entry for device in history["device_traces"] for entry in device]
assert {"alloc", "segment_alloc"} <= {entry["action"] for entry in traces}
torch.cuda.memory._dump_snapshot("watched.pickle")
with open("watched.pickle", "rb") as file:
    assert pickle.load(file)["segments"]
os.remove("watched.pickle")
torch.cuda.memory._record_memory_history(enabled=None)
torch.cuda.reset_accumulated_memory_stats()
assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
summary = torch.cuda.memory_summary(abbreviated=True)
assert "Allocated memory" in summary and "GPU reserved memory" in summary
opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    torch.cuda.reset_peak_memory_stats()
    net(torch.randn(64, 1024, device="cuda")).sum().backward()
    opt.step()
    opt.zero_grad()
    print(step, torch.cuda.max_memory_allocated())
again, _ = torch.cuda.mem_get_info()
assert total - again >= torch.cuda.memory_reserved()
