"""Every figure of torch.cuda that a logging helper asks for, held to what CUDA's caching allocator gives."""
import torch

MB = 2**20
dev = torch.device("cuda", 0)
assert torch.cuda.memory_allocated() == 0
free0, total = torch.cuda.mem_get_info(dev)
big = torch.empty(1000, 1000, device=dev)  # 4,000,000 bytes: rounded to 512, cut from a segment of 20 MiB
assert torch.cuda.memory_allocated(dev) == 4_000_256, torch.cuda.memory_allocated(dev)
assert torch.cuda.memory_reserved(0) == 20 * MB
small = [torch.zeros(10, device="cuda") for _ in range(3)]
assert torch.cuda.memory_allocated("cuda") == 4_000_256 + 3 * 512
assert torch.cuda.memory_reserved() == 22 * MB
free1, _ = torch.cuda.mem_get_info()
assert free0 - free1 == 22 * MB, (free0, free1)
stats = torch.cuda.memory_stats()
assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
assert stats["allocation.small_pool.current"] == 3 and stats["allocation.large_pool.current"] == 1
assert stats["segment.all.current"] == 2 and stats["num_ooms"] == 0
assert stats["requested_bytes.all.current"] == 4_000_000 + 3 * 40
shot = torch.cuda.memory_snapshot()
assert sorted(s["total_size"] for s in shot) == [2 * MB, 20 * MB]
assert sum(b["size"] for s in shot for b in s["blocks"] if b["state"] == "active_allocated") == torch.cuda.memory_allocated()
peaks = []
for n in (64, 512, 128):
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    x = torch.randn(n, 1024, device=dev)
    y = x @ x.T
    del x, y
    peaks.append(torch.cuda.max_memory_allocated(dev) - base)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == base
assert peaks[1] > peaks[2] > peaks[0], peaks
del big
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(0.01)
try:
    torch.empty(int(total * 0.02), dtype=torch.uint8, device=dev)
    raise SystemExit("the fraction was not obeyed")
except torch.cuda.OutOfMemoryError as error:
    assert "CUDA out of memory" in str(error)
assert torch.cuda.memory_stats()["num_ooms"] == 1
torch.cuda.set_per_process_memory_fraction(1.0)
text = torch.cuda.memory_summary(abbreviated=True)
assert "PyTorch CUDA memory summary" in text and "Allocated memory" in text
torch.cuda.reset_accumulated_memory_stats()
assert torch.cuda.memory_stats()["allocation.all.allocated"] == 0
print("all figures as CUDA gives them")
