"""Accelerate by hand: accumulation, autocast in bf16, clipping, a saved state, on StarCoder2 with fp32 weights."""

import json
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import Starcoder2Config, Starcoder2ForCausalLM, get_cosine_schedule_with_warmup

set_seed(1)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=3)
config = Starcoder2Config(
    vocab_size=49152,
    hidden_size=1280,
    intermediate_size=5120,
    num_hidden_layers=20,
    num_attention_heads=20,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)
model = Starcoder2ForCausalLM(config)
decay = [p for n, p in model.named_parameters() if p.dim() > 1]
rest = [p for n, p in model.named_parameters() if p.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=3e-4
)
rows = [torch.randint(0, 49152, (1536,)) for _ in range(30)]
loader = DataLoader(rows, batch_size=4, shuffle=True, drop_last=True, num_workers=2, pin_memory=True)
schedule = get_cosine_schedule_with_warmup(optimizer, 1, 10)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
model.train()
for ids in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    accelerator.print(accelerator.gather(loss.detach().repeat(4)).mean().item())
accelerator.save_state(tempfile.mkdtemp())
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
