"""OPT in bf16 with transformers' Adafactor; embeddings frozen."""
import json

import torch
from transformers import OPTConfig, OPTForCausalLM
from transformers.optimization import Adafactor

LAYERS, HIDDEN, BATCH, LENGTH = 24, 2048, 8, 768

config = OPTConfig(vocab_size=50272, hidden_size=HIDDEN, word_embed_proj_dim=HIDDEN, ffn_dim=4 * HIDDEN,
                   num_hidden_layers=LAYERS, num_attention_heads=HIDDEN // 64, dropout=0.1)
model = OPTForCausalLM(config).bfloat16().to("cuda")
for name, parameter in model.named_parameters():
    if "embed" in name:
        parameter.requires_grad = False
optimizer = Adafactor([p for p in model.parameters() if p.requires_grad], lr=1e-3, relative_step=False,
                      scale_parameter=False, warmup_init=False)
model.train()
for step in range(3):
    ids = torch.randint(4, 50000, (BATCH, LENGTH), device="cuda")
    loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), torch.cuda.memory_allocated() // 2**20, "MiB")
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
