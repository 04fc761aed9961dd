"""Ragged lengths over many steps with expandable segments, a Qwen2 0.5B in bf16, all weights, emptying now and then."""
import json
import os
import random

os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 896, 24, 14, 4864, 151936
BATCH, LONGEST, STEPS = 4, 1800, 24

random.seed(4)
config = Qwen2Config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=2,
                     intermediate_size=WIDE, vocab_size=VOCAB, tie_word_embeddings=True, use_cache=False)
model = Qwen2ForCausalLM(config).to("cuda", torch.bfloat16)
model.train()
opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(STEPS):
    lengths = [random.randint(LONGEST // 12, LONGEST) for _ in range(BATCH)]
    ids = torch.full((BATCH, max(lengths)), 0)
    mask = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        ids[row, :n] = torch.randint(1, VOCAB, (n,))
        mask[row, :n] = 1
    ids, mask = ids.to("cuda"), mask.to("cuda")
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    if step % 8 == 7:
        torch.cuda.empty_cache()
        print(step, loss.item(), torch.cuda.memory_reserved() >> 20)
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
