"""Continue pre-training of a small Mistral with a sliding window, bf16 weights, AdamW."""
import json

import torch
from transformers import MistralConfig, MistralForCausalLM

LAYERS, HIDDEN, WINDOW, BATCH, LENGTH = 12, 2048, 1024, 2, 4096

torch.manual_seed(0)
config = MistralConfig(
    vocab_size=32000, hidden_size=HIDDEN, intermediate_size=HIDDEN * 7 // 2, num_hidden_layers=LAYERS,
    num_attention_heads=HIDDEN // 64, num_key_value_heads=8, sliding_window=WINDOW, max_position_embeddings=8192,
)
model = MistralForCausalLM(config).to(torch.bfloat16).cuda()
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)

for step in range(3):
    input_ids = torch.randint(0, config.vocab_size, (BATCH, LENGTH), device="cuda")
    out = model(input_ids=input_ids, labels=input_ids, use_cache=False)
    out.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {out.loss.item():.3f} norm {norm.item():.2f}")

print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
