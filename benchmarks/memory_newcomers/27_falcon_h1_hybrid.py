"""Falcon-H1 (attention beside Mamba 2 in each layer) on transformers' own path, all weights, AdamW without foreach."""
import json

import torch
from transformers import FalconH1Config, FalconH1ForCausalLM

HIDDEN, LAYERS, WIDE, VOCAB, SSM = 1024, 12, 2048, 32784, 1536
BATCH, LENGTH, STEPS = 2, 1024, 3

torch.manual_seed(0)
config = FalconH1Config(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=2,
                        head_dim=64, intermediate_size=WIDE, vocab_size=VOCAB, mamba_d_ssm=SSM, mamba_n_heads=24,
                        mamba_d_head=SSM // 24, mamba_d_state=128, mamba_n_groups=1, mamba_chunk_size=128,
                        tie_word_embeddings=False, use_cache=False)
model = FalconH1ForCausalLM(config).to("cuda")
model.train()
opt = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
for step in range(STEPS):
    ids = torch.randint(1, VOCAB, (BATCH, LENGTH), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
