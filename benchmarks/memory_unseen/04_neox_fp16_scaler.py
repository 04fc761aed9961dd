"""GPT-NeoX (pythia's shape), fp32 weights, fp16 autocast and a GradScaler, evaluated every other step."""
import json

import torch
from torch.amp import GradScaler, autocast
from transformers import AutoModelForCausalLM, GPTNeoXConfig

LAYERS, HIDDEN, BATCH, LENGTH = 16, 1024, 8, 1024

cfg = GPTNeoXConfig(vocab_size=50304, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
                    num_attention_heads=HIDDEN // 64, max_position_embeddings=2048, attention_dropout=0.1,
                    hidden_dropout=0.1, use_cache=False)
model = AutoModelForCausalLM.from_config(cfg).to("cuda")
decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
rest = [p for n, p in model.named_parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=6e-4)
scaler = GradScaler("cuda")


@torch.no_grad()
def evaluate():
    model.eval()
    total = 0.0
    for _ in range(2):
        x = torch.randint(0, 50304, (2 * BATCH, LENGTH), device="cuda")
        with autocast("cuda", dtype=torch.float16):
            total += model(x, labels=x).loss.item()
    model.train()
    return total / 2


for step in range(4):
    x = torch.randint(0, 50304, (BATCH, LENGTH), device="cuda")
    with autocast("cuda", dtype=torch.float16):
        loss = model(x, labels=x).loss
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 2 == 1:
        print("val", evaluate())

print(torch.cuda.memory_summary(abbreviated=True))
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
