"""LoRA by PEFT on the experts' own parameters of an OLMoE, and on its attention, with gradient checkpointing."""

import json

import torch
from peft import LoraConfig, get_peft_model
from transformers import OlmoeConfig, OlmoeForCausalLM

config = OlmoeConfig(
    vocab_size=50304,
    hidden_size=1024,
    intermediate_size=1024,
    num_hidden_layers=10,
    num_attention_heads=16,
    num_key_value_heads=16,
    num_experts=32,
    num_experts_per_tok=4,
    output_router_logits=True,
)
model = OlmoeForCausalLM(config).to("cuda", torch.bfloat16)
model = get_peft_model(
    model,
    LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
)
model.print_trainable_parameters()
model.gradient_checkpointing_enable({"use_reentrant": False})
model.enable_input_require_grads()
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-4)
model.train()
for step in range(3):
    ids = torch.randint(0, 50304, (8, 1024), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
