"""LoRA by hand on a 3B llama, eight micro-batches for each step.   python 11_one_backward_for_eight.py [each]"""
import sys

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

ACCUMULATE = 8


class LoRA(nn.Module):
    def __init__(self, linear, rank=16):
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(rank, linear.in_features, device=linear.weight.device, dtype=linear.weight.dtype) * 0.01)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank, device=linear.weight.device, dtype=linear.weight.dtype))

    def forward(self, x):
        return self.linear(x) + (x @ self.a.T) @ self.b.T


def add_lora(model):
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    return [p for p in model.parameters() if p.requires_grad]


def micro_batches():
    while True:
        yield torch.randint(0, 128256, (2, 1024), device="cuda")


model = LlamaForCausalLM(LlamaConfig(
    vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, use_cache=False)).to("cuda", torch.bfloat16)
trained = add_lora(model)
optimizer = torch.optim.AdamW(trained, lr=2e-4)
source = micro_batches()

for step in range(2):
    if "each" in sys.argv[1:]:
        total = 0.0
        for _ in range(ACCUMULATE):
            ids = next(source)
            loss = model(input_ids=ids, labels=ids).loss / ACCUMULATE
            loss.backward()
            total += loss.detach()
    else:
        losses = []
        for _ in range(ACCUMULATE):
            ids = next(source)
            losses.append(model(input_ids=ids, labels=ids).loss)
        total = torch.stack(losses).mean()
        total.backward()
        del losses
    optimizer.step()
    optimizer.zero_grad()
    print(step, float(total))
