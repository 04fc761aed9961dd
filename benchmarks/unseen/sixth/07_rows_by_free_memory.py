"""Measures what a row takes, asks the card what is free, and takes as many rows as fit with some to spare."""
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
                     vocab_size=50304, max_position_embeddings=1024)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model.train()


def step(rows):
    ids = torch.randint(0, 50304, (rows, 512), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def peak(rows):
    torch.cuda.reset_peak_memory_stats()
    step(rows)
    return torch.cuda.max_memory_allocated()


step(4)  # the optimizer's state is there from now on
few, more = peak(8), peak(16)
per_row = (more - few) / 8
assert per_row > 50e6, per_row
fixed = few - 8 * per_row
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
room = free + torch.cuda.memory_reserved()
assert room <= total
rows = int((0.85 * room - fixed) / per_row)
print(f"{per_row / 2**20:.0f} MiB a row, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free: {rows} rows")
assert rows > 16
for _ in range(2):
    used = peak(rows)
    assert 0.75 * room < used < 0.95 * room, (used, room)
assert torch.cuda.max_memory_reserved() <= total
