"""All weights of a small Mixtral, with the router's auxiliary loss."""
import json

import torch
from transformers import MixtralConfig, MixtralForCausalLM, get_cosine_schedule_with_warmup

VOCAB, HIDDEN, WIDE, LAYERS, EXPERTS = 32000, 1024, 3584, 6, 8
BATCH, LENGTH, STEPS = 4, 1024, 3

config = MixtralConfig(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS,
    num_attention_heads=16, num_key_value_heads=4, num_local_experts=EXPERTS, num_experts_per_tok=2,
    output_router_logits=True,
)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = MixtralForCausalLM(config)
torch.set_default_dtype(torch.float32)
print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters")

opt = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
sched = get_cosine_schedule_with_warmup(opt, 1, STEPS)
model.train()
for i in range(STEPS):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH)).cuda()
    output = model(ids, attention_mask=torch.ones_like(ids), labels=ids)
    output.loss.backward()
    opt.step()
    sched.step()
    opt.zero_grad(set_to_none=True)
    print(i, float(output.loss), float(output.aux_loss))

stats = torch.cuda.memory_stats()
print(json.dumps({"max_memory_allocated": stats["allocated_bytes.all.peak"],
                  "max_memory_reserved": stats["reserved_bytes.all.peak"]}))
