"""Qwen2-MoE with LoRA on attention only, frozen experts in bf16, non-re-entrant checkpointing."""
import json

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

LAYERS, HIDDEN, BATCH, LENGTH = 8, 1024, 4, 2048

config = Qwen2MoeConfig(vocab_size=100000, hidden_size=HIDDEN, intermediate_size=2816, num_hidden_layers=LAYERS,
                        num_attention_heads=16, num_key_value_heads=16, moe_intermediate_size=704,
                        shared_expert_intermediate_size=2816, num_experts=30, num_experts_per_tok=4)
model = Qwen2MoeForCausalLM(config).to(torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.enable_input_require_grads()
model.print_trainable_parameters()
model.cuda().train()
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-4)
for step in range(3):
    ids = torch.randint(0, 100000, (BATCH, LENGTH), device="cuda")
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
