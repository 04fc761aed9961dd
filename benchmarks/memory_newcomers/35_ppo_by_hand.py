"""PPO by hand: a policy with a value head, a frozen copy, sampling with a cache, advantages, several passes."""
import copy
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, LAYERS, HEADS, WIDE, VOCAB = 1024, 16, 16, 2816, 49152
PROMPTS, PROMPT, ANSWER, MINI, PASSES, ROUNDS = 32, 64, 96, 8, 2, 2


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.lm = LlamaForCausalLM(LlamaConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                                               intermediate_size=WIDE, vocab_size=VOCAB, pad_token_id=0, eos_token_id=None))
        self.value = nn.Linear(HIDDEN, 1)

    def forward(self, ids):
        out = self.lm(input_ids=ids, output_hidden_states=True, use_cache=False)
        return out.logits, self.value(out.hidden_states[-1]).squeeze(-1)


def logprobs(logits, ids):
    return F.log_softmax(logits[:, PROMPT - 1:-1].float(), -1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


torch.manual_seed(0)
policy = Policy().to("cuda", torch.bfloat16)
frozen = copy.deepcopy(policy.lm).eval().requires_grad_(False)
opt = torch.optim.Adam(policy.parameters(), lr=1e-6, eps=1e-5)
for turn in range(ROUNDS):
    prompts = torch.randint(1, VOCAB, (PROMPTS, PROMPT), device="cuda")
    policy.eval()
    with torch.no_grad():
        ids = policy.lm.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=50,
                                 min_new_tokens=ANSWER, max_new_tokens=ANSWER)
        old, values, ref = [], [], []
        for part in ids.split(MINI):
            logits, v = policy(part)
            old.append(logprobs(logits, part))
            values.append(v[:, PROMPT - 1:-1].float())
            ref.append(logprobs(frozen(input_ids=part, use_cache=False).logits, part))
            del logits
        old, values, ref = torch.cat(old), torch.cat(values), torch.cat(ref)
        rewards = -0.05 * (old - ref)
        rewards[:, -1] += (ids[:, PROMPT:] % 7 == 0).float().mean(-1)
        gains, last = [], torch.zeros(PROMPTS, device="cuda")
        for t in reversed(range(ANSWER)):
            after = values[:, t + 1] if t + 1 < ANSWER else torch.zeros_like(last)
            last = rewards[:, t] + after - values[:, t] + 0.95 * last
            gains.append(last)
        gains = torch.stack(gains[::-1], 1)
        returns = gains + values
        gains = (gains - gains.mean()) / (gains.std() + 1e-8)
    policy.train()
    for _ in range(PASSES):
        for rows in torch.randperm(PROMPTS).split(MINI):
            rows = rows.to("cuda")
            logits, v = policy(ids[rows])
            ratio = (logprobs(logits, ids[rows]) - old[rows]).exp()
            g = gains[rows]
            loss = -torch.min(ratio * g, ratio.clamp(0.8, 1.2) * g).mean()
            loss = loss + 0.1 * F.mse_loss(v[:, PROMPT - 1:-1].float(), returns[rows])
            p = F.softmax(logits[:, PROMPT - 1:-1].float(), -1)
            loss = loss - 0.01 * -(p * (p + 1e-9).log()).sum(-1).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    print(turn, loss.item(), rewards.sum(1).mean().item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
