"""DeepSeek V3 in small: latent attention, one dense layer, then experts with a shared one."""
import json

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

LAYERS, HIDDEN, BATCH, LENGTH = 5, 1024, 4, 1024

config = DeepseekV3Config(
    vocab_size=64000, hidden_size=HIDDEN, intermediate_size=4096, moe_intermediate_size=768, num_hidden_layers=LAYERS,
    num_attention_heads=16, num_key_value_heads=16, n_shared_experts=1, n_routed_experts=16, num_experts_per_tok=4,
    n_group=4, topk_group=2, first_k_dense_replace=1, kv_lora_rank=256, q_lora_rank=512, qk_rope_head_dim=32,
    v_head_dim=64, qk_nope_head_dim=64,
)
model = DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16)
model = model.to("cuda").train()
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(params, lr=3e-4, foreach=True)

for step in range(3):
    tokens = torch.randint(0, 64000, (BATCH, LENGTH + 1), device="cuda")
    logits = model(tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().reshape(-1, 64000), tokens[:, 1:].reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    del logits
    print("loss", loss.item())

print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
