"""A Mamba language model through transformers, without the fast kernels."""
import json

import torch
from transformers import MambaConfig, MambaForCausalLM

LAYERS, HIDDEN, BATCH, LENGTH = 4, 768, 8, 128

config = MambaConfig(vocab_size=50280, hidden_size=HIDDEN, num_hidden_layers=LAYERS, state_size=16, use_cache=False)
model = MambaForCausalLM(config).to("cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    ids = torch.randint(0, 50280, (BATCH, LENGTH), device="cuda")
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
