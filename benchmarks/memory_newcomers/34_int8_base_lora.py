"""A frozen base in LLM.int8 by bitsandbytes' Linear8bitLt, LoRA by hand beside it, 8-bit AdamW."""
import json
import math

import bitsandbytes as bnb
import torch
import torch.nn as nn
from transformers import MistralConfig, MistralForCausalLM

HIDDEN, LAYERS, HEADS, WIDE, VOCAB, R = 3072, 8, 24, 8192, 32768, 16
BATCH, LENGTH, STEPS = 8, 1024, 3


class Adapted(nn.Module):
    def __init__(self, linear):
        super().__init__()
        base = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False, threshold=6.0)
        base.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        self.base = base
        self.a = nn.Parameter(torch.randn(R, linear.in_features) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, R))

    def forward(self, x):
        return self.base(x) + (x @ self.a.to(x.dtype).T) @ self.b.to(x.dtype).T * 2


torch.manual_seed(0)
torch.set_default_dtype(torch.float16)
config = MistralConfig(hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=8,
                       intermediate_size=WIDE, vocab_size=VOCAB, sliding_window=None, use_cache=False)
model = MistralForCausalLM(config)
torch.set_default_dtype(torch.float32)
model.requires_grad_(False)
for layer in model.model.layers:
    for part in (layer.self_attn, layer.mlp):
        for name, child in list(part.named_children()):
            if isinstance(child, nn.Linear):
                setattr(part, name, Adapted(child))
model.to("cuda")
model.train()
opt = bnb.optim.AdamW8bit([p for p in model.parameters() if p.requires_grad], lr=1e-4)
for step in range(STEPS):
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
