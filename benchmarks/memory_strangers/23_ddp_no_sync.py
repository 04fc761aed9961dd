"""One rank of DDP with accumulation under no_sync, gradients as views of the buckets, on an Exaone 4."""

import contextlib
import json
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Exaone4Config, Exaone4ForCausalLM

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", str(29600 + os.getpid() % 300))
dist.init_process_group("nccl", rank=0, world_size=1)
torch.cuda.set_device(0)
config = Exaone4Config(
    vocab_size=102400,
    hidden_size=2048,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
model = Exaone4ForCausalLM(config).to("cuda")
model = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True, static_graph=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
for step in range(3):
    for micro in range(4):
        ids = torch.randint(0, 102400, (2, 2048), device="cuda")
        with model.no_sync() if micro < 3 else contextlib.nullcontext():
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss / 4
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
dist.destroy_process_group()
