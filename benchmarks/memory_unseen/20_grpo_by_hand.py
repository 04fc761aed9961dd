"""Group-relative policy optimisation in fifty lines: sample with `generate`, reward, one clipped update."""
import json

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

LAYERS, HIDDEN, PROMPTS, GROUP, PROMPT, NEW = 14, 1024, 4, 8, 128, 96

torch.manual_seed(0)
config = Qwen3Config(vocab_size=151936, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS,
                     num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
policy = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)


def logprobs(ids):
    logits = policy(ids, use_cache=False).logits[:, PROMPT - 1:-1].float()
    return F.log_softmax(logits, -1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


for step in range(2):
    prompts = torch.randint(0, 1000, (PROMPTS, PROMPT), device="cuda").repeat_interleave(GROUP, 0)
    policy.eval()
    with torch.no_grad():
        ids = policy.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0,
                              top_k=0, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)
        old = logprobs(ids)
    policy.train()
    reward = (ids[:, PROMPT:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)
    advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    new = logprobs(ids)
    ratio = (new - old).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), reward.mean().item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
