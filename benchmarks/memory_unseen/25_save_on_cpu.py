"""Activations offloaded to pinned host memory with save_on_cpu; ViT-like encoder in fp32 with TF32 products."""
import json

import torch
import torch.nn as nn
from torch.autograd.graph import save_on_cpu

DIM, DEPTH, TOKENS, BATCH = 1024, 8, 577, 16

torch.backends.cuda.matmul.allow_tf32 = True
layer = nn.TransformerEncoderLayer(DIM, DIM // 64, 4 * DIM, dropout=0.0, activation="gelu", batch_first=True,
                                   norm_first=True)
model = nn.Sequential(nn.Linear(768, DIM), nn.TransformerEncoder(layer, DEPTH, enable_nested_tensor=False),
                      nn.LayerNorm(DIM), nn.Linear(DIM, 1000)).to("cuda")
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    x = torch.randn(BATCH, TOKENS, 768, device="cuda")
    y = torch.randint(0, 1000, (BATCH,), device="cuda")
    with save_on_cpu(pin_memory=True):
        loss = nn.functional.cross_entropy(model(x).mean(1), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
