"""Masked language modelling with ModernBERT, bf16 autocast, padded rows, gradient accumulation by hand."""
import json

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

LAYERS, HIDDEN, BATCH, LENGTH, ACCUMULATE = 22, 768, 16, 1024, 2

config = ModernBertConfig(vocab_size=50368, hidden_size=HIDDEN, intermediate_size=HIDDEN * 3 // 2,
                          num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // 64)
model = ModernBertForMaskedLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-5, eps=1e-6)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
lengths = torch.linspace(LENGTH // 2, LENGTH, BATCH).long()
model.train()
for step in range(3):
    for micro in range(ACCUMULATE):
        ids = torch.randint(5, 50000, (BATCH, LENGTH))
        mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
        chosen = (torch.rand(BATCH, LENGTH) < 0.3) & mask.bool()
        labels = torch.where(chosen, ids, -100)
        ids[chosen] = 50284
        ids, mask, labels = ids.cuda(), mask.cuda(), labels.cuda()
        with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss / ACCUMULATE
        loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
