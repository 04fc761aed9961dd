"""Gemma 2 with soft-capped eager attention and a Lion optimizer written by hand."""
import json

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

LAYERS, HIDDEN, VOCAB, BATCH, LENGTH = 8, 1536, 100000, 2, 1536


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = m * b1 + p.grad * (1 - b1)
                p.add_(update.sign_(), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


config = Gemma2Config(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
                      num_attention_heads=8, num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256,
                      sliding_window=512, attn_implementation="eager")
model = Gemma2ForCausalLM(config).to("cuda", torch.bfloat16).train()
optimizer = Lion(model.parameters(), lr=1e-5, weight_decay=0.1)
for step in range(3):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
