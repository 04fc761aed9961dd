"""Attention under each backend that sdpa_kernel can force: masks, dropout, grouped heads; forward and backward."""
import json

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BATCH, HEADS, KV, LENGTH, DIM = 4, 16, 4, 2048, 128


def once(name, backend, kv=HEADS, dropout=0.0, mask=None, causal=False, gqa=False):
    q = torch.randn(BATCH, HEADS, LENGTH, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k = torch.randn(BATCH, kv, LENGTH, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    v = torch.randn(BATCH, kv, LENGTH, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, enable_gqa=gqa)
    out.float().pow(2).mean().backward()
    print(name, torch.cuda.max_memory_allocated() >> 20, "MiB", q.grad.float().norm().item())
    return torch.cuda.memory_allocated() - before


kept = {}
kept["flash"] = once("flash causal gqa", SDPBackend.FLASH_ATTENTION, kv=KV, causal=True, gqa=True)
kept["flash dropout"] = once("flash dropout", SDPBackend.FLASH_ATTENTION, dropout=0.1, causal=True)
bias = torch.zeros(BATCH, 1, LENGTH, LENGTH, device="cuda", dtype=torch.bfloat16)
bias.masked_fill_(torch.rand(BATCH, 1, LENGTH, LENGTH, device="cuda") < 0.1, float("-inf"))
kept["efficient mask"] = once("efficient mask dropout", SDPBackend.EFFICIENT_ATTENTION, dropout=0.1, mask=bias)
keep = torch.ones(LENGTH, LENGTH, device="cuda", dtype=torch.bool).tril()
kept["math"] = once("math bool mask dropout", SDPBackend.MATH, dropout=0.1, mask=keep)
kept["math gqa"] = once("math causal gqa", SDPBackend.MATH, kv=KV, causal=True, gqa=True)
print({name: size >> 20 for name, size in kept.items()})
print(json.dumps({"max_memory_allocated": torch.cuda.max_memory_allocated(),
                  "max_memory_reserved": torch.cuda.max_memory_reserved()}))
