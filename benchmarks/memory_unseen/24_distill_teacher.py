"""A student distilled from a larger teacher: KL of the logits with temperature, plus hidden states' MSE."""
import json

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCAB, BIG, SMALL, BATCH, LENGTH, T = 50000, dict(hidden_size=2048, layers=12), dict(hidden_size=768, layers=8), 4, 768, 2.0


def build(hidden_size, layers):
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB, hidden_size=hidden_size, intermediate_size=4 * hidden_size, num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 64, use_cache=False))


teacher = build(**BIG).to("cuda", torch.bfloat16).eval().requires_grad_(False)
student = build(**SMALL).to("cuda")
project = torch.nn.Linear(SMALL["hidden_size"], BIG["hidden_size"]).to("cuda")
opt = torch.optim.AdamW([*student.parameters(), *project.parameters()], lr=1e-4)
for step in range(3):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
    with torch.no_grad():
        t = teacher(ids, output_hidden_states=True)
    with torch.autocast("cuda", torch.bfloat16):
        s = student(ids, labels=ids, output_hidden_states=True)
        hidden = F.mse_loss(project(s.hidden_states[-1]), t.hidden_states[-1])
    kl = F.kl_div(F.log_softmax(s.logits.float() / T, -1), F.log_softmax(t.logits.float() / T, -1),
                  log_target=True, reduction="batchmean") * T * T / LENGTH
    loss = 0.5 * s.loss + 0.5 * kl + 0.1 * hidden
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    print(step, s.loss.item(), kl.item(), hidden.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
