"""Llama 1B in bf16, each decoder layer compiled by layer.compile(), checkpointing by transformers, fused AdamW."""
import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 2048, 16, 32, 8192, 128256
BATCH, LENGTH, STEPS = 4, 2048, 4

torch.manual_seed(0)
config = LlamaConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=8,
                     intermediate_size=WIDE, vocab_size=VOCAB, tie_word_embeddings=True, dtype="bfloat16",
                     max_position_embeddings=8192)
with torch.device("cuda"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.config.use_cache = False
model.train()
for layer in model.model.layers:
    layer.compile()

opt = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
for step in range(STEPS):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    sched.step()
    opt.zero_grad()
    print(step, out.loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
