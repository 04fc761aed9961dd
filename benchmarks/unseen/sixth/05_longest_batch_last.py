"""Rows sorted by length, the longest last (or first); a batch that does not fit is left out, the rest trains the model."""
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
                     vocab_size=50304, max_position_embeddings=4096)
model = LlamaForCausalLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
model.train()
lengths = [128, 192, 256, 384, 2560]
if "first" in sys.argv[1:]:
    lengths.reverse()
left_out = 0
for step, length in enumerate(lengths):
    ids = torch.randint(0, 50304, (8, length), device="cuda")
    try:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    except torch.cuda.OutOfMemoryError:
        print(f"step {step}: 8 rows of {length} do not fit, left out")
        left_out += 1
        ids = loss = None
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        continue
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(f"{left_out} of {len(lengths)} batches left out")
model.save_pretrained("trained")
