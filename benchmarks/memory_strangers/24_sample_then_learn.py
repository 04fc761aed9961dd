"""Expert iteration: sample with a KV cache in a loop of one's own, keep the better half, learn from it."""

import json

import torch
import torch.nn.functional as F
from transformers import DynamicCache, HeliumConfig, HeliumForCausalLM

PROMPTS, PROMPT, NEW = 48, 256, 40

torch.manual_seed(0)
config = HeliumConfig(
    vocab_size=48000,
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=12,
    num_key_value_heads=12,
    head_dim=128,
)
model = HeliumForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


@torch.no_grad()
def sample(ids):
    cache, step, scores = DynamicCache(), ids, torch.zeros(len(ids), device="cuda")
    for _ in range(NEW):
        logits = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        kept = logits.topk(50).values[:, -1:]
        step = torch.multinomial(F.softmax(logits.masked_fill(logits < kept, -torch.inf), -1), 1)
        scores += F.log_softmax(logits, -1).gather(1, step).squeeze(1)
        ids = torch.cat([ids, step], 1)
    return ids, scores


for round in range(2):
    prompts = torch.randint(0, 48000, (PROMPTS, PROMPT), device="cuda")
    model.eval()
    ids, scores = sample(prompts)
    best = ids[scores.topk(PROMPTS // 2).indices]
    model.train()
    for part in best.split(12):
        labels = part.clone()
        labels[:, :PROMPT] = -100
        loss = model(part, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(round, scores.mean().item(), loss.item())
print(
    json.dumps(
        {
            "max_memory_allocated": torch.cuda.max_memory_allocated(),
            "max_memory_reserved": torch.cuda.max_memory_reserved(),
        }
    )
)
